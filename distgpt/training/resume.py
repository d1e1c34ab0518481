"""Where a run begins: in a new directory, or with what a checkpoint remembers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distgpt.comm.agree import on_root
from distgpt.comm.api import Comm
from distgpt.config import RunConfig
from distgpt.errors import DataError, UsageError
from distgpt.saved import checkpoint
from distgpt.saved.rundir import CHANGEABLE, RunDirectory, place_for, refuse_differences

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Start:
    """The run's directory and, if it goes on, the verified checkpoint and the state that was saved in it."""

    directory: RunDirectory
    checkpoint: Path | None
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])

    def rounds(self, ranks: int) -> int:
        """The rounds of a step so far, with which sums are taken in the same order; 0 if not known."""
        return int(self.state.get("rounds", 0)) if self.state.get("world_size") == ranks else 0

    def best_loss(self, tokens: int) -> float:
        """The lowest validation loss so far, over as many tokens, whose weights lie in the directory."""
        best = self.state.get("best")
        own = self.checkpoint and self.checkpoint.resolve().parent == self.directory.checkpoints.resolve()
        if not best or not own or best["tokens"] != tokens or not self.directory.best.exists():
            return math.inf
        return float(best["loss"])

    def refuse_conflicts(self, run: RunConfig, former: RunConfig | None, going_on: bool) -> None:
        """Neither the directory nor the checkpoint may belong to another run. For rank 0."""
        if self.step > run.train.steps:
            raise UsageError(
                f"{self.checkpoint} is at step {self.step}, past the {run.train.steps} steps asked for"
            )
        self.directory.refuse_conflict(run, going_on)
        if former:
            refuse_differences(f"{self.checkpoint} is of a run", former, run, CHANGEABLE)

    def refuse_other_text(self, fingerprint: str) -> None:
        """A run does not go on with another text under the same name. For rank 0."""
        if self.checkpoint and self.state.get("corpus") != fingerprint:
            raise DataError(
                f"the text has changed since {self.checkpoint} was written:"
                " go on with the old one, or start anew"
            )


def find_start(comm: Comm, name: str, out: Path | None, resume: str | None, say: Say) -> Start:
    """Decided by rank 0, which verifies the checkpoint. Collective."""

    def decide() -> list[Any]:
        directory = RunDirectory(out or place_for(Path("runs"), name, resuming=resume == "auto"))
        found = _checkpoint(directory, resume, say)
        state = checkpoint.load_state(found) if found else {"step": 0}
        return [str(directory.path), found and str(found), state]

    path, found, state = on_root(comm, decide)
    return Start(RunDirectory(Path(path)), found and Path(found), state)


def _checkpoint(directory: RunDirectory, resume: str | None, say: Say) -> Path | None:
    if resume is None:
        return None
    if resume != "auto":
        path = Path(resume)
        if not path.is_dir():
            raise DataError(f"--resume {resume}: there is no such checkpoint directory")
        checkpoint.verify(path)
        return path
    newest = checkpoint.newest_intact(directory.checkpoints)
    if newest is None:
        say(f"no checkpoint in {directory.checkpoints} yet: starting from the beginning")
        return None
    path, damaged = newest
    for line in damaged:
        say(f"damaged checkpoint passed over: {line}")
    say(f"resuming from {path}")
    return path
