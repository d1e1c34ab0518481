"""`distgpt bench`: measurements that users repeat on their own machines, and their result files.

Not here: starting processes (measure/jobs.py), studies and other programs (benchmarks/ in the repository).
"""
