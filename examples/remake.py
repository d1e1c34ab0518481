"""The example batch scripts, each made by the command in its own fourth line: python examples/remake.py

They are what `distgpt submit` prints, with `distgpt` and `mpiexec` in place of their paths on this machine,
and without its look at the data.
"""

import contextlib
import shlex
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

from click.testing import CliRunner

from distgpt.cluster.jobs import systems
from distgpt.commands import jobs
from distgpt.commands.cli import cli

HERE = Path(__file__).parent


def remade(script: Path) -> str:
    """Return what the script's own command prints."""
    made_by = next(line for line in script.read_text().splitlines() if line.startswith("# distgpt s"))
    words = shlex.split(made_by)[1:]
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            patch.object(jobs, "command_line", lambda *words: shlex.join(["distgpt", *words]))
        )
        stack.enter_context(patch.object(jobs, "own_program", lambda: ["distgpt"]))
        stack.enter_context(patch.object(systems, "own_mpirun", lambda: None))
        stack.enter_context(patch.object(jobs, "_refuse_unready", lambda run: None))  # texts are elsewhere
        stack.enter_context(patch.object(sys, "argv", words))
        stack.enter_context(contextlib.chdir(stack.enter_context(tempfile.TemporaryDirectory())))
        result = CliRunner().invoke(cli, words[1:], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def scripts() -> list[Path]:
    """Return the example scripts."""
    return sorted(path for path in HERE.glob("*/*") if path.suffix in (".sbatch", ".sh"))


if __name__ == "__main__":
    for script in scripts():
        script.write_text(remade(script))
