"""A batch job as a user describes it, whichever system runs it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distgpt.core.base.errors import UsageError, escape

SECONDS_TO_SAVE = 120  # by which the signal to save comes before the time limit

_SIZE = re.compile(r"[1-9]\d{0,8}[KMGT]")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class Job:
    """Parameters of a script. `command` trains, `made_by` is the command that made the script."""

    name: str
    nodes: int
    ranks_per_node: int
    cpus_per_task: int
    gpus_per_node: int  # 0: none
    seconds: float
    mpi: str  # how ranks are started and meet; "none": there is one
    lines: Sequence[str]  # further options of the system
    out: Path
    command: Sequence[str]
    made_by: str
    setup: Sequence[str] = ()  # lines of the shell, before the command
    memory: str = ""  # of each node, as in 64G
    counts_cores: bool = False  # CPUs are cores in order, and none is the second hardware thread of one
    array: str = ""  # numbers of its elements, as in 1-4%2
    exclusive: bool = False  # no other job runs on its nodes
    resubmits: bool = False  # it submits a successor even where the system would queue it again

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UsageError(f"--name {self.name}: a job's name is of letters, digits, dots, - and _")
        if not _NAME.fullmatch(self.mpi):
            raise UsageError(f"--mpi {self.mpi}: that is no name, as pmi2, pmix and openmpi are")
        if self.memory and not _SIZE.fullmatch(self.memory):
            raise UsageError(f"--memory {self.memory}: give a number and K, M, G or T, as in 64G")
        for line in self.lines:
            if not line.startswith("-"):
                raise UsageError(
                    f"--directive {line}: give an option of the batch system, with its dashes, as in"
                    ' --directive "--partition=gpu"'
                )
        for word in (*self.lines, *self.command, *self.setup, str(self.out), self.made_by):
            if escape(word) != word:
                raise UsageError(f"{word} has characters that cannot stand in a script")

    @property
    def is_array(self) -> bool:
        return bool(self.array)

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def cpus_per_node(self) -> int:
        return self.ranks_per_node * self.cpus_per_task

    @property
    def binds(self) -> bool:
        """Return whether ranks are bound to cores: other jobs' launchers would bind theirs to the same."""
        return self.counts_cores and self.exclusive

    @property
    def seconds_to_save(self) -> int:
        """Return how long before the time limit the run is asked to save: a quarter of a short limit."""
        return max(1, min(SECONDS_TO_SAVE, int(self.seconds / 4)))


def clock(seconds: float) -> str:
    """14400 → "04:00:00", 90000 → "25:00:00"."""
    minutes, second = divmod(math.ceil(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours:02}:{minute:02}:{second:02}"
