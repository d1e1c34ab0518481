"""Runs for those who look after many of them: metrics for Prometheus, logs as JSON.

Not here: the display of a single run (show/), what saves it or ends it (guards/).
"""
