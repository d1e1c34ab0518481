"""Output for people: listeners of a run, plots, pages and tables.

Not here: anything that measures or computes. Only plot.py imports matplotlib.
"""
