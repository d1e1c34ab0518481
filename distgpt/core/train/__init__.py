"""Training: the setup of a run on every rank, the loop, and one step.

Start with loop.py and step.py. setup.py opens a run. The interfaces of replaceable parts are in
parallel_strategy.py (how ranks share a step) and interfaces.py (policies and observers).

Not here: the display of a run (show/), and the commands (commands/).
"""
