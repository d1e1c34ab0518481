"""Progress of work with a known end: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, TextColumn
from rich.progress import TimeRemainingColumn as TimeLeft
from rich.table import Column
from rich.text import Text

from distgpt.core.base.errors import escape_lines, print_lines
from distgpt.core.base.formatting import clock, size

SECONDS_BETWEEN_LINES = 3.0


class _Bar:
    """A bar on a terminal; elsewhere lines."""

    def __init__(self, is_live: bool, *columns: ProgressColumn) -> None:
        self._last = 0.0
        self._bar: Progress | None = None
        if is_live:
            console = Console(stderr=True, force_terminal=True, highlight=False)
            self._bar = Progress(*columns, console=console)
            self._bar.add_task("", total=None, visible=False, tokens="", rate="")

    def update(self, line: str, done: int, **fields: Any) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, **fields)
        elif time.monotonic() - self._last > SECONDS_BETWEEN_LINES:
            self._last = time.monotonic()
            self.noted(line)

    def show_total(self, total: int, done: int) -> None:
        self._last = time.monotonic()  # no line at once
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], total=total, completed=done, visible=True)
            self._bar.start()

    def noted(self, text: str) -> None:
        if self._bar is None:
            print_lines(text, err=True)
        else:
            self._bar.console.print(Text(escape_lines(text)))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def _text(template: str) -> TextColumn:
    return TextColumn(template, table_column=Column(no_wrap=True))


class ItemProgress(_Bar):
    """Shows how many prompts or other items are done of all, with tokens a second."""

    def __init__(self, what: str = "prompts") -> None:
        counted = _text("[bold]{task.completed:.0f}/{task.total:.0f} " + what)
        speed = _text("[green]{task.fields[rate]}")
        bar = BarColumn(bar_width=12)
        super().__init__(sys.stderr.isatty(), counted, bar, speed, _text("left"), TimeLeft(compact=True))
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
        read, tokens = DownloadColumn(binary_units=True), _text("[cyan]{task.fields[tokens]}")
        super().__init__(
            is_live, BarColumn(bar_width=12), read, tokens, _text("left"), TimeLeft(compact=True)
        )
        self._label, self._total = label, 0
        self._begun: tuple[float, int, int] | None = None

    def began(self, total_bytes: int, of: str, label: str = "") -> None:
        self._total, self._begun = max(1, total_bytes), None
        self.noted(f"{label or self._label} {size(total_bytes)} ({of})")
        self.show_total(total_bytes, 0)

    def advanced(self, consumed: int, tokens: int) -> None:
        """Show bytes and tokens, and the pace since the first report: a resumed run does not begin at 0."""
        now = time.monotonic()
        begun, bytes_then, tokens_then = self._begun = self._begun or (now, consumed, tokens)
        line = f"{consumed / self._total:4.0%}  {size(consumed)}  {tokens:,} tokens"
        if consumed > bytes_then and now > begun:
            left = (self._total - consumed) * (now - begun) / (consumed - bytes_then)
            line += f"  {(tokens - tokens_then) / (now - begun):,.0f} tokens/s  left {clock(left)}"
        self.update(line, consumed, tokens=f"{tokens:,} tokens")
