"""Measurements: estimates, profiles, comparisons of stages, benchmarks of this machine, and what compiles.

They start what users start, or watch it; nothing outside this folder and commands/ knows them.
Not here: how results are drawn (show/), and comparisons with other programs (benchmarks/ in the repository).
"""
