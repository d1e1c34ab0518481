"""The stages: which kernels compute and which communicator connects. Where a backend is chosen.

| stage      | kernels | communicator |
|------------|---------|--------------|
| `serial`   | CPU     | one process  |
| `mpi`      | CPU     | MPI          |

Those on GPUs are rows of the same table, and lie in a component.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from distgpt.core.base.errors import Say, UsageError
from distgpt.core.base.formatting import count
from distgpt.core.base.tables import Table
from distgpt.core.comm.agree import gather_bytes, named_ranks, on_every_rank, on_root, ranks_by_text
from distgpt.core.comm.api import Comm
from distgpt.core.comm.cores import boot_id, usable_cores
from distgpt.core.comm.joining import connect, join
from distgpt.core.comm.launched import launched_as
from distgpt.core.comm.limits import granted_cores, granted_memory
from distgpt.core.comm.serial import SerialComm
from distgpt.core.config import ON_GPU, SEVERAL, STAGES, WITH_MPI, GpuConfig, RunConfig, nearest
from distgpt.core.cpu import dtypes, first_use
from distgpt.core.cpu.dtypes import Choose, Dtype
from distgpt.core.ops.api import Kernels

MOST_THREADS = 1024
NOT_KEPT = (
    "compiled loops cannot be kept, so every start compiles them anew, for about a minute: "
    "set XDG_CACHE_HOME to a folder that only you can write to"
)
SLOW_BFLOAT16 = (
    "this processor computes bfloat16 with float32 instructions: less memory and faster generation than with "
    "--dtype float32, but no faster training"
)

connected: list[Comm] = []  # the communicators of this process's stages, for its way out


class Notes:
    """Lines about the stage for the user: kept until there is a listener, from then on passed to it."""

    def __init__(self) -> None:
        self._kept: list[str] = []
        self._listener: Callable[[str], None] = self._kept.append
        self._known: set[str] = set()  # kernels are made again after --within has measured

    def add(self, text: str) -> None:
        if text not in self._known:
            self._known.add(text)
            self._listener(text)

    def report_to(self, listener: Callable[[str], None]) -> None:
        self._listener = listener
        for text in self._kept:
            listener(text)
        self._kept.clear()  # each is told once, also to a second listener


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage that is ready to compute, here on a CPU. `threads` is what each rank uses to compute with."""

    name: str
    comm: Comm
    threads: int
    notes: Notes = field(default_factory=Notes)
    begun: float = field(default_factory=time.monotonic)
    transport: str = ""  # how gradients get from rank to rank, where the communicator does not do that alone

    on_gpu: ClassVar[bool] = False

    def kernels(self, dtype: str, matmul: str = "auto", use: str = "") -> Kernels:
        """Return kernels of a dtype. `use` names what they are for, if they have to be compiled. Collective.

        A dtype that some rank can't compute in is refused on all.
        """
        from distgpt.core.cpu.compiling import disk_cache

        make = on_every_rank(self.comm, lambda: maker_of(dtype))
        first_use.begin(f"{use} in {dtype}" if use else dtype)
        if not disk_cache.site().files and disk_cache.folder() is None:
            self.notes.add(NOT_KEPT)
        return make(self, dtype, matmul)

    def compile_ahead(self, dtype: str, work: Callable[[Kernels], None]) -> None:
        """Begin to compile what `work` will need, beside other things. Here each loop is made when called."""

    def free_memory(self, ranks: int = 0) -> tuple[int, str]:
        """Return the bytes that this rank may use, and whose they are, as if `ranks` shared them."""
        granted = granted_memory(ranks or self.comm.local_size)
        return granted.free, granted.where

    def taken_memory(self) -> int:
        """Return the bytes of a device's own memory that were taken at most."""
        return 0

    def auto_dtype(self) -> Choose:
        """Return what chooses --dtype auto, the same on all ranks. Collective."""
        return dtypes.on_cpu

    def cost_of(self, dtype: object) -> str:
        """Return what a dtype that was asked for costs here; "" where it costs nothing."""
        return ""

    def dtype_for_training(self, configured: Callable[[], RunConfig]) -> Dtype:
        """Return what a run takes: rank 0, which configures it, decides for all. Collective."""
        choose = self.auto_dtype()

        def decide() -> list[str]:
            run = configured()
            found = dtypes.chosen(choose, run.model.n_embd, run.train.matmul)
            return [found.name, found.why]

        return Dtype(*on_root(self.comm, decide))

    def dtype_for_generation(self, width: int, elements: int) -> Dtype:
        """Return what generation by a model of that many elements takes. Collective."""
        choose = self.auto_dtype()

        def decide() -> list[str]:
            found = dtypes.chosen(choose, width, elements=elements)
            return [found.name, found.why]

        return Dtype(*on_root(self.comm, decide))


