"""Captured work on CPU cores: a training step whose operations follow each other without Python in between.

Each operation of the core is a call from Python, which only one thread at a time can make: from some eight
threads on they wait for each other longer than they compute. `record` (capture.py) writes down once which
compiled loops each thread calls with which arrays, and then lets compiled code make these calls. Threads get
their part as a command (launch.py), for which they wait in compiled code; decoding uses this, too.
Not here: graphs of a GPU (gpu/device.py).
"""
