"""The listeners of a training run: a live display on a terminal, plain lines elsewhere, TensorBoard."""

from __future__ import annotations

import errno
import signal
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from textwrap import indent
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column, Table
from rich.text import Text

from distgpt.core.base.errors import UsageError, escape_lines, escape_model_text, print_lines
from distgpt.core.base.files import storage_errors
from distgpt.core.base.formatting import count
from distgpt.core.base.interrupts import note
from distgpt.core.comm.agree import on_every_rank
from distgpt.core.comm.api import Comm
from distgpt.core.comm.launched import drop_output, shown_on_terminal
from distgpt.show.loglines import LogLines
from distgpt.show.remaining import BySteps, Remaining, remaining

FLUSH_SECONDS = 10  # what a killed run may lose
# Characters beside step and loss from which a line has the time left, the speed, and a bar of 9 or more.
LEFT_FROM, RATE_FROM, BAR_FROM = 13, 32, 42

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


class Output:
    """Standard output as a run writes to it. The run does not need it, so what cannot be written is dropped.

    Where its reader has left, as in `| head`, the run ends as by a signal: it saves first.
    """

    def __init__(self) -> None:
        self._stream = sys.stdout
        self._failed: OSError | None = None  # for as long as nobody notes that the run has to end

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._give_up(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)
        if self._failed:
            self._give_up(self._failed)

    def _give_up(self, error: OSError) -> None:
        if error.errno == errno.EPIPE and not note(signal.SIGPIPE):
            self._failed = error
            raise error
        self._failed = None
        drop_output(self._stream.fileno())
        if error.errno not in (errno.EPIPE, errno.EIO):  # EIO: a terminal that was closed
            why = error.strerror or error
            print_lines(f"standard output cannot be written ({why}): going on without it", err=True)


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


