"""`python -m distgpt`, or `python -P` with this directory, which works in any working directory."""

import sys
from pathlib import Path

if not __package__:  # this directory is on the path, but its modules are not top-level
    parent = str(Path(__file__).parents[1])
    sys.path[:1] = [] if parent in sys.path else [parent]

from distgpt.commands.cli import main

main()
