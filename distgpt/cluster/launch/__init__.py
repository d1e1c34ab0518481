"""The launch of this process: launchers, batch systems, and ranks that exit before the others.

`Launched` (job.py) is the job of core/comm/job.py if this package is installed. Not here: starting jobs
(jobs/).
"""
