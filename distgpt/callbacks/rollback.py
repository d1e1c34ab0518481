"""Go back after a bad step, for --on-bad-step rollback: to the newest checkpoint, and past the bad data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from distgpt.core.comm.agree import on_root
from distgpt.core.saved.checkpoint import State, load_document, newest_intact
from distgpt.core.train.run import BadStep, Run
from distgpt.core.train.setup import begin_anew, restore


class RollBack(BadStep):
    """A bad step after which the run goes back to the newest checkpoint, or to the first weights."""

    def recover(self, run: Run) -> None:
        """Restore the checkpoint. Batches up to the bad one are not seen again. Collective."""
        used = self.step + run.batches.skipped
        run.checkpoints.wait()
        path, document = on_root(run.comm, lambda: _newest(run))
        state = State.from_json(document)
        if path:
            restore(run.comm, run.optimizer_state, Path(path))
        else:
            begin_anew(run.comm, run.optimizer_state, run.config.train, run.batches)
        run.load(replace(state, skipped=used - state.step))
        run.checkpoints.on_root(partial(_forget_later_steps, run, bool(path)))
        step, what = run.progress.step, f"{self.reason} at step {self.step}"
        run.report.remember({"step": step, "bad": what, "back_to": step, "skipped": run.batches.skipped})
        run.report.note(f"{what}: back to step {step}, and past these data")


def _newest(run: Run) -> tuple[str | None, Mapping[str, object]]:
    newest = newest_intact(run.directory.checkpoints, run.progress.step)
    path = newest[0] if newest else run.start
    return (str(path), load_document(path)) if path else (None, {"step": 0})


def _forget_later_steps(run: Run, was_saved: bool) -> None:
    run.directory.drop_metrics_after(run.progress.step, run.progress.evaluation_pending)
    if was_saved:  # else the run would come to the same step again if it ended now
        run.checkpoints.write_now(run.state())
