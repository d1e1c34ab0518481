"""Processes that help to compile at a first start, when all loops of a run are missing.

Which loops some work needs is found by doing it without them.
Numba compiles one loop at a time in a process, so that all but one of the cores would wait.
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
from distgpt.core.comm.layout import layout
from distgpt.core.comm.resources import MIB, granted_memory, usable_cores
from distgpt.core.components import components
from distgpt.core.cpu import first_use
from distgpt.core.cpu.compiling.disk_cache import Missing, folder, noted
from distgpt.core.cpu.graphs.launch import rehearse
from distgpt.core.cpu.stages import Stage
from distgpt.core.ops.api import Array
from distgpt.core.ops.kernels import Kernels

MOST = 3  # helpers: with more, the loop that takes longest, a sixth of all, decides
WORTHWHILE = 5  # loops: a process takes a second to begin
BYTES = 400 * MIB  # of a helper, with room
Work = Callable[[Kernels], None]
Name = tuple[str, str, object]  # module and name of a loop, and the types of its arguments


def start(stage: Stage, dtype: str, matmul: str, work: Work) -> Callable[[], None]:
    """Start helpers for the loops that `work` needs, as far as this node's ranks have cores and memory.

    Return what ends them, once nobody waits for their loops any more.
    """
    helpers: list[subprocess.Popen[bytes]] = []
    with suppress(Exception), layout().unbound():  # without help each loop is compiled where it is called
        cores = min(stage.comm.local_size * stage.threads, len(usable_cores()))
        count = min(cores - 1, MOST, granted_memory().free // BYTES - 1)
        if count >= 1 and folder() is not None:  # else there is nowhere to hand loops over
            missing = missing_loops(stage, dtype, matmul, work)
            # From the last one on, as this process begins with the first.
            loops = list(filter(None, map(_name, reversed(missing))))
            if len(missing) >= WORTHWHILE:
                shares = (loops[number::count] for number in range(count))
                helpers.extend(map(_started, filter(None, shares)))
    return partial(end, helpers)


def end(helpers: list[subprocess.Popen[bytes]]) -> None:
    for helper in helpers:
        helper.kill()
        helper.wait()


def missing_loops(stage: Stage, dtype: str, matmul: str, work: Work) -> list[Missing]:
    """Return the loops that `work` calls and that nobody has compiled yet, in their order.

    Those that this process has not loaded do not run: what they would write is not there.
    """
    make = components().kernels(dtype)
    kernels: Any = make(replace(stage, threads=1), dtype, matmul)  # all calls in this thread
    kernels.record = lambda work: work

    def one(total: Array, g: Array) -> None:
        """Sum, for the loop's sake, and return what an optimizer takes for a norm."""
        type(kernels).sum_squares(kernels, total, g)
        total[0] = 1.0

    kernels.sum_squares = one
    found: dict[Missing, None] = {}
    before = noted.set(found)
    try:
        with np.errstate(all="ignore"):
            work(kernels)
        rehearse(stage.threads)  # the loops that `record` above leaves out
    finally:
        noted.reset(before)
    return list(found)


def _name(missing: Missing) -> Name | None:
    """Return how another process finds a loop; None if it cannot, as one that was made inside a function."""
    loop, types = missing
    module, name = loop.__module__, loop.__qualname__
    with suppress(AttributeError, KeyError):
        attrgetter(name)(sys.modules[module])
        return module, name, types
    return None


def _started(loops: list[Name]) -> subprocess.Popen[bytes]:
    """Start a process that compiles these loops."""
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
    """Compile the loops whose names come in, and keep them on disk: what a worker does."""
    first_use.announce(lambda text: None)  # whoever started it has said it
    parent = os.getppid()
    for module, name, types in pickle.load(sys.stdin.buffer):
        if os.getppid() != parent:  # it was killed, and nobody waits
            return
        with suppress(Exception):  # whoever needs it compiles it, and reports why that fails
            loop: Any = attrgetter(name)(import_module(module))
            loop.compile(types)
