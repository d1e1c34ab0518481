"""The listeners of a run that need a library: a live display on a terminal, and TensorBoard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from textwrap import indent
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column, Table
from rich.text import Text

from distgpt.core.base.errors import UsageError, escape_lines, escape_model_text
from distgpt.core.base.files import storage_errors
from distgpt.core.train.lines import Facts, Lines, Metrics

FLUSH_SECONDS = 10  # what a killed run may lose
WIDE = 66  # columns of a terminal from which a line has the speed

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


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Say no more. What is still in the buffer tells `Output` at its next flush."""
        self.quiet = True


class Live(Lines):
    """A training run: a bar with loss, speed and time left."""

    def __init__(self, seconds: float | None = None) -> None:
        super().__init__(seconds)
        self._step = 0
        # Forced: behind mpirun the output is a pipe that ends in a terminal.
        self._console = _Console(file=self.stream, force_terminal=True, highlight=False)
        self._progress = Progress(console=self._console)

    def say(self, text: str, style: str = "") -> None:
        self._console.print(Text(escape_lines(text), style))

    def started(self, facts: Facts) -> None:
        super().started(facts)
        self._step = facts["first_step"]
        self._progress = Progress(*self._columns(), console=self._console, expand=True)
        task = self._progress.add_task("", total=self._end.total, loss="…", rate="…")
        self._progress.update(task, completed=self._end.done(self._step))
        self._progress.start()

    def stepped(self, metrics: Metrics) -> None:
        self.stream.flush()
        self._speed.add(metrics)
        self._step = int(metrics["step"])
        shown: Any = {"loss": f"{metrics['loss']:.4f}", "rate": f"{self._speed.rate:,.0f}"}
        self._progress.update(self._progress.task_ids[0], completed=self._end.done(self._step), **shown)

    def _columns(self) -> Iterator[ProgressColumn]:
        end, whole = self._end, Column(no_wrap=True)
        yield Now(lambda: f"step {end.step(self._step)}", "bold")
        yield BarColumn(bar_width=None)  # what the others leave
        if end.elapsed():
            yield Now(end.elapsed)
        yield TextColumn("loss [bold cyan]{task.fields[loss]}", table_column=whole)
        if self._console.width >= WIDE:
            yield TextColumn("[green]{task.fields[rate]} tokens/s", table_column=whole)
        yield Now(lambda: end.left(self._step, self._speed.seconds))

    def sampled(self, step: int, text: str) -> None:
        grid = Table.grid(padding=(0, 2))
        grid.add_row(f"[dim]after step {step}", Text(escape_model_text(text.strip())))
        self._console.print(grid)

    def close(self) -> None:
        self._progress.stop()


class Now(ProgressColumn):
    """A text that is made at every refresh, so that a clock moves during a long step."""

    def __init__(self, text: Callable[[], str], style: str = "") -> None:
        super().__init__(table_column=Column(no_wrap=True))
        self._text, self._style = text, style

    def render(self, task: Task) -> Text:
        return Text(self._text(), self._style)


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
