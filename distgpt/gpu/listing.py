"""Find out which sources some work needs, by doing it on a device that only takes notes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any, cast

import numpy as np
from numpy.lib.stride_tricks import as_strided

from distgpt.core.comm.resources import usable_cores
from distgpt.core.ops.api import Array, Work
from distgpt.core.ops.kernels import Kernels
from distgpt.gpu.compiling import Kind
from distgpt.gpu.device import CupyDevice
from distgpt.gpu.kernels import CudaKernels
from distgpt.gpu.matmul import LtMatmul


class Notes:
    """Stands in for a `CupyDevice`: arrays have a shape and no memory, and what is launched is noted."""

    deterministic = recording = False

    def __init__(self, device: CupyDevice) -> None:
        self.capability, self.multiprocessors = device.capability, device.multiprocessors
        self.memory, self.name = device.memory, device.name
        self.kinds: set[Kind] = set()

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return as_strided(np.zeros(1, dtype), shape, [0] * len(shape))

    def launch(self, source: str, kernel: str, defines: tuple[str, ...], *_: Any, **__: Any) -> None:
        self.kinds.add((source, defines))

    def fastest(self, key: Hashable, candidates: Sequence[Work]) -> None:
        for each in candidates:
            each()

    def record(self, work: Work) -> Work:
        return work

    def between(self, act: Work) -> None:
        act()

    def download(self, array: Array) -> Array:
        return array

    def later(self, array: Array) -> Callable[[], Array]:
        return lambda: array

    def upload(self, array: Array, host: Any) -> None: ...

    def zero(self, array: Array) -> None: ...

    def copy(self, array: Array, source: Array) -> None: ...


class _NoMatmuls:
    """Stands in for `LtMatmul`: a library has what it needs compiled."""

    def can(self, kind: object) -> bool:
        return True

    def run(self, *_: Any, **__: Any) -> None: ...


def kinds_for(device: CupyDevice, dtype: str, work: Callable[[Kernels], None]) -> set[Kind]:
    """Return the sources and macros of what `work` starts with kernels of this device.

    Of attention those of our own, which is tried first also where a library's is then taken.
    """
    notes = Notes(device)
    on_notes, nothing = cast(CupyDevice, notes), cast(LtMatmul, _NoMatmuls())
    work(cast(Kernels, CudaKernels(on_notes, nothing, dtype)))
    return notes.kinds


def compile_ahead(
    device: CupyDevice,
    dtype: str,
    work: Callable[[Kernels], None],
    local_rank: int = 0,
) -> None:
    """Let threads compile what `work` will need, while this process reads files and makes weights.

    `local_rank`: this rank among those of its node, which share the work.
    """
    with suppress(Exception):  # a head start: what fails here fails again, or not, where it is needed
        device.compile_ahead(kinds_for(device, dtype, work), len(usable_cores()), local_rank)
