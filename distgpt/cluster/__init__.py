"""Where a run runs: launchers, cores and NUMA nodes, batch systems, restarts.

Not here: how ranks share a step (parallel), and what is sent between them (core/comm).
"""
