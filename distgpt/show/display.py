"""The listeners of a run beside plain lines: a line in place on a terminal, and TensorBoard."""

from __future__ import annotations

import time
from importlib import import_module
from pathlib import Path
from textwrap import indent
from typing import Any

from distgpt.core.base.errors import UsageError
from distgpt.core.base.files import storage_errors
from distgpt.core.train.lines import Facts, Lines, Metrics
from distgpt.show.progress import SECONDS_IN_PLACE, LineInPlace

FLUSH_SECONDS = 10  # what a killed run may lose

# TensorBoard's names of what metrics.jsonl holds.
TAGS = {
    "loss": "loss/train",
    "train_bits_per_byte": "loss/train_bits_per_byte",
    "val_loss": "loss/validation",
    "bits_per_byte": "loss/validation_bits_per_byte",
    "hellaswag": "accuracy/hellaswag",
    "lr": "learning_rate",
    "grad_norm": "gradient_norm",
    "tokens_per_s": "tokens_per_second",
}


class Live(Lines):
    """A training run: a line with loss, speed and time left that changes in place."""

    def __init__(self, seconds: float | None = None) -> None:
        super().__init__(seconds)
        self._line = LineInPlace(self.stream)

    def say(self, text: str, style: str = "") -> None:
        self._line.end(is_kept=False)
        super().say(text)

    def stepped(self, metrics: Metrics) -> None:
        self._speed.add(metrics)
        step, end = int(metrics["step"]), self._end
        if time.monotonic() - self._last < SECONDS_IN_PLACE and end.done(step) < end.total:
            return
        self._last = time.monotonic()
        words = [f"step {end.step(step)}", end.elapsed(), f"loss {metrics['loss']:.4f}"]
        words += [f"{self._speed.rate:,.0f} tokens/s", end.left(step, self._speed.seconds)]
        self._line.show("  ".join(filter(None, words)))

    def sampled(self, step: int, text: str) -> None:
        self._line.end(is_kept=False)
        super().sampled(step, text)

    def close(self) -> None:
        self._line.end()


class TensorBoard:
    """Write events for TensorBoard into RUN/tensorboard."""

    def __init__(self) -> None:
        try:
            self._library: Any = import_module("tensorboardX")
        except ImportError:
            raise UsageError("--tensorboard needs tensorboardX: pip install 'distgpt[tensorboard]'") from None
        self._writer: Any = None

    def started(self, facts: Facts) -> None:
        """Open a file for this start; a resumed run hides what was written after its first step."""
        directory = Path(facts["directory"]) / "tensorboard"
        first_step = facts["first_step"]
        with storage_errors("write", directory):
            self._writer = self._library.SummaryWriter(
                str(directory),
                purge_step=first_step + 1 if first_step else None,
                flush_secs=FLUSH_SECONDS,
                # Readers take files in the order of their names, which have the second.
                filename_suffix=f".{len(list(directory.glob('events.*'))):05d}",
            )

    def stepped(self, metrics: Metrics) -> None:
        for key in TAGS.keys() & metrics.keys():
            self._writer.add_scalar(TAGS[key], metrics[key], metrics["step"])

    evaluated = stepped

    def noted(self, text: str) -> None:
        """Notes are for the screen."""

    def sampled(self, step: int, text: str) -> None:
        """Write a block of code, since TensorBoard takes texts for Markdown, which forgets line breaks."""
        self._writer.add_text("sample", indent(text, " " * 4, lambda line: True), step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
