"""Resuming: the run that `--resume` names, its settings so far, its checkpoint, and what may change."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from distgpt.core.base.errors import DataError, Say, UsageError, escape
from distgpt.core.config import CHANGEABLE, RunConfig, differences
from distgpt.core.config.asked import Asked
from distgpt.core.saved.checkpoint import MANIFEST, STATE, State, newest_intact, verify
from distgpt.core.saved.modelfile import read_description
from distgpt.core.saved.rundir import RunDirectory, differing, place_for
from distgpt.core.train.seams import is_over

Change = tuple[object, object]  # what a setting was, and what it is now


@dataclass(frozen=True, slots=True)
class Resumption:
    """`settings` are the run's so far; None where there is no run yet, which then begins."""

    directory: RunDirectory  # to write to
    settings: RunConfig | None = None
    checkpoint: Path | None = None
    in_place: bool = True  # no branch: the run in this directory resumes


def find_run(resume: str, out: Path | None, name: str, say: Say) -> Resumption:
    """`resume` is the path of a run or checkpoint, or "auto": the run in `out`, or else the last runs/<name>.

    Without `out` a path's own run resumes; with another directory in `out`, a branch of it begins there.
    """
    if resume == "auto":
        own = RunDirectory(out or place_for(Path("runs"), name, resuming=True))
        own.refuse_second()  # before looking for what it may be writing
        return Resumption(own, own.saved(), _newest(own, say))
    path = Path(resume)
    if not path.is_dir():
        raise DataError(f"--resume {resume}: there is no such checkpoint or run directory")
    if (own := RunDirectory(path)).saved():
        if out is None or _are_same(out, path):
            own.refuse_second()
        checkpoint = _newest(own, say)
        if out and checkpoint is None:
            raise DataError(f"{resume} has no checkpoint yet to begin a new run from")
    else:
        if not (path / MANIFEST).exists() and not (path / STATE).exists():
            raise DataError(f"{resume} is neither a checkpoint nor a run directory")
        verify(checkpoint := path)
        own = RunDirectory(path.resolve().parent.parent)
    if out is None or _are_same(out, own.path):
        if own.saved() is None:
            raise UsageError(f"--resume {resume} lies in no run directory: say with --out where to go on")
        return Resumption(RunDirectory(out or _as_given(path, own.path)), own.saved(), checkpoint)
    assert checkpoint is not None
    held = read_description(checkpoint / "weights.safetensors")
    return Resumption(RunDirectory(out), held.run, checkpoint, in_place=False)


def begins_anew(asked: Asked) -> bool:
    """Return whether there is no run yet that is asked for by `resume`."""
    return asked.resume is None or (asked.resume == "auto" and saved_run(asked) is None)


def saved_run(asked: Asked) -> RunConfig | None:
    """Return the settings so far of what `resume` names, as `find_run` finds them; None without a run.

    Only a branch needs a look at checkpoints, which takes long: it begins with the settings of one.
    """
    if asked.resume is None:
        return None
    if asked.resume == "auto":
        return RunDirectory(asked.out or place_for(Path("runs"), asked.name, resuming=True)).saved()
    path = Path(asked.resume)
    own = RunDirectory(path)
    own = own if own.saved() else RunDirectory(path.resolve().parent.parent)
    if asked.out is None or _are_same(asked.out, own.path):
        return own.saved()
    return find_run(asked.resume, asked.out, asked.name, lambda text: None).settings


def is_finished(found: Resumption, run: RunConfig, state: State, changes: Container[str]) -> bool:
    """Return whether a run has nothing left to do: it was finished at this step, and no more is wanted."""
    t, step, directory = run.train, state.step, found.directory
    if not found.checkpoint or not directory.owns(found.checkpoint):
        return False
    if t.epochs and ("epochs" in changes or "data" in changes):  # the steps follow from the examples
        return False
    is_done = is_over(state.seconds, t) if t.train_minutes else step == t.steps
    return is_done and directory.finished_at() == step


def refuse_impossible(what: str, before: RunConfig, now: RunConfig) -> None:
    """Raise a UsageError if a setting differs that cannot change when a run resumes."""
    # The model beside which adapters stand may lie elsewhere: its content is compared.
    allowed = CHANGEABLE | {"init"} if now.train.lora_rank else CHANGEABLE
    if different := differing(before, now, allowed):
        raise UsageError(
            f"{what} with another configuration ({different}), which a resumed run cannot change: leave out"
            " the flag, --preset or --config that says so, or start a new run: another --out and no --resume"
        )


def described(changes: dict[str, Change]) -> str:
    """Return the changes as a text, like "lr 0.01 → 0.001, steps 600 → 900"."""
    return ", ".join(f"{name} {escape(f'{old} → {new}')}" for name, (old, new) in changes.items())


def changed(before: RunConfig | None, now: RunConfig) -> dict[str, Change]:
    """The settings that a resumed run changes, in the order in which they are declared."""
    return differences(before, now) if before else {}


def _newest(run: RunDirectory, say: Say) -> Path | None:
    """Return the newest intact checkpoint, or None to start at step 0."""
    newest = newest_intact(run.checkpoints)
    if newest is None and (branched_from := run.branched_from()):
        verify(branched_from)
        newest = branched_from, []
    if newest is None:
        say(f"no checkpoint in {run.checkpoints} yet: starting from the beginning")
        return None
    path, damaged = newest
    for line in damaged:
        say(f"skipping a damaged checkpoint: {line}")
    return path


def _are_same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


def _as_given(path: Path, run: Path) -> Path:
    """The run's directory by the user's own words, as far as these lead there."""
    return next((way for way in (path, path.parent.parent) if _are_same(way, run)), run)
