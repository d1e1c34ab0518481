"""Proofs: recompute steps of a run from its files, and find where two runs part.

Training loads `kept.py` alone: what a run keeps for that. Not here: stages that train now, side by side
(`measure/stages.py`).
"""
