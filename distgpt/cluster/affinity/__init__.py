"""CPU affinity: the cores of a node as Linux describes them, and the cores of its ranks and threads.

`Placed` (bind.py) is the layout of core/comm/layout.py if this package is installed. Not here: the cores and
memory that a process may use (core/comm/resources.py), launch commands (jobs/).
"""
