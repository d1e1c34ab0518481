"""Templates of others, rendered by a process with bounds on its time, its memory and what it writes."""

from __future__ import annotations

import json
import select
import subprocess
import threading
from functools import cache
from pathlib import Path
from typing import Any

from distgpt.core.base.errors import DataError, escape
from distgpt.core.base.system import python

SECONDS = 5.0  # for a text, with the start of the process

_WORKER = str(Path(__file__).with_name("worker.py"))


class Renderer:
    """A process that renders templates, started when it is first needed, and anew where it was ended."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def render(self, source: str, values: dict[str, Any]) -> str:
        """Return the text of a template, or raise a DataError that says what is wrong with it."""
        line = json.dumps({"source": source, "values": values}).encode() + b"\n"
        with self._lock:
            found = self._asked(line)
        if "error" in found:
            raise DataError(f"the model's chat template: {escape(found['error'])}")
        return found["text"]

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _asked(self, line: bytes) -> dict[str, str]:
        if self._process is None or self._process.poll() is not None:
            self._process = _started()
        process = self._process
        assert process.stdin and process.stdout
        waiting = select.poll()  # no timer: a thread for each text takes longer than the text
        waiting.register(process.stdout, select.POLLIN)
        try:
            process.stdin.write(line)
            process.stdin.flush()
            answer = process.stdout.readline() if waiting.poll(1000 * self._seconds) else b""
        except OSError:
            answer = b""
        except BaseException:  # an interrupt: its answer would be taken for that to the next question
            self.close()
            raise
        if answer.endswith(b"\n"):
            found: dict[str, str] = json.loads(answer)
            return found
        self.close()
        return {"error": f"it takes longer than {self._seconds:g} s, or too much memory"}


def _started() -> subprocess.Popen[bytes]:
    """Start the process, out of reach of the terminal's Ctrl-C, without its file's folder on its path."""
    return subprocess.Popen(
        python(_WORKER),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


@cache
def renderer() -> Renderer:
    """Return the process that all templates of this one share."""
    return Renderer()
