"""Stages: the kernels that compute and the communicator that connects. Backends are chosen here.

| stage      | kernels | communicator |
|------------|---------|--------------|
| `serial`   | CPU     | one process  |
| `mpi`      | CPU     | MPI          |

GPU stages are outside the core. `Components.stage` returns each stage.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from distgpt.core.base.caches import CACHE, misplaced
from distgpt.core.base.errors import Say, UsageError
from distgpt.core.comm.affinity import affinity
from distgpt.core.comm.agree import on_every_rank, on_root
from distgpt.core.comm.api import Comm
from distgpt.core.comm.job import this_job
from distgpt.core.comm.resources import granted_memory
from distgpt.core.components import components
from distgpt.core.config import DTYPES, ON_GPU, STAGES, GpuConfig, RunConfig, did_you_mean
from distgpt.core.cpu import first_use

if TYPE_CHECKING:  # commands import this file and must start without NumPy
    from distgpt.core.ops.kernels import Kernels

MOST_THREADS = 1024  # more than any node has, so that a typo does not start that many threads
NOT_KEPT = (
    "cannot cache compiled loops, so every start compiles them again, for about a minute; "
    f"set {CACHE} to a directory only you can write to"
)
SLOW_BFLOAT16 = (
    "this processor computes bfloat16 with float32 instructions, which saves memory and speeds up"
    " generation, but not training"
)

# Overrides --dtype auto, for tests and for sites with different processors.
VARIABLE = "DISTGPT_AUTO_DTYPE"
# Bytes of float32 weights that exceed any cache, so that CPU generation reads them from memory for every
# token. With GPT-2 124M (496 MB), bfloat16 decoded 1.4x to 2.0x as fast on five x86 processors, three of them
# without bfloat16 instructions (docs/explanation/performance.md). arm64 was not measured.
READ_FROM_MEMORY = 1 << 28

connected: list[Comm] = []  # communicators of this process's stages, for shutdown


class Dtype(NamedTuple):
    """A number format and why it was chosen; "" if the user set it."""

    name: str
    why: str = ""


# (--matmul, number of weights that are read for every token) → choice. The second is 0 for training, in which
# a batch of tokens shares each read.
Choose = Callable[[str, int], Dtype]


def chosen(choose: Choose, matmul: str, weights: int) -> Dtype:
    """Return the dtype in the variable, if set; otherwise, choose it."""
    if fixed := os.environ.get(VARIABLE):
        if fixed not in DTYPES:
            raise UsageError(f"{VARIABLE} is {fixed!r:.80}{did_you_mean(fixed, DTYPES)}")
        return Dtype(fixed)
    return choose(matmul, weights)


def dtype_on_cpu(matmul: str, weights: int) -> Dtype:
    """Choose by this processor's instructions."""
    from distgpt.core.cpu.compiling import processor

    shape = processor.shape()
    if 4 * weights >= READ_FROM_MEMORY and shape != processor.ARM64:
        return Dtype("bfloat16", "each token reads half the bytes of float32")
    if matmul != "auto":
        return Dtype("float32", f"--matmul {matmul} applies to float32")
    if not shape.dot:  # tiles widen pairs to float32 and multiply these: at best as fast as float32
        return Dtype("float32", processor.hint() or "this processor has no fast instructions for bfloat16")
    # A Zen 4 multiplies 768 by 3,072 columns at 439 GFLOP/s instead of 207, and the matrices of `tiny` 1.9x
    # as fast. A core of an Emerald Rapids reaches 600 to 950 instead of 105 GFLOP/s (performance.md).
    if shape.amx:
        return Dtype("bfloat16", "AMX multiplies bfloat16 at least 5x as fast as float32")
    return Dtype("bfloat16", "this processor multiplies bfloat16 up to 2x as fast as float32")


