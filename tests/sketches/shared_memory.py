"""Sum gradients of the ranks of one machine through memory that they share, without MPI's copies.

A row of `exchanges`: "shared": "shared_memory:make". Each rank writes its gradients into a row of
its own, sums one part of all rows, and reads the sums of the others. Every element is summed by one rank,
in the order of the ranks: all get the same bits. Lacking today: an exchange has no call at the end of a
run, in which the memory would be given back; here the interpreter's end does it.
"""

from __future__ import annotations

import atexit
from multiprocessing.shared_memory import SharedMemory

import numpy as np

from distgpt.core.base.errors import Say, UsageError
from distgpt.core.comm.agree import refuse_anywhere
from distgpt.core.comm.api import Comm
from distgpt.core.config import TrainConfig
from distgpt.core.ops.api import Array
from distgpt.core.train.sharing import AfterBackward, Exchange, OptimizerState, Reduction


class SharedSum(Reduction):
    def __init__(self, comm: Comm, flat: Array) -> None:
        self._comm, self._flat = comm, flat
        size = comm.size * flat.nbytes
        made = SharedMemory(create=True, size=size) if comm.rank == 0 else None
        name = comm.broadcast_bytes(made.name.encode() if made else None).decode()
        self._memory = made or SharedMemory(name)
        self._rows = np.ndarray((comm.size, len(flat)), flat.dtype, self._memory.buf)
        atexit.register(self._close, bool(made))

    def sum(self, start: int, stop: int, step: int) -> None:
        rank, size = self._comm.rank, self._comm.size
        self._rows[rank, start:stop] = self._flat[start:stop]
        self._comm.barrier()  # all rows are written
        own = slice(start + (stop - start) * rank // size, start + (stop - start) * (rank + 1) // size)
        self._rows[0, own] = self._rows[:, own].sum(0)
        self._comm.barrier()  # all sums are there
        self._flat[start:stop] = self._rows[0, start:stop]
        self._comm.barrier()  # all have read them: the next step may write

    def _close(self, is_owner: bool) -> None:
        self._memory.close()
        if is_owner:
            self._memory.unlink()


def make(comm: Comm, state: OptimizerState, t: TrainConfig, say: Say) -> Exchange:
    refuse_anywhere(comm, "" if comm.local_size == comm.size else "shared memory is for ranks of one machine")
    if state.optimizer.model.kernels.capabilities.is_async:
        raise UsageError("shared memory is for CPU stages")
    flat = state.optimizer.model.grads.with_flags
    return AfterBackward("shared", SharedSum(comm, flat), len(flat), lambda: None, 1.0 / comm.size)
