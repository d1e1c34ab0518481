"""What people see: the display of a run, pictures, charts and pages.

Not here: anything that measures or computes.
"""
