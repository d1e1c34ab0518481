"""A run that starts again after a lost rank or host, supervised from outside of mpirun: `distgpt supervise`.

Not here: what asks hosts (cluster/jobs/reach.py), and scripts for batch systems, which restart jobs.
"""
