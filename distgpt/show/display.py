"""Progress, as a line updated in place on a terminal or as occasional lines, and TensorBoard events."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from shutil import get_terminal_size
from textwrap import indent
from typing import Any

from distgpt.core.base.errors import UsageError, print_lines
from distgpt.core.base.files import storage_errors
from distgpt.core.base.formatting import clock, size
from distgpt.core.train.interfaces import Listener
from distgpt.core.train.lines import Facts, Lines, Metrics

FLUSH_SECONDS = 10  # seconds of events that a killed run may lose
SECONDS_BETWEEN_LINES, SECONDS_IN_PLACE = 3.0, 0.1

# TensorBoard's names of the keys in metrics.jsonl.
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


class LineInPlace:
    """The last line of a terminal, updated in place."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._shown = stream, ""

    def show(self, text: str) -> None:
        columns = get_terminal_size().columns
        clear, self._shown = self._clear(columns), text[: columns - 1]
        self._stream.write(clear + self._shown)
        self._stream.flush()

    def end(self, is_kept: bool = True) -> None:
        """Move to the next line, or clear this one."""
        if self._shown:
            self._stream.write("\n" if is_kept else self._clear(get_terminal_size().columns))
        self._shown = ""

    def _clear(self, columns: int) -> str:
        """Return the escape sequence that clears the line, even if a narrower terminal wrapped it."""
        wrapped = (len(self._shown) - 1) // columns
        return "\r" + f"\x1b[{wrapped}A" * (wrapped > 0) + "\x1b[J"


class Live(Lines):
    """Shows a training run as one line with loss, speed and remaining time, updated in place."""

    def __init__(self, seconds: float | None = None) -> None:
        super().__init__(seconds)
        self._line = LineInPlace(self.stream)

    def started(self, facts: Facts) -> None:
        self._validation = ""
        super().started(facts)

    def say(self, text: str) -> None:
        self._line.end(is_kept=False)
        super().say(text)

    def stepped(self, metrics: Metrics) -> None:
        self._speed.add(metrics)
        step, end = int(metrics["step"]), self._end
        if time.monotonic() - self._last < SECONDS_IN_PLACE and end.done(step) < end.total:
            return
        self._last = time.monotonic()
        speed = f"{self._speed.rate:,.0f} tokens/s"
        words = [f"step {end.step(step)}", end.elapsed(), f"loss {metrics['loss']:.4f}", self._validation]
        words += [speed, end.left(step, self._speed.seconds)]
        for spare in (self._validation, speed):  # a narrow terminal omits these first
            if len("  ".join(filter(None, words))) >= get_terminal_size().columns:
                words.remove(spare)
        self._line.show("  ".join(filter(None, words)))

    def evaluated(self, metrics: Metrics) -> None:
        if "val_loss" in metrics:
            self._validation = f"val {metrics['val_loss']:.4f}"
        super().evaluated(metrics)

    def sampled(self, step: int, text: str) -> None:
        self._line.end(is_kept=False)
        super().sampled(step, text)

    def close(self) -> None:
        self._line.end()


class _Lines:
    def __init__(self, is_live: bool) -> None:
        self._is_live, self._line = is_live, LineInPlace(sys.stderr)
        self._last = time.monotonic()
        self._total, self._begun = 1, (0.0, 0, 0)

    def update(self, text: str, done: int) -> None:
        now = time.monotonic()
        if not self._is_live:
            if now - self._last > SECONDS_BETWEEN_LINES:
                self._last = now
                print_lines(text, err=True)
        elif now - self._last > SECONDS_IN_PLACE or done >= self._total:
            self._last = now
            with suppress(OSError):  # nothing depends on standard error
                self._line.show(text)

    def noted(self, text: str) -> None:
        with suppress(OSError):
            self._line.end(is_kept=False)
        print_lines(text, err=True)

    def close(self) -> None:
        with suppress(OSError):
            self._line.end()

    def _pace(self, done: int, tokens: int) -> str:
        """Return tokens/s and remaining time since the first report; resumed work does not start at 0."""
        now = time.monotonic()
        begun, done_then, tokens_then = self._begun = self._begun if self._begun[0] else (now, done, tokens)
        if done <= done_then or now == begun:
            return ""
        left = (self._total - done) * (now - begun) / (done - done_then)
        return f"  {(tokens - tokens_then) / (now - begun):,.0f} tokens/s  left {clock(left)}"


class ItemProgress(_Lines):
    """Shows how many items, such as prompts, are done, with tokens/s and remaining time."""

    def __init__(self, what: str = "prompts") -> None:
        super().__init__(sys.stderr.isatty())
        self._what, self._tokens = what, 0

    def began(self, total: int, done: int) -> None:
        self._total, self._begun = total, (time.monotonic(), done, 0)

    def advanced(self, done: int, tokens: int) -> None:
        """`tokens`: new tokens since the last call."""
        self._tokens += tokens
        self.update(f"{done:,} of {self._total:,} {self._what}{self._pace(done, self._tokens)}", done)


class ByteProgress(_Lines):
    """Shows how many bytes of input have been read, with tokens/s and remaining time."""

    def began(self, total_bytes: int, of: str, label: str = "") -> None:
        self._total, self._begun = max(1, total_bytes), (0.0, 0, 0)
        self.noted(f"{label or 'tokenizing'} {size(total_bytes)} ({of})")

    def advanced(self, consumed: int, tokens: int) -> None:
        shown = f"{consumed / self._total:4.0%}  {size(consumed)}  {tokens:,} tokens"
        self.update(shown + self._pace(consumed, tokens), consumed)


class TensorBoard(Listener):
    """Writes TensorBoard events to RUN/tensorboard."""

    def __init__(self) -> None:
        try:
            self._library: Any = import_module("tensorboardX")
        except ImportError:
            hint = "pip install 'distgpt[tensorboard]'"
            raise UsageError(f"--tensorboard requires tensorboardX: {hint}") from None
        self._writer: Any = None

    def started(self, facts: Facts) -> None:
        """Open a file for this start. A resumed run hides events after its first step."""
        self.close()  # the file of an ensemble's previous model
        directory = Path(facts["directory"]) / "tensorboard"
        first_step = facts["first_step"]
        with storage_errors("write", directory):
            self._writer = self._library.SummaryWriter(
                str(directory),
                purge_step=first_step + 1 if first_step else None,
                flush_secs=FLUSH_SECONDS,
                # Readers sort files by name, which has a resolution of one second.
                filename_suffix=f".{len(list(directory.glob('events.*'))):05d}",
            )

    def stepped(self, metrics: Metrics) -> None:
        for key in TAGS.keys() & metrics.keys():
            self._writer.add_scalar(TAGS[key], metrics[key], metrics["step"])

    evaluated = stepped

    def sampled(self, step: int, text: str) -> None:
        """Write the text as a code block: TensorBoard renders Markdown, which drops line breaks."""
        self._writer.add_text("sample", indent(text, " " * 4, lambda line: True), step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
