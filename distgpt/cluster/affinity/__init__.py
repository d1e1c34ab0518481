"""The layout of a node: its cores as Linux tells of them, and where ranks and their threads run on these.

`Placed` (bind.py) is the layout of core/comm/layout.py where this is installed.
Not here: the cores and the memory that a process may use (core/comm/resources.py), launch commands (jobs/).
"""
