"""`distgpt bench`: measurements that users repeat on their own machines, and their result files.

Not here: how processes are started (measure/jobs.py), studies and peers (benchmarks/ in the repository).
"""
