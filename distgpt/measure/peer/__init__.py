"""PyTorch as a peer: programs for a Python of its own, which has PyTorch and need not have distgpt.

Not here: starting them (measure/jobs.py).
"""
