"""Progress of work with a known end: a line that changes in place on a terminal, else one now and then."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from shutil import get_terminal_size
from typing import Any

from distgpt.core.base.errors import print_lines
from distgpt.core.base.formatting import clock, size

SECONDS_BETWEEN_LINES, SECONDS_IN_PLACE = 3.0, 0.1


class LineInPlace:
    """The last line of a terminal, which changes."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._shown = stream, False

    def show(self, text: str) -> None:
        self._shown = True
        self._stream.write(f"\r{text[: get_terminal_size().columns - 1]}\x1b[K")
        self._stream.flush()

    def end(self, is_kept: bool = True) -> None:
        """Go to the next line, or clear this one."""
        if self._shown:
            self._stream.write("\n" if is_kept else "\r\x1b[K")
        self._shown = False


class _Lines:
    def __init__(self, is_live: bool) -> None:
        self._line = LineInPlace(sys.stderr) if is_live else None
        self._last = time.monotonic()
        self._total, self._begun = 1, (0.0, 0, 0)

    def update(self, text: str, done: int) -> None:
        now = time.monotonic()
        if self._line is None:
            if now - self._last > SECONDS_BETWEEN_LINES:
                self._last = now
                print_lines(text, err=True)
        elif now - self._last > SECONDS_IN_PLACE or done >= self._total:
            self._last = now
            with suppress(OSError):  # nothing depends on standard error
                self._line.show(text)

    def noted(self, text: str) -> None:
        if self._line is not None:
            with suppress(OSError):
                self._line.end(is_kept=False)
        print_lines(text, err=True)

    def close(self) -> None:
        if self._line is not None:
            with suppress(OSError):
                self._line.end()

    def _pace(self, done: int, tokens: int) -> str:
        """Return the tokens a second and the time left, since the first report: a resumed one is not at 0."""
        now = time.monotonic()
        begun, done_then, tokens_then = self._begun = self._begun if self._begun[0] else (now, done, tokens)
        if done <= done_then or now == begun:
            return ""
        left = (self._total - done) * (now - begun) / (done - done_then)
        return f"  {(tokens - tokens_then) / (now - begun):,.0f} tokens/s  left {clock(left)}"


class ItemProgress(_Lines):
    """Shows how many prompts or other items are done of all, with tokens a second and the time left."""

    def __init__(self, what: str = "prompts") -> None:
        super().__init__(sys.stderr.isatty())
        self._what, self._tokens = what, 0

    def began(self, total: int, done: int) -> None:
        self._total, self._begun = total, (time.monotonic(), done, 0)

    def advanced(self, done: int, tokens: int) -> None:
        """`tokens`: how many more there are."""
        self._tokens += tokens
        self.update(f"{done:,} of {self._total:,} {self._what}{self._pace(done, self._tokens)}", done)


class ByteProgress(_Lines):
    """Shows how many bytes of a text are read, with tokens a second and the time left."""

    def began(self, total_bytes: int, of: str, label: str = "") -> None:
        self._total, self._begun = max(1, total_bytes), (0.0, 0, 0)
        self.noted(f"{label or 'tokenizing'} {size(total_bytes)} ({of})")

    def advanced(self, consumed: int, tokens: int) -> None:
        shown = f"{consumed / self._total:4.0%}  {size(consumed)}  {tokens:,} tokens"
        self.update(shown + self._pace(consumed, tokens), consumed)
