"""Graph capture on CPU cores: training steps whose operations run without Python in between.

Python makes each call of a core operation, and only one thread at a time can run Python. From about eight
threads on, they wait longer than they compute. `record` (capture.py) captures once which compiled loops each
thread calls and with which arrays; compiled code then makes these calls. Threads wait in compiled code for
commands (launch.py), and decoding uses these too. GPU graphs are in gpu/device.py.
"""
