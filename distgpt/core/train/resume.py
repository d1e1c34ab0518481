"""Resuming: the run and checkpoint that `--resume` names, permitted changes, and finished runs."""

from __future__ import annotations

import shlex
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from distgpt.core.base.errors import DataError, Say, StorageError, UsageError, nearest_path
from distgpt.core.base.formatting import count, typed_duration
from distgpt.core.comm.agree import on_root
from distgpt.core.comm.api import Comm
from distgpt.core.components import components, extra_settings
from distgpt.core.config import CHANGEABLE, RunConfig, TrainConfig
from distgpt.core.config.run_request import RunRequest
from distgpt.core.saved.checkpoint import (
    MANIFEST,
    STATE,
    Best,
    State,
    latest_valid_checkpoint,
    verify,
)
from distgpt.core.saved.modelfile import read_description
from distgpt.core.saved.rundir import RunDirectory, differing, place_for
from distgpt.core.saved.tensors import read_header, verify_data
from distgpt.core.train.interfaces import is_over, time_is_over

Change = tuple[object, object]  # the old and the new value of a setting


@dataclass(frozen=True, slots=True)
class Resumption:
    """The run that --resume names. `settings` are its saved ones; None if it is a new run."""

    directory: RunDirectory  # the output directory
    settings: RunConfig | None = None
    checkpoint: Path | None = None
    in_place: bool = True  # False for a branch, which starts a new run


def find_run(resume: str, out: Path | None, name: str, say: Say) -> Resumption:
    """Return the run that `resume` names by "auto", or by the path of a run or checkpoint.

    "auto" is the run in `out`, or by default the last runs/<name>. Without `out`, a path's own run resumes.
    With another directory in `out`, a branch starts there.
    """
    if resume == "auto":
        own = RunDirectory(out or place_for(Path("runs"), name, resuming=True))
        own.lock.refuse_second()  # before reading files that it may be writing
        return Resumption(own, own.saved(), _newest(own, say))
    path = Path(resume)
    if not path.is_dir():
        raise DataError(f"--resume {resume}: no such checkpoint or run directory{nearest_path(path)}")
    if (own := RunDirectory(path)).saved():
        if out is None or _are_same(out, path):
            own.lock.refuse_second()
        checkpoint = _newest(own, say)
        if out and checkpoint is None:
            raise DataError(f"{resume} has no checkpoint to start a new run from")
    else:
        if not (path / MANIFEST).exists() and not (path / STATE).exists():
            raise DataError(f"{resume} is neither a checkpoint nor a run directory")
        verify(checkpoint := path)
        own = RunDirectory(path.resolve().parent.parent)
    if out is None or _are_same(out, own.path):
        if own.saved() is None:
            raise UsageError(f"--resume {resume} is not in a run directory; set --out")
        return Resumption(RunDirectory(out or own.path), own.saved(), checkpoint)
    assert checkpoint is not None
    held = read_description(checkpoint / "weights.safetensors").run.with_values({"ensemble": 1})
    return Resumption(RunDirectory(out), held, checkpoint, in_place=False)


def saved_run(request: RunRequest) -> RunConfig | None:
    """Return the saved settings of the run that `resume` names; None if there is none.

    Equivalent to `find_run`, but checkpoints are read only for a branch, because that takes long.
    """
    if request.resume is None:
        return None
    if request.resume == "auto":
        return RunDirectory(request.out or place_for(Path("runs"), request.name, resuming=True)).saved()
    path = Path(request.resume)
    own = RunDirectory(path)
    own = own if own.saved() else RunDirectory(path.resolve().parent.parent)
    if request.out is None or _are_same(request.out, own.path):
        return own.saved()
    return find_run(request.resume, request.out, request.name, lambda text: None).settings


