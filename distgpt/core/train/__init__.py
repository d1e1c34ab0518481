"""Training: from the settings to a run that is ready on every rank, the loop, and one step.

Begin with loop.py and step.py. What a run is made of is set up by setup.py. What components hang on are two
pages of contracts: sharing.py (how ranks share a step) and seams.py (what answers and watches).
Not here: what is shown of a run (show/), and what commands make of it (commands/).
"""
