"""The PyTorch side, a process of its own that answers one line of JSON to each line it is sent."""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).resolve().parents[1] / "peer_torch_gpu.py"


class PeerError(Exception):
    """The peer has failed, or does not answer."""


class Peer:
    """Started when it is made, and warm until it is closed."""

    def __init__(self, python: str, device: str) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command = [python, str(PROGRAM), "--device", device]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._log, bufsize=0)
        self._unread = b""

    def send(self, **request: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
        except OSError:
            raise PeerError(f"the peer has ended: {self._last_words()}") from None

    def answer(self, timeout: float) -> dict[str, Any]:
        """To the oldest request that has none yet."""
        assert self._process.stdout is not None
        out, end = self._process.stdout.fileno(), time.monotonic() + timeout
        while b"\n" not in self._unread:
            ready, _, _ = select.select([out], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise PeerError(f"no answer after {timeout:.0f} s: {self._last_words()}")
            piece = os.read(out, 1 << 16)
            if not piece:
                raise PeerError(f"the peer has ended: {self._last_words()}")
            self._unread += piece
        line, self._unread = self._unread.split(b"\n", 1)
        result: dict[str, Any] = json.loads(line)
        if "error" in result:
            raise PeerError(result["error"])
        return result

    def ask(self, timeout: float, **request: Any) -> dict[str, Any]:
        self.send(**request)
        return self.answer(timeout)

    def close(self) -> None:
        """End it, which gives its memory back. Never fails."""
        try:
            self._process.kill()
            self._process.wait(10)
        except (OSError, subprocess.TimeoutExpired):
            pass
        finally:
            for stream in (self._process.stdin, self._process.stdout, self._log):
                if stream is not None:
                    stream.close()

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        return " < ".join(reversed(lines[-3:]))[:400] or "it said nothing"
