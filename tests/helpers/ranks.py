"""A program for mpirun that runs commands in sequence, since starting a job is slow.

Rank 0 writes the exit code of each command to standard error; the other ranks write all at the end.
"""

import json
import sys

from distgpt.cluster.launch.environment import launched_rank
from distgpt.commands.cli import main

codes = []
for args in json.loads(sys.argv[1]):
    sys.argv = ["distgpt", *args]
    codes.append(0)
    try:
        main()
    except SystemExit as end:
        codes[-1] = end.code
    if launched_rank() == 0:
        print(f"exit code {codes[-1]}", file=sys.stderr, flush=True)
if launched_rank():
    print(f"exit codes {json.dumps(codes)}", file=sys.stderr, flush=True)
