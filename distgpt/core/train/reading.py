"""How much of its text and of its time a run has used, and its training loss in bits per byte."""

from __future__ import annotations

from dataclasses import dataclass

from distgpt.core.data.batches import Batches
from distgpt.core.train.bits import bits_per_byte
from distgpt.core.train.clock import Clock


@dataclass(frozen=True, slots=True)
class Reading:
    """The fields of a step in metrics.jsonl that follow from the text and the clock."""

    batches: Batches
    batch_size: int
    bytes_per_token: float | None  # of the text; None where not all of it is text
    clock: Clock

    def epochs(self, step: int) -> float:
        """Return how many times the text is read by the end of this step."""
        rows = (step + self.batches.skipped) * self.batch_size
        return rows / self.batches.windows_per_epoch

    def bits_per_byte(self, loss: float | None) -> float | None:
        """Return a training loss in bits per byte, None where that is unknown."""
        return bits_per_byte(loss, self.bytes_per_token)

    def fields(self, step: int, loss: float) -> dict[str, float]:
        """Return what is known after a step; `elapsed_s` is of runs that end by the clock."""
        found = {"epoch": round(self.epochs(step), 4)}
        if (bits := self.bits_per_byte(loss)) is not None:
            found["train_bits_per_byte"] = bits
        if self.clock.elapsed is not None:
            found["elapsed_s"] = round(self.clock.seconds(), 3)
        return found