class Notes:
    """Messages about the stage, kept until a listener exists and then sent to the listener."""

    def __init__(self) -> None:
        self._kept: list[str] = []
        self._listener: Callable[[str], None] = self._kept.append
        self._known: set[str] = set()  # avoids repeats: kernels are created again after --within has measured

    def add(self, text: str) -> None:
        if text not in self._known:
            self._known.add(text)
            self._listener(text)

    def report_to(self, listener: Callable[[str], None]) -> None:
        self._listener = listener
        for text in self._kept:
            listener(text)
        self._kept.clear()  # a second listener does not receive them again


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage that is ready to compute, here on a CPU. Each rank computes with `threads` threads."""

    name: str
    comm: Comm
    threads: int
    notes: Notes = field(default_factory=Notes)
    begun: float = field(default_factory=time.monotonic)
    transport: str = ""  # how gradients move between ranks, if not only through the communicator

    on_gpu: ClassVar[bool] = False

    def kernels(self, dtype: str, matmul: str = "auto") -> Kernels:
        """Return kernels of a dtype. Collective.

        If a rank cannot compute in this dtype, all ranks raise the error.
        """
        from distgpt.core.cpu.compiling import disk_cache

        make = on_every_rank(self.comm, lambda: components().kernels(dtype))
        affinity().bind()  # before kernels start threads and models allocate memory
        if not disk_cache.site():
            kept_in = disk_cache.folder()
            if trouble := misplaced(kept_in) if kept_in else NOT_KEPT:
                self.notes.add(trouble)
        return make(self, dtype, matmul)

    def free_memory(self, ranks: int = 0) -> tuple[int, str]:
        """Return this rank's free bytes, as if `ranks` shared the memory, and the memory's description."""
        granted = granted_memory(ranks or self.comm.local_size)
        return granted.free, granted.where

    def taken_memory(self) -> int:
        """Return the peak memory use of the device in bytes; 0 on CPUs."""
        return 0

    def dtype_choice(self) -> Choose:
        """Return the function that resolves --dtype auto. Collective."""
        return dtype_on_cpu

    def auto_dtype(self, matmul: Callable[[], str] = lambda: "auto", weights: int = 0) -> Dtype:
        """Resolve --dtype auto. Only rank 0 has --matmul, so it decides for all. Collective.

        `weights` is the number of weights that generation reads for every token; 0 for training.
        """
        choose = self.dtype_choice()
        return on_root(self.comm, lambda: chosen(choose, matmul(), weights))


@dataclass(frozen=True, slots=True)
class StageKind:
    """Functions that open a stage on this machine and resolve its dtype."""

    # (name, ranks, --threads, ...) → stage; collective
    open: Callable[[str, Comm, int | None, GpuConfig], Stage]
    dtype_choice: Callable[[bool], Choose]  # (--tf32) → function that resolves --dtype auto


def _open_on_cpu(name: str, comm: Comm, threads: int | None, gpu: GpuConfig) -> Stage:
    given = threads is not None
    stage = Stage(name, comm, threads or affinity().threads(comm))
    notes = this_job().notes(comm, name, stage.threads, threads_given=given)
    for note in (*notes, *affinity().place(comm, stage.threads, threads_given=given)):
        stage.notes.add(note)
    return stage


ON_CPU = StageKind(_open_on_cpu, lambda tf32: dtype_on_cpu)

# (stage, dtype, --matmul) → kernels. Their imports are lazy because Numba takes a second.
MakeKernels = Callable[[Stage, str, str], "Kernels"]


def cpu_kernels(stage: Stage, dtype: str, matmul: str) -> Kernels:
    from distgpt.core.cpu.compiling import processor
    from distgpt.core.cpu.graphs.capture import record
    from distgpt.core.cpu.kernels import Bfloat16Kernels, CpuKernels

    if dtype != "bfloat16":
        return CpuKernels(dtype, stage.threads, matmul, record=record)
    if hint := processor.hint():
        stage.notes.add(hint)
    elif not processor.shape().dot:
        stage.notes.add(SLOW_BFLOAT16)
    return Bfloat16Kernels(stage.threads, record)


def expected_dtype(stage: str, run: RunConfig, tf32: bool = False) -> Dtype:
    """Return the dtype that a new run would use in this stage on this machine, without opening it."""
    return chosen(components().stage(stage).dtype_choice(tf32), run.train.matmul, 0)


def open_stage(name: str, threads: int | None = None, gpu: GpuConfig | None = None) -> Stage:
    """Start the stage's backends. Reject launches that would not do what they appear to do. Collective."""
    if name not in STAGES:
        raise UsageError(f"unknown stage {name!r}{did_you_mean(name, STAGES)}")
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise UsageError(f"--threads must be at least 1 and at most {MOST_THREADS}, not {threads}")
    if name not in ON_GPU and gpu not in (None, GpuConfig()):
        raise UsageError(f"stage {name!r} does not use a GPU; GPU options require {' or '.join(ON_GPU)}")
    if name in ON_GPU and threads is not None:
        raise UsageError(f"stage {name!r} uses a GPU; --threads requires a CPU stage")
    kind = components().stage(name)
    job = this_job()
    comm = job.connect(name)
    # Order matters. After `connected`, a rank that fails must end the job. Ranks must agree on their settings
    # before any of them computes. Compilation must be reported from the first kernel on.
    connected.append(comm)
    job.meet(comm)
    report_compiling(comm)
    return kind.open(name, comm, threads, gpu or GpuConfig())


def report_compiling(comm: Comm, say: Say | None = None) -> None:
    """Let only rank 0 report compilations, to `say` or standard error."""
    first_use.announce(say if comm.rank == 0 else lambda text: None)
