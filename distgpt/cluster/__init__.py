"""The environment of a run: launchers, cores and NUMA nodes, batch systems, restarts.

Not here: how ranks share a step (parallel), and communication between ranks (core/comm).
"""
