"""Training: from a configuration to a trainer that is ready on every rank, the loop, and one step.

Not here: what is shown of a run (show/), and what commands make of it (commands/).
"""
