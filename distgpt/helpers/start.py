"""Find out which loops some work needs, by doing it without them, and let other processes compile them.

Numba compiles one loop at a time in a process, so that all but one of the cores would wait.
"""

from __future__ import annotations

import atexit
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np

from distgpt.core.comm.layout import layout
from distgpt.core.comm.resources import MIB, granted_memory, usable_cores
from distgpt.core.cpu.compiling.disk_cache import Needed, folder, noted
from distgpt.core.cpu.stages import KERNELS, Stage
from distgpt.core.ops.api import Array, Kernels

MOST = 3  # helpers: with more, the loop that takes longest, a sixth of all, decides
BYTES = 400 * MIB  # of a helper, with room
Work = Callable[[Kernels], None]

_started: list[subprocess.Popen[bytes]] = []


def start(stage: Stage, dtype: str, matmul: str, work: Work) -> None:
    """Start helpers for the loops that `work` needs, as far as this node's ranks have cores and memory."""
    if folder() is None:  # nowhere to hand loops over
        return
    with suppress(Exception), layout().unbound():  # each loop is compiled where it is called, too
        cores = min(stage.comm.local_size * stage.threads, len(usable_cores()))
        count = min(cores - 1, MOST, granted_memory().free // BYTES - 1)
        # From the last one on, as this process begins with the first.
        loops = [name for needed in reversed(needed_loops(stage, dtype, matmul, work)) if (name := _name(needed))]
        for number in range(count):
            if own := loops[number::count]:
                _start(pickle.dumps(own))


def needed_loops(stage: Stage, dtype: str, matmul: str, work: Work) -> list[Needed]:
    """Return the loops that `work` calls and that this process does not have yet, in their order.

    None of them runs: what they would write is not there, and nothing may depend on it.
    """
    kernels: Any = KERNELS[dtype](replace(stage, threads=1), dtype, matmul)  # all calls in this thread
    kernels.record = lambda work: work

    def one(total: Array, g: Array) -> None:
        """Sum, for the loop's sake, and return what an optimizer takes for a norm."""
        type(kernels).sum_squares(kernels, total, g)
        total[0] = 1.0

    kernels.sum_squares = one
    found: dict[Needed, None] = {}
    before = noted.set(found)
    try:
        with np.errstate(all="ignore"):
            work(kernels)
    finally:
        noted.reset(before)
    return list(found)


def _name(needed: Needed) -> tuple[str, str, object] | None:
    """Return how another process finds a loop; None if it cannot, as one that was made inside a function."""
    loop, types = needed
    module, name = loop.__module__, loop.__qualname__
    with suppress(AttributeError, KeyError):
        attrgetter(name)(sys.modules[module])
        return module, name, types
    return None


def _start(loops: bytes) -> None:
    # Modules are found where this process finds them, whatever has changed its path.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    helper = subprocess.Popen(
        [sys.executable, "-m", "distgpt.helpers.helper"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    if not _started:
        atexit.register(end)
    _started.append(helper)
    assert helper.stdin
    with helper.stdin as pipe:
        pipe.write(loops)


def end() -> None:
    """End the helpers that are still at work: nobody waits for their loops any more."""
    while _started:
        helper = _started.pop()
        helper.kill()
        helper.wait()
