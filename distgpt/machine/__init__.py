"""This machine: what it has, which stages run on it, how processes and jobs are started.

Not here: measurements of it (measure/).
"""
