"""Output for people: the listeners of a run, pictures, charts, pages and tables.

Not here: anything that measures or computes. charts.py loads matplotlib only to draw.
"""
