"""How far a run has come: all that changes from step to step beside weights and moments."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace

from distgpt.saved.state import MOST_RECENT, Best, State


@dataclass(slots=True)
class Progress:
    """The same on all ranks, but for `seconds`."""

    step: int = 0  # steps that are finished
    loss: float | None = None  # of the last good step of this process
    val_loss: float | None = None  # of the last evaluation of this process
    best_loss: float = math.inf  # the lowest validation loss after a step
    best_step: int | None = None
    evaluation_pending: bool = False  # one was due after the last step, and a signal came first
    skipped: int = 0  # batches that are not seen again
    bad_steps: int = 0
    recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MOST_RECENT))
    seconds: list[float] = field(default_factory=list)  # of each step of this process

    def load(self, state: State) -> None:
        """Go on from a checkpoint. Bad steps that were counted since then stay counted."""
        self.step, self.evaluation_pending = state.step, state.evaluation_pending
        self.skipped = state.skipped
        self.bad_steps = max(self.bad_steps, state.bad_steps)
        self.recent.clear()
        self.recent.extend(state.recent)

    def count_evaluation(self, val_loss: float | None) -> bool:
        """Return whether this validation loss is the lowest after a step so far."""
        self.val_loss, self.evaluation_pending = val_loss, False
        if not self.step or val_loss is None or not val_loss < self.best_loss:
            return False
        self.best_loss, self.best_step = val_loss, self.step
        return True

    def save(self, run: State, validation_tokens: int) -> State:
        """What a checkpoint says now. `run`: the part that is the same for all steps.

        The lowest validation loss can be compared with losses over as many tokens only.
        """
        is_known = validation_tokens and math.isfinite(self.best_loss)
        return replace(
            run,
            step=self.step,
            best=Best(self.best_loss, validation_tokens, self.best_step) if is_known else None,
            evaluation_pending=self.evaluation_pending,
            skipped=self.skipped,
            bad_steps=self.bad_steps,
            recent=tuple(self.recent),
        )
