"""A second stream beside the first, for gradients of weights: no layer waits for them."""

from __future__ import annotations

import os
from typing import Any

from distgpt.gpu.api import Work
from distgpt.gpu.device import CupyDevice

VARIABLE = "DISTGPT_SECOND_STREAM"


def is_wanted() -> bool:
    """Whether it is turned on. Nobody has measured yet whether it is faster."""
    return os.environ.get(VARIABLE) == "1"


class Beside:
    """Work on that stream, while the device records. Else it is done in order: what is timed runs alone."""

    def __init__(self, device: CupyDevice) -> None:
        self._device = device
        self._stream: Any = None
        self._under_way = False

    def start(self, work: Work) -> None:
        """Let work() begin behind everything so far; what follows goes on without it until `join`."""
        device = self._device
        if not device.recording:
            with device.on(device.stream, aside=True):
                work()
            return
        self._stream = self._stream or device.second_stream()
        device.after(self._stream, device.stream)
        with device.on(self._stream, aside=True):
            work()
        self._under_way = True

    def join(self) -> None:
        """Let what follows wait for that work."""
        if self._under_way:
            self._device.after(self._device.stream, self._stream)
        self._under_way = False
