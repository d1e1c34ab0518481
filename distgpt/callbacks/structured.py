"""JSON logs. Each output line of a command becomes an object, of an event or of the line's text.

Output that bypasses Python (from MPI, or from a process that must exit immediately) is unchanged.
"""

from __future__ import annotations

import json
import math
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any, TextIO

from distgpt.core.base.interrupts import as_interrupt
from distgpt.core.comm.job import exit_code, this_job
from distgpt.core.train.lines import Facts, Lines, Metrics, Output, Remaining, summary

ERROR_PREFIXES = ("distgpt: ", "Error: ")  # prefixes of distgpt's and click's last lines after an error


class Log:
    """Creates the log lines of this process. Each has its host, its rank and the last step.

    `before_end`: event of lines that look like a command's last line but come before its end.
    """

    def __init__(self, before_end: str = "end") -> None:
        job = this_job()
        batch = job.batch or {}
        self._common = {"host": platform.node(), "rank": job.rank} | ({"job": batch["id"]} if batch else {})
        self.before_end = before_end
        self.step: int | None = None
        self.exit_code: int | None = None  # set once it is known
        self.ending = "error"  # level of the last line; "warning" after a signal

    def line(self, event: str, level: str = "info", **facts: Any) -> str:
        """Return an object as one line. Non-finite numbers become null, as in metrics.jsonl."""
        now = datetime.now().astimezone().isoformat(timespec="milliseconds")
        known = {"time": now, "level": level, **self._common, "step": self.step, "event": event, **facts}
        known = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in known.items()}
        return json.dumps(known, default=str) + "\n"

    def told(self, text: str, is_error: bool) -> str:
        """Return the object for a line of text, written to stderr if `is_error`."""
        prefix = next((known for known in ERROR_PREFIXES if is_error and text.startswith(known)), "")
        if not prefix:
            return self.line("message", "warning" if is_error else "info", message=text)
        if self.exit_code is None and self.before_end != "end":
            return self.line(self.before_end, "notice", message=text.removeprefix(prefix))
        return self.line("end", self.ending, exit_code=self.exit_code, message=text.removeprefix(prefix))


class JsonStream:
    """A replacement for stdout or stderr that turns each line into an object."""

    encoding = "utf-8"  # encoding of text written here; the output is ASCII

    def __init__(self, log: Log, plain: TextIO, is_error: bool) -> None:
        self.log, self.plain, self._is_error = log, plain, is_error
        self._begun = ""  # an unfinished line

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            if line.strip():
                self.plain.write(self.log.told(line, self._is_error))  # one call: other ranks also write
        return len(text)


class JsonLines(Lines):
    """Shows a run as objects, as often as `Lines` does."""

    def __init__(self, seconds: float | None = None) -> None:
        super().__init__(seconds)
        known = sys.stdout
        self._log = known.log if isinstance(known, JsonStream) else Log()
        if isinstance(known, JsonStream):
            self.stream = Output(known.plain)

    def say(self, text: str) -> None:
        self._emit("note", "notice", facts={"message": text})

    def started(self, facts: Facts) -> None:
        self._end, self._log.step = Remaining(facts), facts["first_step"]
        self._emit("start", facts={"message": summary(facts), "batch": this_job().batch, **facts})

    def stepped(self, metrics: Metrics) -> None:
        self._log.step = int(metrics["step"])
        if self._is_due(metrics):
            self._emit("step", facts=metrics)

    def evaluated(self, metrics: Metrics) -> None:
        self._emit("evaluation", facts=metrics)

    def sampled(self, step: int, text: str) -> None:
        self._emit("sample", facts={"message": text.strip()})

    def _emit(self, event: str, level: str = "info", *, facts: Mapping[str, Any]) -> None:
        known = {k: v for k, v in facts.items() if k != "time"}  # each object has its own time
        self.stream.write(self._log.line(event, level, **known))
        self.stream.flush()


@contextmanager
def as_json(before_end: str = "end") -> Iterator[None]:
    """Turn all further output of this process into JSON. At the end of a command, log how it ended.

    The streams stay replaced, because errors are reported later.
    """
    log = Log(before_end)
    sys.stdout = JsonStream(log, sys.stdout, is_error=False)
    sys.stderr = JsonStream(log, sys.stderr, is_error=True)
    try:
        yield
    finally:
        error = sys.exception()
        log.exit_code = 0
        if error is not None:  # the error's line follows
            error = as_interrupt(error)
            log.ending = "warning" if isinstance(error, KeyboardInterrupt) else "error"
            own = getattr(error, "exit_code", None)
            log.exit_code = own if isinstance(own, int) else exit_code(error)
        elif this_job().rank == 0:
            sys.stdout.plain.write(log.line("end", exit_code=0))
            sys.stdout.flush()
