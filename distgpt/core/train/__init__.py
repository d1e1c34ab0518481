"""Training: from the settings to a run that is ready on every rank, the loop, and one step.

Begin with loop.py and step.py. setup.py opens a run. The contracts of what can be replaced are in
sharing.py (how ranks share a step) and seams.py (policies and observers).
Not here: what is shown of a run (show/), and what commands make of it (commands/).
"""
