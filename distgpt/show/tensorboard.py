"""A listener that writes what a run tells as TensorBoard's events, into RUN/tensorboard."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from textwrap import indent
from typing import Any

from distgpt.errors import UsageError
from distgpt.files import storage_errors

FLUSH_SECONDS = 10  # what a killed run may lose

# TensorBoard's names of what metrics.jsonl holds.
TAGS = {
    "loss": "loss/train",
    "val_loss": "loss/validation",
    "hellaswag": "accuracy/hellaswag",
    "lr": "learning_rate",
    "grad_norm": "gradient_norm",
    "tokens_per_s": "tokens_per_second",
}


class TensorBoard:
    """Notes are for the screen and are not written."""

    def __init__(self) -> None:
        try:
            self._library: Any = import_module("tensorboardX")
        except ImportError:
            raise UsageError("--tensorboard needs tensorboardX: pip install 'distgpt[tensorboard]'") from None
        self._writer: Any = None

    def started(self, facts: dict[str, Any]) -> None:
        """Every start has a file of its own; one that goes on hides what was written beyond its beginning."""
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

    def stepped(self, metrics: dict[str, Any]) -> None:
        self._write(metrics)

    def evaluated(self, metrics: dict[str, Any]) -> None:
        self._write(metrics)

    def noted(self, text: str) -> None:
        return None

    def sampled(self, step: int, text: str) -> None:
        """As a block of code, since TensorBoard takes texts for Markdown, which forgets line breaks."""
        self._writer.add_text("sample", indent(text, " " * 4, lambda line: True), step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _write(self, metrics: dict[str, Any]) -> None:
        for key in TAGS.keys() & metrics.keys():
            self._writer.add_scalar(TAGS[key], metrics[key], metrics["step"])
