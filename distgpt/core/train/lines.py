"""Listeners of a run: lines of text, and fan-out to multiple listeners."""

from __future__ import annotations

import errno
import math
import signal
import sys
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from shutil import get_terminal_size
from textwrap import fill
from typing import Any, TextIO

from distgpt.core.base.errors import escape_lines, escape_model_text, print_lines
from distgpt.core.base.formatting import clock, count
from distgpt.core.base.interrupts import note
from distgpt.core.comm.job import drop_output, shown_on_terminal, this_job
from distgpt.core.components import components
from distgpt.core.config import METRICS
from distgpt.core.train.interfaces import Listener

Metrics = dict[str, float]  # a line of metrics.jsonl
Facts = dict[str, Any]  # about a starting run (setup.py)

# Seconds between lines: at the start, when a person watches; later; and in a batch job's log, which is read
# at the end.
AT_FIRST, LATER, IN_A_JOB = 2.0, 10.0, 30.0
BEGINNING = 30.0  # seconds with the initial interval


class Output:
    """Standard output of a run. The run does not need it, so write errors are dropped.

    If the reader has closed it, for example `| head`, the run saves and ends as after a signal.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._failed: OSError | None = None  # until a signal to end the run is recorded

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
        if error.errno not in (errno.EPIPE, errno.EIO):  # EIO: a closed terminal
            why = error.strerror or error
            print_lines(f"cannot write to standard output ({why}); continuing without it", err=True)


WARM_UP = 2  # steps that may compile


class Speed:
    """The current speed as an exponential average, which excludes the first steps once others exist.

    `seconds` is the duration of a step, or 0 during the first steps.
    """

    def __init__(self) -> None:
        self.rate = self.seconds = 0.0
        self._seen = 0

    def add(self, metrics: Metrics) -> None:
        self._seen += 1
        fresh = max(0.1, 1 / max(1, self._seen - WARM_UP))
        self.rate += fresh * (metrics["tokens_per_s"] - self.rate)
        if self._seen > WARM_UP:
            self.seconds += fresh * (metrics["step_s"] - self.seconds)


class Remaining:
    """The progress of a run toward its last step or its time limit, formatted for a line."""

    def __init__(self, facts: Facts) -> None:
        """`facts` describe the run's start. With a time limit and no epochs, `steps` is an estimate."""
        steps, left = facts["steps"], facts.get("seconds_left")
        self._last = steps if left is None or facts.get("epochs") else None
        self._steps = "" if self._last is None else f"/{steps}"
        self.total: float = steps if left is None else facts["seconds"]  # the maximum of a progress bar
        self.width = len(f"{steps}{self._steps}")  # maximum characters of a step
        self._end = None if left is None else time.monotonic() + left

    def _seconds_left(self, end: float) -> float:
        return max(0.0, end - time.monotonic())

    def done(self, step: int) -> float:
        """Return the completed part of `total`."""
        return step if self._end is None else max(0.0, self.total - self._seconds_left(self._end))

    def step(self, step: int) -> str:
        """Format the step, with the total if there is one."""
        return f"{step}{self._steps}"

    def elapsed(self) -> str:
        """Format the elapsed and total time; "" without a time limit."""
        whole = clock(self.total)
        return "" if self._end is None else f"{clock(self.done(0)):>{len(whole)}} of {whole}"

    def left(self, step: int, pace: float) -> str:
        """Format the remaining time. `pace`: typical seconds per step, 0 if unknown."""
        most = math.inf if self._end is None else self._seconds_left(self._end)
        steps = math.inf if self._last is None else self._last - step
        seconds = min(most, pace * steps) if pace or not steps else most
        return f"left {clock(seconds)}" if seconds < math.inf else "left --:--"