@dataclass(frozen=True, slots=True)
class StageKind:
    """A row of the table of stages."""

    open: Callable[[str, Comm, int | None, GpuConfig], Stage]  # (name, ranks, --threads, ...); collective
    auto_dtype: Callable[[bool], Choose]  # (--tf32): what chooses --dtype auto on this machine


def _open_on_cpu(name: str, comm: Comm, threads: int | None, gpu: GpuConfig) -> Stage:
    stage = Stage(name, comm, threads or threads_of(comm))
    _note_launch(stage, threads_given=threads is not None)
    return stage


_ON_CPU = StageKind(_open_on_cpu, lambda tf32: dtypes.on_cpu)
KINDS: Table[StageKind] = Table("stages", "stage", {"serial": _ON_CPU, "mpi": _ON_CPU})

# (stage, dtype, --matmul) → kernels. What they need is imported when they are made: Numba takes a second.
MakeKernels = Callable[[Stage, str, str], Kernels]


def _float_kernels(stage: Stage, dtype: str, matmul: str) -> Kernels:
    from distgpt.core.cpu.kernels import CpuKernels

    return CpuKernels(dtype, stage.threads, matmul)


def _bfloat16_kernels(stage: Stage, dtype: str, matmul: str) -> Kernels:
    from distgpt.core.cpu.compiling import processor
    from distgpt.core.cpu.kernels import Bfloat16Kernels

    if hint := processor.hint():
        stage.notes.add(hint)
    elif not processor.shape().dot:
        stage.notes.add(SLOW_BFLOAT16)
    return Bfloat16Kernels(stage.threads)


# By dtype.
KERNELS: Table[MakeKernels] = Table(
    "kernels", "dtype", {"float32": _float_kernels, "float64": _float_kernels, "bfloat16": _bfloat16_kernels}
)


def maker_of(dtype: str) -> MakeKernels:
    """Return what makes the kernels of a dtype on CPUs."""
    if dtype not in (known := tuple(KERNELS)):
        raise UsageError(f"unknown dtype {dtype!r}{nearest(dtype, known)}")
    return KERNELS[dtype]


def expected_dtype(stage: str, run: RunConfig, tf32: bool = False) -> Dtype:
    """Return what a run takes that a stage of this name begins on this machine, without opening it."""
    return dtypes.chosen(KINDS[stage].auto_dtype(tf32), run.model.n_embd, run.train.matmul)


def open_stage(name: str, threads: int | None = None, gpu: GpuConfig | None = None) -> Stage:
    """Start the stage's backends; refuses launches that would not do what they look like. Collective."""
    if name not in STAGES:
        raise UsageError(f"unknown stage {name!r}{nearest(name, STAGES)}")
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise UsageError(f"--threads is {threads}: it must be at least 1 and at most {MOST_THREADS}")
    if name not in ON_GPU and gpu not in (None, GpuConfig()):
        raise UsageError(f"stage {name!r} uses no GPU: its options are for {' and '.join(ON_GPU)}")
    if name in ON_GPU and threads is not None:
        raise UsageError(f"stage {name!r} computes on a GPU: --threads is for the CPU stages")
    kind = KINDS[name]
    comm = _communicator(name)
    connected.append(comm)  # before anything else can fail: a rank that fails alone ends the job
    join(comm)
    report_compiling(comm)
    return kind.open(name, comm, threads, gpu or GpuConfig())


