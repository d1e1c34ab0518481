"""Helper processes that compile at a first start, when all loops of a run are missing.

Numba compiles one loop at a time per process, which would leave all cores but one idle. A dry run of the work
finds the loops that it needs.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from operator import attrgetter
from typing import Any

import numpy as np

from distgpt.core.base.system import python_code
from distgpt.core.comm.affinity import affinity
from distgpt.core.comm.resources import MIB, granted_memory, usable_cores
from distgpt.core.components import components
from distgpt.core.cpu import first_use
from distgpt.core.cpu.compiling.disk_cache import Missing, folder, noted
from distgpt.core.cpu.graphs.launch import warmup_pass
from distgpt.core.cpu.stages import Stage
from distgpt.core.ops.api import Array
from distgpt.core.ops.kernels import Kernels

MOST = 3  # helpers: with more, the slowest loop, 1/6 of all compile time, is the limit
WORTHWHILE = 5  # loops: starting a process takes a second
BYTES = 400 * MIB  # per helper, with a margin
Work = Callable[[Kernels], None]
Name = tuple[str, str, object]  # module and name of a loop, and the types of its arguments


def start(stage: Stage, dtype: str, matmul: str, work: Work) -> Callable[[], None]:
    """Start helpers for the loops that `work` needs, within the cores and memory of this node's ranks.

    Return a function that ends them. Call it once their loops are no longer needed.
    """
    helpers: list[subprocess.Popen[bytes]] = []
    # Without helpers, each loop is compiled when it is first called.
    with suppress(Exception), affinity().unbound():
        cores = min(stage.comm.local_size * stage.threads, len(usable_cores()))
        count = min(cores - 1, MOST, granted_memory().free // BYTES - 1)
        if count >= 1 and folder() is not None:  # Without a directory, helpers cannot share their loops.
            missing = missing_loops(stage, dtype, matmul, work)
            # Start with the last loop because this process starts with the first.
            loops = list(filter(None, map(loop_name, reversed(missing))))
            if len(missing) >= WORTHWHILE:
                shares = (loops[number::count] for number in range(count))
                helpers.extend(map(started, filter(None, shares)))
    return partial(end, helpers)


def end(helpers: list[subprocess.Popen[bytes]]) -> None:
    for helper in helpers:
        helper.kill()
        helper.wait()


def missing_loops(stage: Stage, dtype: str, matmul: str, work: Work) -> list[Missing]:
    """Return the loops that `work` calls and that are not in the cache yet, in call order.

    Loops that this process has not loaded do not run, so their outputs stay unset.
    """
    make = components().kernels(dtype)
    kernels: Any = make(replace(stage, threads=1), dtype, matmul)  # in this thread
    kernels.record = lambda work: work

    def one(total: Array, g: Array) -> None:
        """Call the loop so that it is recorded, then set a valid norm for the optimizer."""
        type(kernels).sum_squares(kernels, total, g)
        total[0] = 1.0

    kernels.sum_squares = one
    result: dict[Missing, None] = {}
    before = noted.set(result)
    try:
        with np.errstate(all="ignore"):
            work(kernels)
        warmup_pass(stage.threads)  # `record` above skips these loops
    finally:
        noted.reset(before)
    return list(result)


def loop_name(missing: Missing) -> Name | None:
    """Return a loop's name for another process, or None (for example, if a function defines the loop)."""
    loop, types = missing
    module, name = loop.__module__, loop.__qualname__
    with suppress(AttributeError, KeyError):
        attrgetter(name)(sys.modules[module])
        return module, name, types
    return None


def started(loops: list[Name]) -> subprocess.Popen[bytes]:
    helper = subprocess.Popen(
        python_code("from distgpt.core.cpu.compile_workers import main; main()"),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert helper.stdin
    with helper.stdin as pipe:
        pickle.dump(loops, pipe)
    return helper


def main() -> None:
    """Compile the loops whose names arrive on stdin and keep them on disk. Entry point of a helper."""
    first_use.announce(lambda text: None)  # the parent process has reported it
    parent = os.getppid()
    for module, name, types in pickle.load(sys.stdin.buffer):
        if os.getppid() != parent:  # the parent was killed
            return
        with suppress(Exception):  # The process that needs the loop compiles it and reports the error.
            loop: Any = attrgetter(name)(import_module(module))
            loop.compile(types)
