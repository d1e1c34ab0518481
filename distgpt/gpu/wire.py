"""What an exchange of gradients computes with on a GPU."""

from __future__ import annotations

from typing import Any

from distgpt.gpu.api import STORAGE, Array
from distgpt.gpu.device import BLOCK
from distgpt.gpu.launcher import Launcher

PIECE = 1 << 24  # elements: what a start costs is little beside them, and so is their memory
MOST_KEY = 1 << 31  # from which on a key is a negative C int


class DeviceWire:
    """As `kernels.api.Wire`: the same numbers as on the host, to the bit."""

    piece = PIECE

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return self._launcher.device.zeros(shape, dtype)

    def dither(self, out: Array, x: Array, index: int, key: int) -> None:
        self._start("dither", out.size, out, x, index, key - (key >= MOST_KEY) * 2 * MOST_KEY)

    def add_parts(self, total: Array, parts: Array, by_twos: bool) -> None:
        if by_twos:
            raise ValueError("sums by twos are for --units, which are for CPUs")
        kernel = "add_narrow_parts" if parts.dtype == STORAGE["bfloat16"] else "add_parts"
        self._start(kernel, total.size, total, parts, *parts.shape)

    def widen(self, out: Array, x: Array) -> None:
        self._start("widen", out.size, out, x)

    def _start(self, kernel: str, count: int, *args: Any) -> None:
        if count:
            self._launcher.start("wire", kernel, -(-count // BLOCK), BLOCK, *args, count)