def report_compiling(comm: Comm, say: Say | None = None) -> None:
    """Let rank 0 alone report what is compiled, to `say` or to standard error."""
    first_use.announce(say if comm.rank == 0 else lambda text: None)


def threads_of(comm: Comm) -> int:
    """Return the number of cores that this rank has, as many threads as pay."""
    return granted_cores(comm.cores, comm.local_size).whole


def _note_launch(stage: Stage, threads_given: bool) -> None:
    """Note on rank 0 what is slower than it looks. Collective."""
    comm, note = stage.comm, stage.notes.add if stage.comm.rank == 0 else lambda text: None
    if stage.name in WITH_MPI and comm.size == 1:
        note(f"--stage {stage.name} runs as one process: mpirun -n 2 distgpt … starts two")
    _note_cores(stage, threads_given)
    machines = gather_bytes(comm, identity().encode())
    if (here := machines.count(machines[comm.rank])) > comm.local_size:
        note(
            f"{here} ranks run on {platform.node()}, which the launcher takes for several hosts, so that they"
            f" take each other's cores and memory; give a host one name in the hostfile"
        )


def _note_cores(stage: Stage, threads_given: bool) -> None:
    """Note on rank 0 which ranks have more threads than cores, and limits that leave fewer. Collective."""
    comm = stage.comm
    texts = [text.decode() for text in gather_bytes(comm, _about_cores(stage, threads_given).encode())]
    for text, ranks in ranks_by_text(texts if comm.rank == 0 else ()).items():
        stage.notes.add(f"{named_ranks(ranks)}: " * (len(ranks) < comm.size) + text)


def _about_cores(stage: Stage, threads_given: bool) -> str:
    """Return what this rank should know of its threads and cores; "" if they suit each other."""
    comm, granted = stage.comm, granted_cores(stage.comm.cores, stage.comm.local_size)
    cores, limit, several = len(usable_cores()), granted.limit, comm.local_size > 1
    each, by = " each" * several, f" ({limit})" * bool(limit)
    if threads_given and stage.threads > granted.whole:
        own = f"{granted.number:.3g} of " * (granted.number < cores) + count(cores, "core")
        return f"--threads {stage.threads}, but {own}{each}{by}: threads without a core only make others wait"
    if several and granted.number < 1 - 1e-6:
        shared = f"{granted.number * comm.local_size:.3g} of " * bool(limit) + count(cores, "core")
        return f"{comm.local_size} ranks share {shared}{by}: fewer ranks are as fast, or faster"
    if limit and not threads_given:
        threads, of = count(stage.threads, "thread"), count(cores, "core")
        return f"{limit} grants {granted.number:.3g} of {of}{each}: {threads}{each}"
    return ""


def identity() -> str:
    """Return an id of this host, however many names it has."""
    return f"{platform.node()} {boot_id()}"


def _communicator(name: str) -> Comm:
    launched = launched_as()
    if name not in WITH_MPI:
        if launched > 1:
            raise UsageError(
                f"--stage {name} was launched as {launched} processes, which would all do the same work; "
                f"use --stage {SEVERAL[name]}, or run without mpirun"
            )
        return SerialComm()
    comm = connect()
    if launched > 1 and comm.size == 1:
        from distgpt.core.comm.mpi import library

        raise UsageError(
            f"launched as {launched} processes, but mpi4py found itself alone: the launcher belongs to "
            f"another MPI than mpi4py's {library()}; use the mpirun of that MPI, or srun with"
            " --mpi=pmi2 (MPICH) or pmix (Open MPI)"
        )
    return comm
