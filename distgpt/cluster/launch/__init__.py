"""The launch of a process, as far as it knows: launchers, batch systems, ranks that leave alone.

`Launched` (job.py) is the job of core/comm/job.py where this is installed.
Not here: starting jobs (jobs/).
"""
