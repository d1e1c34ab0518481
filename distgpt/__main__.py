"""`python -m distgpt`, or `python -P` and this folder: that finds the package wherever it is started."""

import sys
from pathlib import Path

if not __package__:  # then this folder is on the path: not all that is in it are modules of their own
    parent = str(Path(__file__).parents[1])
    sys.path[:1] = [] if parent in sys.path else [parent]

from distgpt.commands.cli import main

main()
