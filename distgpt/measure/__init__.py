"""Measurements: estimates, profiles, comparisons of stages, benchmarks of this machine, and what compiles.

They start what users start, or watch it; a run that trains imports only doctor/facts.py and
verification/kept.py from here.
Not here: how results are drawn (show/), and comparisons with other programs (benchmarks/ in the repository).
"""
