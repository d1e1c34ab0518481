"""Jobs: child processes, launchers and their hostfiles, the batch script for Slurm.

Not here: what a process knows of its own launch (core/comm/launched.py).
"""
