"""The command line on a GPU that is not there: all of distgpt's code, with stand-ins for CUDA's libraries.

CuPy is `fakecupy`, which queues and records; kernels run as host C++, and cuBLASLt is the host's. The
environment variable WHOLE_GPU holds the path of that library and the number of GPUs.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

import numpy as np
from fakecupy import FakeCupy
from hostbuild import build

from distgpt.gpu import cublaslt, device, probe
from distgpt.gpu.compiling import source_text
from distgpt.machine import processes
from distgpt.measure import peaks


class Lt(cublaslt.CublasLt):
    """In the stream's order. What a descriptor says counts at the start of a product, not when it is done."""

    def __init__(self, library: ctypes.CDLL, xp: FakeCupy) -> None:
        super().__init__(library)
        self._xp, self._said = xp, {}
        self._now = library.cublasLtMatmul
        self.matmul = self._queue

    def set_descriptor(self, descriptor: int, attribute: Any, value: int) -> None:
        super().set_descriptor(descriptor, attribute, value)
        self._said.setdefault(descriptor, {})[attribute] = value

    def _queue(self, handle: int, descriptor: int, *rest: Any) -> int:
        stream = next(stream for stream in self._xp.streams if stream.ptr == rest[-1])
        said = dict(self._said[descriptor])

        def again() -> None:
            for attribute, value in said.items():
                super(Lt, self).set_descriptor(descriptor, attribute, value)
            assert self._now(handle, descriptor, *rest) == 0

        if stream.captured is not None:
            stream.enqueue(again)
            return 0
        stream.run(stream.begun)  # whether it can be started is known at once
        return self._now(handle, descriptor, *rest)


class Kernels:
    """What the fake's functions do: the kernel of that name in the source that was "compiled"."""

    def __init__(self, cubin: bytes) -> None:
        source, *defines = cubin.decode().split("\0")
        self._program = build(source_text(source), tuple(defines))

    def start(self, name: str, grid: Any, block: Any, args: Any, shared: int) -> None:
        types, entry = self._program.entry(name)
        values = [self._value(wanted, arg) for wanted, arg in zip(types, args, strict=True)]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        sizes = ((ctypes.c_uint * 3)(*each, *[1] * (3 - len(each))) for each in (grid, block))
        failure = entry(*sizes, shared, False, pointers)
        assert not failure, (name, failure)

    @staticmethod
    def _value(wanted: str, arg: Any) -> Any:
        if wanted[0] == "*":
            return ctypes.c_void_p(arg.ctypes.data if isinstance(arg, np.ndarray) else int(arg))
        assert (wanted, type(arg)) in (("i", np.int32), ("d", np.float64))
        return ctypes.c_int(int(arg)) if wanted == "i" else ctypes.c_double(float(arg))


def install(library: str, gpus: int) -> FakeCupy:
    """From here on `import cupy` finds a machine with so many GPUs; without a library, none to compute on."""
    xp = FakeCupy(devices=gpus, free=4 << 30, total=8 << 30)
    xp.cuda.runtime.runtimeGetVersion = lambda: 13000
    xp.cuda.get_elapsed_time = lambda start, end: 1.0
    programs: dict[bytes, Kernels] = {}

    def function(module: Any, name: str) -> Any:
        programs.setdefault(module.cubin, Kernels(module.cubin))

        def launch(grid: Any, block: Any, args: Any, shared_mem: int = 0, stream: Any = None) -> None:
            memory = [getattr(arg, "memory", arg) for arg in args]
            stream.enqueue(lambda: programs[module.cubin].start(name, grid, block, memory, shared_mem))

        return launch

    class Module:
        def load(self, cubin: bytes) -> None:
            self.cubin = cubin

        def get_function(self, name: str) -> Any:
            return function(self, name)

    xp.cuda.function.Module = Module
    sys.modules["cupy"] = xp
    device.cubin = lambda source, defines, arch: "\0".join((source, *defines)).encode()
    probe.require_gpu = lambda *args, **more: None
    peaks.SIDES, peaks.MEMORY_BYTES, peaks.SECONDS = (32,), 1 << 12, 0.03
    lt = Lt(ctypes.CDLL(library), xp) if library else None
    cublaslt.load = lambda: lt
    return xp


if __name__ == "__main__":
    # Commands that start distgpt start this program.
    processes.distgpt_command = lambda *words: [sys.executable, __file__, *map(str, words)]
    path, count = os.environ["WHOLE_GPU"].split(":")
    install(path, int(count))
    from distgpt.cli import main

    main()
