"""Verification: recompute a run's steps from its files, and find where two runs diverge.

Training imports only `kept.py`, which records what this needs. Not here: comparisons of stages on a new job
(`measure/stages.py`).
"""
