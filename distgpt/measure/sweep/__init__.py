"""`distgpt sweep`: train many short runs with different settings, stop poor ones early, and report the best.

Not here: opening and training a run (core/train/), the settings themselves (core/config/).
"""
