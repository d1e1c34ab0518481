"""What a comparison shows while it runs: on a terminal one line per stage that changes, else plain lines."""

from __future__ import annotations

import re
import shutil
import sys
import threading
import time
from typing import TextIO

from distgpt.errors import printable
from distgpt.machine.processes import ending
from distgpt.measure.compare.measuring import Measured

SECONDS_BETWEEN_LINES = 10.0
_STEP = re.compile(r"\s*step\s+\d+/\d+\s")
NAME_WIDTH = 9


class Progress:
    """Told by the thread that reads a child's output, and by the one that starts the children."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._lock = threading.Lock()
        self._stage = ""
        self._last = 0.0
        self._open = False  # the line on the terminal may still change

    def phase(self, stage: str, phase: str) -> None:
        self._stage, self._last = stage, time.monotonic()
        self._show(f"{phase} …", last=False)

    def heard(self, line: str) -> None:
        """Of a child's lines those about its steps."""
        now = time.monotonic()
        if _STEP.match(line) and (self._live or now - self._last >= SECONDS_BETWEEN_LINES):
            self._last = now
            self._show(" ".join(line.split()), last=False)

    def done(self, measured: Measured) -> None:
        self._show(outcome(measured), last=True)

    def close(self) -> None:
        """Leave the line that was being changed."""
        with self._lock:
            if self._open:
                print(file=self._stream, flush=True)
            self._open = False

    def _show(self, text: str, last: bool) -> None:
        line = f"{self._stage:<{NAME_WIDTH}} {printable(text)}"
        with self._lock:
            if not self._live:
                print(line, file=self._stream, flush=True)
                return
            width = shutil.get_terminal_size().columns - 1
            end = "\n" if last else ""
            shown = line if last else line[:width]
            print(f"\r\x1b[2K{shown}", end=end, file=self._stream, flush=True)
            self._open = not last


def outcome(measured: Measured) -> str:
    """A stage in one line, when it is over."""
    words = []
    if training := measured.training:
        loss = measured.losses[-1] if measured.losses else None
        words.append(f"{training['train_s']:.1f} s of training, {training['tokens_per_s']:,.0f} tokens/s")
        words += [f"loss {loss:.4f}"] if loss is not None else []
    if inference := measured.inference:
        words.append(f"{inference['seconds']:.2f} s of inference")
    if failed := measured.failed:
        words.append(failure(failed))
    return "; ".join(words)


def failure(failed: dict[str, object]) -> str:
    """How a stage died, for people."""
    code = failed["code"]
    if code is None:
        return f"interrupted in {failed['phase']}"
    assert isinstance(code, int)
    words = f" ({failed['last_words']})" if failed["last_words"] else ""
    return f"died in {failed['phase']}: {ending(code)}{words}"
