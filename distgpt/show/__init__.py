"""Output for people: the listeners of a run, pictures, pages and tables.

Not here: anything that measures or computes. Only plot.py loads matplotlib.
"""
