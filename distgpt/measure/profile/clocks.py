"""Two clocks to measure operations by: the processor's, and events in the stream of a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from distgpt.gpu.api import Device
from distgpt.kernels.api import Array


class Clock(Protocol):
    """`now` gives a stamp; what lies between stamps is known later."""

    now: Callable[[], Any]

    def settle(self) -> None:
        """Wait until all work so far is done."""

    def seconds(self, stamps: Sequence[Any], origin: Any) -> Array:
        """From the origin to each stamp. Waits for them."""


class HostClock:
    """For backends whose calls return when their work is done."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now

    def settle(self) -> None:
        return None

    def seconds(self, stamps: Sequence[float], origin: float) -> Array:
        return np.array(stamps) - origin


class DeviceClock:
    """For work that is only queued by a call: the device stamps it when it gets there."""

    def __init__(self, device: Device) -> None:
        self.now, self.settle = device.mark, device.synchronize

    def seconds(self, stamps: Sequence[Any], origin: Any) -> Array:
        return np.array([stamp.seconds_since(origin) for stamp in stamps])