class Lines(Plain):
    """A training run: a line now and then; every step is in metrics.jsonl anyway."""

    def __init__(self, seconds: float | None = None) -> None:
        """`seconds`: between two lines; None: see `LogLines`."""
        super().__init__(Output(), 0.0)
        self._lines = LogLines(seconds, self.stream.isatty())
        self._pace = Pace()
        self._end: Remaining = BySteps(0)

    def say(self, text: str, style: str = "") -> None:
        super().say(self._lines.stamped(text), style)

    def is_due(self) -> bool:
        self._seconds = self._lines.interval()
        return super().is_due()

    def started(self, facts: dict[str, Any]) -> None:
        self._end = remaining(facts)
        self.say(summary(facts))

    def stepped(self, metrics: dict[str, Any]) -> None:
        self._pace.add(metrics)
        step, end = metrics["step"], self._end
        is_last = max(end.done(step), metrics.get("elapsed_s", 0.0)) >= end.total
        if not self.is_due() and step != 1 and not is_last:
            return
        words = [
            f"step {end.step(step):>{end.width}}",
            f"loss {metrics['loss']:.4f}",
            f"lr {metrics['lr']:.2e}",
            f"grad {metrics['grad_norm']:.3f}",
            f"{self._pace.rate:,.0f} tokens/s",
            end.elapsed(),
            end.left(step, self._pace.seconds),
        ]
        self.say("  ".join(filter(None, words)))

    def evaluated(self, metrics: dict[str, Any]) -> None:
        self.say(measured(metrics), "cyan")

    def sampled(self, step: int, text: str) -> None:
        shown = escape_model_text if shown_on_terminal(self.stream) else str
        print(f"--- sample after step {step}\n{shown(text.strip())}\n---", file=self.stream, flush=True)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Say no more. What is still in the buffer tells `Output` at its next flush."""
        self.quiet = True


class Live(Lines):
    """A training run: a bar with loss, speed and time left."""

    def __init__(self) -> None:
        super().__init__()
        self._step = 0
        # Forced: behind mpirun the output is a pipe that ends in a terminal.
        self._console = _Console(file=self.stream, force_terminal=True, highlight=False)
        self._progress = Progress(console=self._console)

    def say(self, text: str, style: str = "") -> None:
        self._console.print(Text(escape_lines(text), style))

    def started(self, facts: dict[str, Any]) -> None:
        super().started(facts)
        self._step = facts["first_step"]
        self._progress = Progress(*self._columns(), console=self._console)
        task = self._progress.add_task("", total=self._end.total, loss="…", rate="…")
        self._progress.update(task, completed=self._end.done(self._step))
        self._progress.start()

    def stepped(self, metrics: dict[str, Any]) -> None:
        self.stream.flush()
        self._pace.add(metrics)
        self._step = metrics["step"]
        shown: Any = {"loss": f"{metrics['loss']:.4f}", "rate": f"{self._pace.rate:,.0f}"}
        self._progress.update(self._progress.task_ids[0], completed=self._end.done(self._step), **shown)

    def _columns(self) -> Iterator[ProgressColumn]:
        """Yield the columns that fit: step and loss always, then the time left, the speed, and a bar."""
        end, whole = self._end, Column(no_wrap=True)
        room = self._console.width - end.width - len("step  loss 0.0000")
        for_elapsed = len(end.elapsed()) + 1
        has_elapsed = bool(end.elapsed()) and room >= BAR_FROM + for_elapsed
        yield Now(lambda: f"step {end.step(self._step)}", "bold")
        if room >= BAR_FROM:
            yield BarColumn(bar_width=min(24, room - BAR_FROM + 9 - for_elapsed * has_elapsed))
        if has_elapsed:
            yield Now(end.elapsed)
        yield TextColumn("loss [bold cyan]{task.fields[loss]}", table_column=whole)
        if room >= RATE_FROM:
            yield TextColumn("[green]{task.fields[rate]:>9} tokens/s", table_column=whole)
        if room >= LEFT_FROM:
            yield Now(lambda: end.left(self._step, self._pace.seconds))

    def sampled(self, step: int, text: str) -> None:
        grid = Table.grid(padding=(0, 2))
        grid.add_row(f"[dim]after step {step}", Text(escape_model_text(text.strip())))
        self._console.print(grid)

    def close(self) -> None:
        self._progress.stop()


class Now(ProgressColumn):
    """A text that is asked for at every refresh, so that a clock moves during a long step."""

    def __init__(self, text: Callable[[], str], style: str = "") -> None:
        super().__init__(table_column=Column(no_wrap=True))
        self._text, self._style = text, style

    def render(self, task: Task) -> Text:
        return Text(self._text(), self._style)


class Listeners:
    """Pass every event of a run on to those listeners that have a method for it."""

    def __init__(self, *listeners: object) -> None:
        self._listeners = listeners

    def __getattr__(self, event: str) -> Any:
        def pass_on(*about: Any) -> None:
            for listener in self._listeners:
                if (react := getattr(listener, event, None)) is not None:
                    react(*about)

        return pass_on


class TensorBoard:
    """Write events for TensorBoard into RUN/tensorboard; notes are for the screen and are not written."""

    def __init__(self) -> None:
        try:
            self._library: Any = import_module("tensorboardX")
        except ImportError:
            raise UsageError("--tensorboard needs tensorboardX: pip install 'distgpt[tensorboard]'") from None
        self._writer: Any = None

    def started(self, facts: dict[str, Any]) -> None:
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

    def stepped(self, metrics: dict[str, Any]) -> None:
        self._write(metrics)

    def evaluated(self, metrics: dict[str, Any]) -> None:
        self._write(metrics)

    def sampled(self, step: int, text: str) -> None:
        """Write a block of code, since TensorBoard takes texts for Markdown, which forgets line breaks."""
        self._writer.add_text("sample", indent(text, " " * 4, lambda line: True), step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _write(self, metrics: dict[str, Any]) -> None:
        for key in TAGS.keys() & metrics.keys():
            self._writer.add_scalar(TAGS[key], metrics[key], metrics["step"])


class Pace:
    """The current speed: an exponential average, from which the slow first step is dropped at once."""

    def __init__(self) -> None:
        self.rate = self.seconds = 0.0
        self._seen = 0

    def add(self, metrics: dict[str, Any]) -> None:
        self._seen += 1
        fresh = max(0.1, 1 / max(1, self._seen - 1))
        self.rate += fresh * (metrics["tokens_per_s"] - self.rate)
        self.seconds += fresh * (metrics["step_s"] - self.seconds)


def listeners(comm: Comm, progress: str, tensorboard: bool, log_lines: float | None = None) -> Any:
    """Return the listeners of a run, on rank 0: the display and, with --tensorboard, TensorBoard. Collective.

    `progress` is live, plain, or auto: live for a single process on a terminal. Under a launcher one cannot
    know: some hand their ranks a terminal of their own even where nobody looks. `log_lines`: seconds between
    two plain lines.
    """
    live = progress == "live" or (progress == "auto" and comm.size == 1 and sys.stdout.isatty())
    shown: list[object] = []
    if comm.rank == 0:
        shown.append(Live() if live else Lines(log_lines))
    if tensorboard:
        shown += on_every_rank(comm, lambda: [TensorBoard()] if comm.rank == 0 else [])
    return Listeners(*shown)


def summary(facts: dict[str, Any]) -> str:
    """Describe a run that starts, in one line."""
    threads = f", {count(facts['threads'], 'thread')} each" if facts["threads"] else ""
    on = f" on {facts['hosts']}" if facts.get("hosts") else ""  # where they are several
    dtype = f", {facts['dtype']}" if facts.get("dtype") else ""
    held_out = f" and {facts['held_out_tokens']:,} for validation" if facts["held_out_tokens"] else ""
    return (
        f"{facts['parameters']:,} parameters, vocabulary {facts['vocabulary']:,}, "
        f"corpus {facts['corpus_tokens']:,} tokens{held_out}; "
        f"stage {facts['stage']}, {count(facts['ranks'], 'rank')}{on}{threads}{dtype}; "
        f"writing to {facts['directory']}"
    )


def measured(metrics: dict[str, Any]) -> str:
    """Describe the results of an evaluation, in one line."""
    words = [f"after step {metrics['step']}:"]
    if "val_loss" in metrics:
        bits = f" ({metrics['bits_per_byte']:.4f} bits per byte)" if "bits_per_byte" in metrics else ""
        words.append(f"validation loss {metrics['val_loss']:.4f}{bits} over {metrics['val_tokens']:,} tokens")
    if "hellaswag" in metrics:
        words.append(f"HellaSwag {metrics['hellaswag']:.1%} of {metrics['hellaswag_examples']:,}")
    return "  ".join(words)
