"""What `infer --prompts` and `eval` show while they run: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from distgpt.show.display import Plain

SECONDS_BETWEEN_LINES = 3.0


class Answering(Plain):
    """How many prompts, or whatever `what` says, are done of all, with tokens a second."""

    def __init__(self, what: str = "prompts") -> None:
        super().__init__(sys.stderr, SECONDS_BETWEEN_LINES)
        self._what = what
        self._bar: Progress | None = None
        self._total, self._tokens, self._begun = 0, 0, 0.0

    def began(self, total: int, done: int) -> None:
        self._total, self._begun = total, time.monotonic()
        if sys.stderr.isatty():
            self._bar = self._new_bar()
            self._bar.add_task("", total=total, completed=done, rate="")
            self._bar.start()
        self.is_due()  # not at once

    def advanced(self, done: int, tokens: int) -> None:
        """`tokens`: how many more there are."""
        self._tokens += tokens
        rate = f"{self._tokens / max(1e-9, time.monotonic() - self._begun):,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, rate=rate)
        elif self.is_due():
            self.say(f"{done:,} of {self._total:,} {self._what}  {rate}")

    def say(self, text: str, style: str = "") -> None:
        if self._bar is None:
            super().say(text)
        else:
            self._bar.console.print(Text(text, style))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _new_bar(self) -> Progress:
        console, whole = Console(stderr=True, force_terminal=True, highlight=False), Column(no_wrap=True)
        shown = [
            (0, TextColumn("[bold]{task.completed:.0f}/{task.total:.0f} " + self._what, table_column=whole)),
            (70, BarColumn(bar_width=16)),
            (45, TextColumn("[green]{task.fields[rate]}", table_column=whole)),
            (58, TextColumn("left", table_column=whole)),
            (58, TimeRemainingColumn(compact=True, table_column=whole)),
        ]
        return Progress(*(column for least, column in shown if console.width >= least), console=console)
