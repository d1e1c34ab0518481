"""A resumed run that has nothing left to do: it stays as it is, and says which options ask for more."""

from __future__ import annotations

import shlex
from contextlib import suppress

from distgpt.core.base.errors import DataError, Say
from distgpt.core.base.formatting import count, typed_duration
from distgpt.core.comm.agree import on_root
from distgpt.core.comm.api import Comm
from distgpt.core.saved.checkpoint import load_state
from distgpt.core.train.plan import Plan


def leave_finished(comm: Comm, plan: Plan, say: Say) -> None:
    """Say that the run stays as it is, and which options ask for more. Collective."""
    on_root(comm, lambda: _leave(plan, say))


def _leave(plan: Plan, say: Say) -> None:
    if plan.directory.lock.path.exists():  # the name of a process that was killed after the end
        plan.directory.lock.claim()
        plan.directory.lock.release()
    done, more, words = _ending(plan)
    say(f"{plan.directory.path} is finished, and nothing was changed: {done}")
    say(f"for {more}: {shlex.join(words)}")


def _ending(plan: Plan) -> tuple[str, str, list[str]]:
    """Return what is over, how much more to suggest, and the options that ask for it."""
    t, resumed = plan.run.train, ["--out", str(plan.directory.path), "--resume", "auto"]
    if t.train_minutes:
        spent = plan.state.seconds
        total = typed_duration(2 * spent)  # --within is the time of the whole run
        over, more = f"its {typed_duration(spent)} are over", f"as much again, {total} in all"
        return over, more, [*resumed, "--within", total]
    if t.epochs:
        over, more = f"all {t.epochs:g} epochs are done", f"{t.epochs:g} epochs more"
        return over, more, [*resumed, "--epochs", f"{2 * t.epochs:g}"]
    over, origin, fall = f"all {count(t.steps, 'step')} are done", plan.directory.branched_from(), 0
    if origin and origin.is_dir() and t.schedule == "wsd":
        fall = round(t.decay_fraction * t.steps)
        with suppress(DataError):  # a damaged one is no way to go
            if load_state(origin).step == t.steps - fall:  # by --decay-from, which begins anew
                more = f"a fall over {count(2 * fall, 'step')} instead"
                return over, more, ["--decay-from", str(origin), "--steps", str(2 * fall)]
    return over, f"{count(t.steps, 'step')} more", [*resumed, "--steps", str(2 * t.steps)]
