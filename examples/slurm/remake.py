"""The example batch scripts, each made by the command in its own fourth line: python examples/slurm/remake.py

They are what `distgpt slurm` prints, with `distgpt` in place of its path on this machine, and
without its look at the data.
"""

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
# The command, as it would be if its own path were `distgpt`.
RUN = """
from distgpt.core.base import errors
from distgpt.cli import main
from distgpt.commands import slurm
errors._program = slurm.own_program = lambda: ["distgpt"]
slurm._unready = lambda runs: []  # texts, shards and tokenizers that are not here
main()
"""


def remade(script: Path) -> str:
    """Return what the script's own command prints."""
    made_by = next(line for line in script.read_text().splitlines() if line.startswith("# distgpt slurm "))
    words = [sys.executable, "-c", RUN, *shlex.split(made_by)[2:]]
    here = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run(words, capture_output=True, text=True, check=True, cwd=folder, env=here)
    return result.stdout


if __name__ == "__main__":
    for script in sorted(HERE.glob("*.sbatch")):
        script.write_text(remade(script))
