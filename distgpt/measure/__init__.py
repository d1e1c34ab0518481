"""Measurements: estimates, profiles, comparisons of stages, benchmarks of this machine, and precompilation.

This code starts the same commands as users, or observes them. A training run imports only doctor/facts.py
and verification/kept.py from here. Not here: plots and pages (show/), comparisons with other programs
(benchmarks/ in the repository).
"""
