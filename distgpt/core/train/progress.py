"""The progress of a run: all that changes from step to step beside weights and moments."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from distgpt.core.saved.checkpoint import MOST_RECENT, State
from distgpt.core.train.placement import Rounds


@dataclass(slots=True)
class Progress:
    """All that changes from step to step and is saved. The same on all ranks, but for `seconds`."""

    step: int = 0  # steps that are finished
    loss: float | None = None  # of the last good step of this process
    val_loss: float | None = None  # of the last evaluation of this process
    evaluation_pending: bool = False  # one was due after the last step, and a signal came first
    skipped: int = 0  # batches that are not seen again
    bad_steps: int = 0
    recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MOST_RECENT))
    seconds: list[float] = field(default_factory=list)  # of each step of this process

    def load(self, state: State) -> None:
        """Continue from a checkpoint. Bad steps that were counted since then stay counted."""
        self.step, self.evaluation_pending = state.step, state.evaluation_pending
        self.skipped = state.skipped
        self.bad_steps = max(self.bad_steps, state.bad_steps)
        self.recent.clear()
        self.recent.extend(state.recent)

    def count_step(self, loss: float, seconds: float, is_good: bool) -> None:
        """Count a step as finished. A bad one has left the weights as they were."""
        self.step += 1
        self.seconds.append(seconds)
        if is_good:
            self.loss = loss

    def count_evaluation(self, val_loss: float | None) -> None:
        self.val_loss, self.evaluation_pending = val_loss, False

    def save(self, run: State) -> State:
        """Return what a checkpoint says now. `run`: the part that is the same for all steps."""
        return replace(
            run,
            step=self.step,
            evaluation_pending=self.evaluation_pending,
            skipped=self.skipped,
            bad_steps=self.bad_steps,
            recent=tuple(self.recent),
        )


@dataclass(frozen=True, slots=True)
class Pace:
    """Durations of this run's steps."""

    progress: Progress
    rounds: Rounds = field(default_factory=Rounds)

    def recent(self) -> list[float]:
        """Return the seconds of the last steps, at least those of one round."""
        return self.rounds.recent(self.progress.step, self.progress.seconds)

    def usual(self) -> float:
        """Return the usual seconds of a step; 0 before the first."""
        last = self.recent()
        return self.rounds.usual(last) if last else 0.0
