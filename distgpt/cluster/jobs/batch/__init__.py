"""Batch scripts: one description of a job, and a file for each batch system that can run it.

Not here: what a process knows of the batch job that it runs in (cluster/launch/environment.py).
"""
