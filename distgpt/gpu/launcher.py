"""Start our kernels, compiled for one storage type, and those of an exchange of gradients (DeviceWire)."""

from __future__ import annotations

from typing import Any

from distgpt.core.base.errors import UsageError
from distgpt.core.ops.api import Array
from distgpt.gpu.api import STORAGE, address
from distgpt.gpu.compiling import storage_define
from distgpt.gpu.device import BLOCK, CupyDevice

MOVED = 16  # bytes that a thread moves at once where it can
LARGEST = 2**31 - 1  # what kernels count to


class Launcher:
    """Starts the kernels that are compiled for one storage type."""

    def __init__(self, device: CupyDevice, storage: str, itemsize: int) -> None:
        self.device = device
        self._defines = (storage_define(storage),)
        self._pack = MOVED // itemsize
        self._scratch: dict[Any, Array] = {}

    def start(
        self,
        source: str,
        kernel: str,
        grid: int | tuple[int, ...],
        block: int,
        *args: Any,
        shared: int = 0,
        defines: tuple[str, ...] = (),
    ) -> None:
        blocks = (grid,) if isinstance(grid, int) else grid
        self.device.launch(source, kernel, self._defines + defines, blocks, (block,), args, shared)

    def each(self, source: str, kernel: str, width: int, count: int, *args: Any) -> None:
        """Start a kernel with a thread for every piece of `count` elements that lie in rows of `width`."""
        if count > LARGEST:
            many = f"an activation of {count:,} elements is more than a GPU's kernels count to"
            raise UsageError(f"{many} ({source}.{kernel}): smaller micro-batches make it fit")
        variant, w = self.variant(kernel, width, *args)
        self.start(source, variant, -(-count // (BLOCK * w)), BLOCK, *args)

    def variant(self, kernel: str, width: int, *args: Any) -> tuple[str, int]:
        """Return the kernel for rows of this width, and its elements at a time: 16 bytes, or one."""
        arrays = (arg for arg in args if hasattr(arg, "dtype"))
        if width % self._pack == 0 and all(address(array) % MOVED == 0 for array in arrays):
            return f"{kernel}_packed", self._pack
        return f"{kernel}_single", 1

    def scratch(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return memory for one operation at a time, made when it is first needed: never while recording."""
        key = (name, shape)
        if key not in self._scratch:
            self._scratch[key] = self.device.zeros(shape, dtype)
        return self._scratch[key]


PIECE = 1 << 24  # elements: what a start costs is little beside them, and so is their memory
BEYOND = 1 << 31  # from which on a number of 32 bits is a negative C int


class DeviceWire:
    """Implements `kernels.api.Wire`: the same elements as on the host, to the bit."""

    piece = PIECE

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return self._launcher.device.zeros(shape, dtype)

    def dither(self, out: Array, x: Array, index: int, key: int) -> None:
        # Of both the lower 32 bits count.
        lower = ((number + BEYOND) % (2 * BEYOND) - BEYOND for number in (index, key))
        self._start("dither", out.size, out, x, *lower)

    def add_parts(self, total: Array, parts: Array, by_twos: bool) -> None:
        if by_twos:
            raise ValueError("sums by twos are for --reproducible-parts, which are for CPUs")
        kernel = "add_narrow_parts" if parts.dtype == STORAGE["bfloat16"] else "add_parts"
        self._start(kernel, total.size, total, parts, *parts.shape)

    def widen(self, out: Array, x: Array) -> None:
        self._start("widen", out.size, out, x)

    def _start(self, kernel: str, count: int, *args: Any) -> None:
        if count:
            self._launcher.start("wire", kernel, -(-count // BLOCK), BLOCK, *args, count)
