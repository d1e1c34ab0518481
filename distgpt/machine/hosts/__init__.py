"""Other machines: what hostfiles mean to each launcher, and what the hosts in them say of themselves.

Not here: starting processes on them, which launchers do.
"""
