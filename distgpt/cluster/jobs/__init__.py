"""Jobs: child processes, launchers and their hostfiles, batch scripts.

Not here: what a process knows of its own launch (launch/).
"""
