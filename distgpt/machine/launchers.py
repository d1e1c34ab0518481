"""How to start a job of several ranks: mpirun of either kind, or srun."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distgpt.errors import UsageError
from distgpt.machine.facts import mpirun, own_mpirun


@dataclass(frozen=True, slots=True)
class Launcher:
    """What stands before a command to start it on several ranks, without the number of ranks."""

    words: tuple[str, ...]

    @property
    def name(self) -> str:
        return Path(self.words[0]).name

    def command(self, ranks: int, words: Sequence[object]) -> list[str]:
        """The command as `ranks` processes."""
        return [self.words[0], "-n", str(ranks), *self.words[1:], *map(str, words)]

    def shown(self, ranks: int, words: Sequence[object]) -> str:
        """The same as a user would type it, without the path of the launcher."""
        return shlex.join([self.name, *self.command(ranks, words)[1:]])


def find_launcher(chosen: str | None, hostfile: Path | None) -> Launcher:
    """The launcher `chosen`, as in "srun --mpi=pmix", or this environment's mpirun."""
    words = [own_mpirun() or "mpirun"] if chosen is None else _words(chosen)
    program = shutil.which(words[0])
    if program is None and chosen is not None:
        raise UsageError(f"--launcher {words[0]}: there is no such program")
    if program is None:
        raise UsageError(
            "no mpirun was found: pip install 'distgpt[mpich]', or name your cluster's with --launcher"
        )
    return Launcher((program, *words[1:], *_hosts(program, hostfile)))


def _words(chosen: str) -> list[str]:
    try:
        words = shlex.split(chosen)
    except ValueError as error:
        raise UsageError(f"--launcher {chosen}: {str(error).lower()}") from error
    if not words or not words[0]:
        raise UsageError('--launcher names no program; give one, as in "srun --mpi=pmix", or leave it out')
    return words


def _hosts(program: str, hostfile: Path | None) -> tuple[str, ...]:
    """The option for a file of hosts, which differs between launchers."""
    if hostfile is None:
        return ()
    if Path(program).name == "srun":
        raise UsageError("srun takes its hosts from the allocation: leave --hostfile out")
    if not hostfile.is_file():
        raise UsageError(f"--hostfile {hostfile}: there is no such file")
    return ("--hostfile" if mpirun(program)["vendor"] == "Open MPI" else "-f", str(hostfile))
