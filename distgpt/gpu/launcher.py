"""Kernels of ours that are compiled for one storage type, and how wide they move what they read."""

from __future__ import annotations

from typing import Any

from distgpt.gpu.api import Array, address
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
        """A kernel with a thread for every piece of `count` elements that lie in rows of `width`."""
        if count > LARGEST:
            raise ValueError(f"{source}.{kernel}: {count} elements are more than kernels count to")
        variant, w = self.variant(kernel, width, *args)
        self.start(source, variant, -(-count // (BLOCK * w)), BLOCK, *args)

    def variant(self, kernel: str, width: int, *args: Any) -> tuple[str, int]:
        """The kernel for rows of this width, and how many elements it moves at once: 16 bytes, or one."""
        arrays = (arg for arg in args if hasattr(arg, "dtype"))
        if width % self._pack == 0 and all(address(array) % MOVED == 0 for array in arrays):
            return f"{kernel}_packed", self._pack
        return f"{kernel}_single", 1

    def scratch(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """Memory for one operation at a time, made when it is first needed: never while recording."""
        key = (name, shape, self.device.is_aside)
        if key not in self._scratch:
            self._scratch[key] = self.device.zeros(shape, dtype)
        return self._scratch[key]
