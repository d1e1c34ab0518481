"""Jobs: child processes, launchers and their hostfiles, batch scripts.

Not here: information about the launch of this process (launch/).
"""
