"""The progress of a run: all that changes from step to step beside weights and moments."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from statistics import median

from distgpt.config import TrainConfig
from distgpt.saved.checkpoint import MOST_RECENT, State
from distgpt.training.exchange.local_steps import is_local

RECENT = 100  # steps whose duration counts


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

    config: TrainConfig
    ranks: int
    progress: Progress

    def recent(self) -> list[float]:
        """Return the seconds of the last steps.

        With local steps they are at least those of one round; before its first exchange, that is guessed.
        """
        t, step, seconds = self.config, self.progress.step, self.progress.seconds
        if not is_local(t, self.ranks):
            return seconds[-RECENT:]
        last = seconds[-max(RECENT, t.outer_every) :]
        has_exchanged = step // t.outer_every > (step - len(seconds)) // t.outer_every
        return last if has_exchanged else [*last, sum(last)]

    def usual(self) -> float:
        """Return the usual seconds of a step, with local steps of a round's slowest; 0 before the first."""
        last = self.recent()
        if not last:
            return 0.0
        return max(last) if is_local(self.config, self.ranks) else median(last)