class Lines(Listener):
    """A listener that prints a line at intervals. metrics.jsonl has every step anyway."""

    def __init__(self, seconds: float | None = None) -> None:
        """`seconds`: between two lines; None: the constants above."""
        self.stream: Any = Output()
        self._seconds = seconds
        self._begun = time.monotonic()
        self._last = 0.0
        # A batch job on a terminal is interactive.
        self._is_job = not self.stream.isatty() and this_job().batch is not None
        self._speed = Speed()
        self._end = Remaining({"steps": 0})

    def say(self, text: str) -> None:
        if self._is_job:
            text = f"{datetime.now():%Y-%m-%d %H:%M:%S}  {text}"
        text = escape_lines(text)
        if self.stream.isatty():  # wrap at words; terminals wrap anywhere
            narrow = partial(fill, width=get_terminal_size().columns, break_long_words=False)
            text = "\n".join(map(narrow, text.split("\n")))
        print(text, file=self.stream, flush=True)

    def noted(self, text: str) -> None:
        self.say(text)

    def _interval(self) -> float:
        """Return the current minimum of seconds between two lines."""
        if self._seconds is not None:
            return self._seconds
        if self._is_job:
            return IN_A_JOB
        return AT_FIRST if time.monotonic() - self._begun < BEGINNING else LATER

    def started(self, facts: Facts) -> None:
        self._end, self._speed = Remaining(facts), Speed()
        self.say(summary(facts))

    def _is_due(self, metrics: Metrics) -> bool:
        """Return whether to print a step: the first, the last, and one per interval."""
        step = int(metrics["step"])
        is_last = max(self._end.done(step), metrics.get("elapsed_s", 0.0)) >= self._end.total
        now = time.monotonic()
        is_time = now - self._last >= self._interval()
        if is_time:
            self._last = now
        return is_time or step == 1 or is_last

    def stepped(self, metrics: Metrics) -> None:
        self._speed.add(metrics)
        step = int(metrics["step"])
        end = self._end
        if not self._is_due(metrics):
            return
        words = [
            f"step {end.step(step):>{end.width}}",
            f"loss {metrics['loss']:.4f}",
            f"lr {metrics['lr']:.2e}",
            f"grad {metrics['grad_norm']:.3f}",
            f"{self._speed.rate:,.0f} tokens/s",
            end.elapsed(),
            end.left(step, self._speed.seconds),
        ]
        self.say("  ".join(filter(None, words)))

    def evaluated(self, metrics: Metrics) -> None:
        self.say(measured(metrics))

    def sampled(self, step: int, text: str) -> None:
        shown = escape_model_text if shown_on_terminal(self.stream) else str
        print(f"--- sample after step {step}\n{shown(text.strip())}\n---", file=self.stream, flush=True)


class Listeners(Listener):
    """A listener that calls other listeners, in any order. Ranks other than 0 have none."""

    def __init__(self, *listeners: Listener) -> None:
        for name in ("started", "stepped", "evaluated", "noted", "sampled", "close"):
            setattr(self, name, partial(self._call, [getattr(each, name) for each in listeners]))

    @staticmethod
    def _call(methods: list[Callable[..., None]], *about: object) -> None:
        for method in methods:
            method(*about)


def summary(facts: Facts) -> str:
    """Return a one-line description of a starting run."""
    each = " each" * (facts["ranks"] > 1)
    threads = f", {count(facts['threads'], 'thread')}{each}" if facts["threads"] else ""
    on = f" on {facts['hosts']}" if facts.get("hosts") else ""  # set if there are multiple hosts
    dtype = f", {facts['dtype']}" if facts.get("dtype") else ""
    held_out = f" and {facts['held_out_tokens']:,} for validation" if facts["held_out_tokens"] else ""
    return (
        f"{facts['parameters']:,} parameters, vocabulary {facts['vocabulary']:,}, "
        f"corpus {facts['corpus_tokens']:,} tokens{held_out}; "
        f"stage {facts['stage']}, {count(facts['ranks'], 'rank')}{on}{threads}{dtype}; "
        f"writing to {facts['directory']}"
    )


def measured(metrics: Metrics) -> str:
    """Return a one-line description of an evaluation's results."""
    words = [f"after step {metrics['step']}:"]
    if "val_loss" in metrics:
        bits = f" ({metrics['bits_per_byte']:.4f} bits per byte)" if "bits_per_byte" in metrics else ""
        of = f" of {whole:,} held-out" if (whole := metrics.get("held_out_tokens")) else ""
        over = f"{metrics['val_tokens']:,}{of} tokens"
        words.append(f"validation loss {metrics['val_loss']:.4f}{bits} over {over}")
    # The setting of a metric is also its name in metrics.jsonl.
    words += [components().metric(name).words(metrics) for name in METRICS if name in metrics]
    return "  ".join(words)
