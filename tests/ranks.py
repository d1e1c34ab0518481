"""Several commands in one job: a program for mpirun, since starting a job costs more than most commands."""

import json
import sys

from distgpt.cli import main

for args in json.loads(sys.argv[1]):
    sys.argv = ["distgpt", *args]
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    print(f"exit code {code}", file=sys.stderr, flush=True)
