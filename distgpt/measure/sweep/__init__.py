"""`distgpt sweep`: many short runs of one kind, which settings are best, and which end early.

Not here: how a run is opened and trained (core/train/), the settings themselves (core/config/).
"""