def refuse_impossible(what: str, before: RunConfig, now: RunConfig) -> None:
    """Raise a UsageError if a setting differs that cannot change on resume."""
    extra = {name for name, about in extra_settings().items() if about.changeable}
    changeable = {*CHANGEABLE, *components().model(now.train).may_move, *extra}
    if different := differing(before, now, changeable):
        raise UsageError(
            f"{what} with settings that cannot change on resume ({different}); drop the flag, --preset or"
            " --config that sets them, or choose another --out without --resume"
        )


def refuse_changed_text(checkpoint: Path, state: State, changes: Container[str], fingerprint: str) -> None:
    """Raise a DataError if the text has changed under the same name."""
    if state.corpus != fingerprint and "data" not in changes:
        raise DataError(
            f"the text or its tokenizer has changed since {checkpoint}; restore it, pass the new text under"
            " another name with --data, or start a new run"
        )


def best_on_disk(directory: RunDirectory, checkpoint: Path, state: State, tokens: int, say: Say) -> bool:
    """Return whether the best weights are on disk and valid, and their loss is over the same tokens."""
    best = state.best
    if not best or not directory.owns(checkpoint) or best.tokens != tokens or not directory.best.exists():
        return False
    try:
        header = read_header(directory.best)
        verify_data(directory.best, header)
        if Best.from_metadata(header.metadata) in (best, None):
            return True
        problem = f"{directory.best} is not from step {best.step}, the best until step {state.step}"
    except (DataError, StorageError, ValueError) as error:
        problem = str(error)
    say(f"{problem}; the next evaluation rewrites it")
    return False


def is_finished(
    directory: RunDirectory, checkpoint: Path, t: TrainConfig, state: State, changes: Container[str]
) -> bool:
    """Return whether a run was finished at this step and needs no further work."""
    if not directory.owns(checkpoint):
        return False
    if t.epochs and ("epochs" in changes or "data" in changes):  # the steps depend on the examples
        return False
    is_done = is_over(state.step, state.seconds, t)
    if t.patience and not any(name in changes for name in ("patience", "steps", "epochs")):
        is_done = True  # --patience may have ended it at any step
    return is_done and directory.finished_at() == state.step


def leave_finished(comm: Comm, directory: RunDirectory, t: TrainConfig, seconds: float, say: Say) -> None:
    """Leave a finished run unchanged, and print options to train longer. Collective.

    `seconds`: elapsed time of a time-limited run.
    """

    def leave() -> None:
        if directory.lock.path.exists():  # left by a process killed after the end
            directory.lock.claim()
            directory.lock.release()
        done, more = _done_and_more(t, seconds)
        say(f"{directory.path} is finished; nothing was changed: {done}")
        say(f"to train longer: {shlex.join(['--out', str(directory.path), '--resume', 'auto', *more])}")

    on_root(comm, leave)


def _done_and_more(t: TrainConfig, spent: float) -> tuple[str, list[str]]:
    """Describe a finished run, and return an option for twice as much."""
    if time_is_over(spent, t):
        spent *= t.ensemble
        return f"its {typed_duration(spent)} have elapsed", ["--within", typed_duration(2 * spent)]
    if t.epochs:
        twice = f"{2 * t.epochs:g}"
        more = ["--epochs", twice] if t.chats else ["--set", f"epochs={twice}"]
        return f"all {t.epochs:g} epochs are done", more
    return f"all {count(t.steps, 'step')} are done", ["--steps", str(2 * t.steps)]


def _newest(run: RunDirectory, say: Say) -> Path | None:
    """Return the latest valid checkpoint, or None to start at step 0."""
    newest = latest_valid_checkpoint(run.checkpoints)
    if newest is None and (branched_from := run.branched_from()):
        verify(branched_from)
        newest = branched_from, []
    if newest is None:
        say(f"no checkpoint in {run.checkpoints}; starting from the beginning")
        return None
    path, damaged = newest
    for line in damaged:
        say(f"skipping a corrupt checkpoint: {line}")
    return path


def _are_same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()
