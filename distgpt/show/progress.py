"""Progress of work with a known end: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from distgpt.core.base.errors import escape_lines
from distgpt.core.base.formatting import clock, size

SECONDS_BETWEEN_LINES = 3.0


class Plain:
    """Lines of text, and one about the progress every few seconds."""

    def __init__(self, stream: Any, seconds: float) -> None:
        self.stream = stream
        self._seconds = seconds
        self._last = 0.0

    def say(self, text: str, style: str = "") -> None:
        print(escape_lines(text), file=self.stream, flush=True)

    def noted(self, text: str) -> None:
        self.say(text, "yellow")

    def is_due(self) -> bool:
        """Return whether it is time for another line about the progress."""
        now = time.monotonic()
        if now - self._last < self._seconds:
            return False
        self._last = now
        return True


class _Bar(Plain):
    """A bar on a terminal, with those columns that fit into a line; elsewhere lines."""

    def __init__(self, is_live: bool, columns: Sequence[tuple[int, ProgressColumn]], **fields: Any) -> None:
        super().__init__(sys.stderr, SECONDS_BETWEEN_LINES)
        self._bar: Progress | None = None
        if is_live:
            console = Console(stderr=True, force_terminal=True, highlight=False)
            fitting = (column for least, column in columns if console.width >= least)
            self._bar = Progress(*fitting, console=console)
            self._bar.add_task("", total=None, visible=False, **fields)

    def update(self, line: str, done: int, **fields: Any) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, **fields)
        elif self.is_due():
            self.say(line)

    def show_total(self, total: int, done: int) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], total=total, completed=done, visible=True)
            self._bar.start()
        self.is_due()  # not at once

    def say(self, text: str, style: str = "") -> None:
        if self._bar is None:
            super().say(text)
        else:
            self._bar.console.print(Text(text, style))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def _text(template: str) -> TextColumn:
    return TextColumn(template, table_column=Column(no_wrap=True))


def _time_left() -> TimeRemainingColumn:
    return TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True))


class ItemProgress(_Bar):
    """Shows how many prompts or other items are done of all, with tokens a second, or the time so far."""

    def __init__(self, what: str = "prompts", with_tokens: bool = True) -> None:
        counted = _text("[bold]{task.completed:.0f}/{task.total:.0f} " + what)
        rate, left = _text("[green]{task.fields[rate]}"), _text("left")
        speed = rate if with_tokens else TimeElapsedColumn(table_column=Column(no_wrap=True))
        columns = [(0, counted), (70, BarColumn(bar_width=16)), (45, speed), (58, left), (58, _time_left())]
        super().__init__(sys.stderr.isatty(), columns, rate="")
        self._what = what
        self._total, self._tokens, self._begun = 0, 0, 0.0

    def began(self, total: int, done: int) -> None:
        self._total, self._begun = total, time.monotonic()
        self.show_total(total, done)

    def advanced(self, done: int, tokens: int) -> None:
        """`tokens`: how many more there are."""
        self._tokens += tokens
        speed = self._tokens / max(1e-9, time.monotonic() - self._begun)
        rate = f"{speed:,.0f} tokens/s" if self._tokens else ""
        self.update(f"{done:,} of {self._total:,} {self._what}  {rate}".rstrip(), done, rate=rate)


class ByteProgress(_Bar):
    """Shows how many bytes of a text are read, with tokens a second and the time left."""

    def __init__(self, label: str, is_live: bool) -> None:
        read = DownloadColumn(binary_units=True, table_column=Column(no_wrap=True))
        tokens, rate = _text("[cyan]{task.fields[tokens]}"), _text("[green]{task.fields[rate]}")
        columns = [(78, BarColumn(bar_width=12)), (0, read), (52, tokens), (65, rate), (0, _text("left"))]
        super().__init__(is_live, [*columns, (0, _time_left())], tokens="", rate="")
        self._label, self._total = label, 0
        self._begun: tuple[float, int, int] | None = None

    def began(self, total_bytes: int, of: str, label: str = "") -> None:
        self._total, self._begun = max(1, total_bytes), None
        self.say(f"{label or self._label} {size(total_bytes)} ({of})")
        self.show_total(total_bytes, 0)

    def advanced(self, consumed: int, tokens: int) -> None:
        pace = self._pace(consumed, tokens)
        rate = f"{pace[0]:,.0f} tokens/s" if pace else ""
        line = f"{consumed / self._total:4.0%}  {size(consumed)}  {tokens:,} tokens"
        if pace:
            line += f"  {rate}  left {clock((self._total - consumed) / pace[1])}"
        self.update(line, consumed, tokens=f"{tokens:,} tokens", rate=rate.replace(" tokens", ""))

    def _pace(self, consumed: int, tokens: int) -> tuple[float, float] | None:
        """Return tokens and bytes a second since the first report: a resumed run does not begin at 0."""
        now = time.monotonic()
        begun, bytes_then, tokens_then = self._begun = self._begun or (now, consumed, tokens)
        if consumed == bytes_then or now == begun:
            return None
        return (tokens - tokens_then) / (now - begun), (consumed - bytes_then) / (now - begun)
