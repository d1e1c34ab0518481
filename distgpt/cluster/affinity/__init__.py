"""CPU affinity: the cores of a node as Linux describes them, and the cores of its ranks and threads.

`Placed` (bind.py) is the program's `Affinity` (core/comm/affinity.py). Not here: the cores and memory that a
process may use (core/comm/resources.py), launch commands (jobs/).
"""
