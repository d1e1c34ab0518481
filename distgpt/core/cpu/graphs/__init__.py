"""Graph capture on CPU cores: training steps whose operations run without Python in between.

Python makes each call of a core operation, and only one thread at a time can run Python. From about eight
threads on, they wait longer than they compute. `record` (capture.py) captures once each thread's calls of
compiled loops and their arrays; compiled code then makes these calls. Threads wait in compiled code for
commands (launch.py), which decoding also uses. Not here: GPU graphs (gpu/device.py).
"""
