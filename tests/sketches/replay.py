"""Recompute some steps of a run elsewhere, and compare the gradients bit by bit.

The run records a digest of its gradients at each step (`Recorder`, an `Inspector`); on another machine the
same steps are taken from one of its checkpoints, with a recorder too. Where digests differ, one of the
machines erred. Lacking today: batches that a rollback has left out are known from the checkpoint on only,
and a run on other numbers of ranks or threads sums in another order, so that only --reproducible-parts can
be compared to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from distgpt.core.comm.api import Comm
from distgpt.core.config import TrainConfig
from distgpt.core.config.asked import asked_for
from distgpt.core.cpu.stages import Stage
from distgpt.core.model.model import Model
from distgpt.core.train.loop import train
from distgpt.core.train.plan import make_plan
from distgpt.core.train.run import Seams
from distgpt.core.train.seams import Inspector, Listener
from distgpt.core.train.setup import open_run
from distgpt.guards.recheck import Digest, Recheck
from distgpt.parallel.choose import Chosen

Digests = dict[int, Digest]  # of this rank's first micro-batch, by step


class Recorder(Inspector):
    """Keeps a digest of the gradients of each step, and computes nothing anew."""

    def __init__(self, found: Digests, comm: Comm, model: Model, config: TrainConfig) -> None:
        self._found, self._digest = found, Recheck(comm, model, config).digest

    def begin(self, step: int, compute: Callable[[int], None]) -> Callable[[], None]:
        def compare() -> None:
            self._found[step] = self._digest()

        return compare


def recorded(seams: Seams, found: Digests) -> Seams:
    """Return the same seams with a recorder, for the run itself and for its replay."""
    return replace(seams, inspector=lambda comm, model, t: Recorder(found, comm, model, t))


def replayed(checkpoint: Path, last: int, stage: Stage, out: Path, listener: Listener) -> Digests:
    """Take the steps from a checkpoint to `last` again, in a directory of their own. Collective."""
    found: Digests = {}
    asked = asked_for({}, None, None, out, str(checkpoint))
    plan = replace(make_plan(stage, asked, listener.noted), until=last)
    train(open_run(plan, stage, Chosen, listener, recorded(Seams(), found)))
    return found


def first_difference(run: Digests, again: Digests) -> int | None:
    """Return the first step whose gradients differ; None if none do."""
    return next((step for step in sorted(again) if again[step] != run.get(step)), None)


class Silent(Listener):
    """Shows nothing of the replay."""

    def started(self, facts: dict[str, Any]) -> None: ...
    def stepped(self, metrics: dict[str, Any]) -> None: ...
    def evaluated(self, metrics: dict[str, Any]) -> None: ...
    def noted(self, text: str) -> None: ...
    def sampled(self, step: int, text: str) -> None: ...
