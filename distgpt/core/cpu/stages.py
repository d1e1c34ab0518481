"""The stages: which kernels compute and which communicator connects. Where a backend is chosen.

| stage      | kernels | communicator |
|------------|---------|--------------|
| `serial`   | CPU     | one process  |
| `mpi`      | CPU     | MPI          |
| `cuda`     | GPU     | one process  |
| `mpi-cuda` | GPU     | NCCL or MPI  |
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from distgpt.core.base.errors import Say, UsageError
from distgpt.core.base.formatting import count
from distgpt.core.base.tables import Table
from distgpt.core.comm.agree import gather_bytes, named_ranks, on_every_rank, ranks_by_text, refuse_anywhere
from distgpt.core.comm.api import Comm
from distgpt.core.comm.cores import boot_id, usable_cores
from distgpt.core.comm.joining import connect, join
from distgpt.core.comm.launched import launched_as
from distgpt.core.comm.limits import granted_cores, granted_memory
from distgpt.core.comm.serial import SerialComm
from distgpt.core.config import DTYPES, ROUNDED_DTYPES, GpuConfig, nearest
from distgpt.core.cpu import first_use
from distgpt.core.ops.api import Kernels

MOST_THREADS = 1024
STAGES = ("serial", "mpi", "cuda", "mpi-cuda")
ON_GPU = ("cuda", "mpi-cuda")
WITH_MPI = ("mpi", "mpi-cuda")
NOT_KEPT = (
    "compiled loops cannot be kept, so every start compiles them anew, for about a minute: "
    "set XDG_CACHE_HOME to a folder that only you can write to"
)
SLOW_BFLOAT16 = (
    "this processor computes bfloat16 with float32 instructions: less memory and faster generation than with "
    "--dtype float32, but no faster training"
)


class RoundedKernels(Protocol):
    """What a row of the table of rounded weights is asked here (core/saved/kinds.py asks more)."""

    def kernels(self, threads: int) -> Kernels:
        """Return kernels that compute with weights in this dtype."""


ROUNDED: Table[RoundedKernels] = Table("rounded", "dtype", {})

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
    """A stage that is ready to compute. `threads` is what each rank uses of the CPU to compute with."""

    name: str
    comm: Comm
    threads: int
    device: Any = None  # a CupyDevice
    sharing: int = 1  # ranks on this rank's GPU
    gpu: GpuConfig = field(default_factory=GpuConfig)
    notes: Notes = field(default_factory=Notes)
    begun: float = field(default_factory=time.monotonic)
    transport: str = ""  # how arrays of GPUs are summed, if they are

    def kernels(self, dtype: str, matmul: str = "auto", use: str = "") -> Kernels:
        """Refuses a dtype that some rank can't compute in. `matmul` is for CPU stages. Collective.

        `use` names what they are for, should they have to be compiled.
        """
        refuse_anywhere(self.comm, self._trouble_with(dtype))
        if self.device is not None:
            from distgpt.gpu.accelerator import kernels_on

            # A GPU may be full: then no rank goes on.
            return on_every_rank(self.comm, lambda: kernels_on(self.device, dtype, self.gpu, self.notes.add))
        from distgpt.core.cpu.compiling import disk_cache
        from distgpt.core.cpu.kernels import CpuKernels

        first_use.begin(f"{use} in {dtype}" if use else dtype)
        if not disk_cache.site().files and disk_cache.folder() is None:
            self.notes.add(NOT_KEPT)
        if dtype in ROUNDED_DTYPES:
            return ROUNDED[dtype].kernels(self.threads)
        if dtype == "bfloat16":
            from distgpt.core.cpu.compiling import processor
            from distgpt.core.cpu.kernels import Bfloat16Kernels

            if processor.has_amx() and not processor.shape().amx and not processor.amx_wanted():
                self.notes.add(f"this processor has AMX: {processor.AMX_HINT}")
            elif not processor.shape().dot:
                self.notes.add(SLOW_BFLOAT16)
            return Bfloat16Kernels(self.threads)
        return CpuKernels(dtype, self.threads, matmul)

    def _trouble_with(self, dtype: str) -> str:
        if dtype not in (known := (*DTYPES, *ROUNDED_DTYPES)):
            return f"unknown dtype {dtype!r}{nearest(dtype, known)}"
        if dtype in ROUNDED_DTYPES and self.device is not None:
            return f"stage {self.name!r} computes on a GPU: {dtype} is for the CPU stages"
        if self.gpu.float8 and dtype != "bfloat16":
            return f"--float8 goes with --dtype bfloat16, not with {dtype}"
        if dtype != "bfloat16" or self.device is None:
            return ""
        from distgpt.gpu.probe import OLDEST_BFLOAT16, OLDEST_FLOAT8, dotted

        has = f"{self.device.name} has {dotted(self.device.capability)}"
        if self.device.capability < OLDEST_BFLOAT16:
            return f"--dtype bfloat16 needs compute capability {dotted(OLDEST_BFLOAT16)}, {has}: use float32"
        if self.gpu.float8 and self.device.capability < OLDEST_FLOAT8:
            return f"--float8 needs compute capability {dotted(OLDEST_FLOAT8)}, {has}: leave it out"
        return ""

    def compile_ahead(self, dtype: str, work: Callable[[Kernels], None]) -> None:
        """Begin to compile what `work` will need of a GPU's kernels, while this process does other things."""
        if self.device is None:
            return
        from distgpt.gpu.listing import compile_ahead

        compile_ahead(self.device, dtype, work, self.gpu.float8, self.comm.local_rank)

    def free_memory(self, ranks: int = 0) -> tuple[int, str]:
        """Bytes that this rank may use, and whose they are; on a CPU as if this many `ranks` shared it."""
        if self.device is not None:
            return self.device.memory()[0] // self.sharing, f"GPU {self.device.index} ({self.device.name})"
        granted = granted_memory(ranks or self.comm.local_size)
        return granted.free, granted.where


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
    comm = _communicator(name)
    connected.append(comm)  # before anything else can fail: a rank that fails alone ends the job
    join(comm)
    report_compiling(comm)
    if name not in ON_GPU:
        stage = Stage(name, comm, threads or threads_of(comm))
        _note_launch(stage, threads_given=threads is not None)
        return stage
    from distgpt.gpu.probe import require_gpu

    on_every_rank(comm, lambda: require_gpu(name))
    return _bound(name, comm, gpu or GpuConfig())


def report_compiling(comm: Comm, say: Say | None = None) -> None:
    """Let rank 0 alone report what is compiled, to `say` or to standard error."""
    first_use.announce(say if comm.rank == 0 else lambda text: None)


def open_stages(name: str, threads: int | None, gpu: GpuConfig) -> tuple[Comm, Stage]:
    """Return the ranks of this job, and a stage for this rank alone: a stage for each. Collective."""
    if name in WITH_MPI:
        raise UsageError(f"here every rank has a stage of its own: --stage serial or cuda, not {name}")
    if launched_as() == 1:
        stage = open_stage(name, threads, gpu)
        return stage.comm, stage
    several = {"serial": "mpi", "cuda": "mpi-cuda"}[name]
    job = open_stage(several, threads, replace(gpu, allreduce="host") if name in ON_GPU else gpu)
    notes = Notes() if name in ON_GPU else job.notes  # without the way to sum gradients
    return job.comm, replace(job, name=name, comm=SerialComm(job.comm), gpu=gpu, notes=notes)


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


def device_of(local_rank: int, count: int) -> int:
    """Return the GPU that a rank with this local number binds to; ranks share where there are too few."""
    return local_rank % count


def _bound(name: str, comm: Comm, gpu: GpuConfig) -> Stage:
    """Open this rank's GPU, and the transport between GPUs."""
    from distgpt.gpu.accelerator import gpu_count, open_device
    from distgpt.gpu.transport import DeviceComm, choose_transport, sharing

    device = on_every_rank(comm, lambda: open_device(device_of(comm.local_rank, gpu_count()), gpu))
    ranks = sharing(comm, device)
    device.share(ranks)
    if comm.size == 1:
        comm = SerialComm()
    stage = Stage(name, comm, 0, device, ranks, gpu)
    stage.notes.add(f"GPU {device.index}: {device.name}, {device.memory()[1] / 2**30:.0f} GiB")
    if ranks > 1:
        stage.notes.add(f"{ranks} ranks share this GPU")
    if comm.size == 1:
        return stage
    chosen = choose_transport(gpu.allreduce, comm, device, ranks)
    stage.notes.add(f"gradients are summed by way of {chosen.name}")
    return replace(stage, comm=DeviceComm(comm, chosen), transport=chosen.name)


def _communicator(name: str) -> Comm:
    launched = launched_as()
    if name in ("serial", "cuda"):
        if launched > 1:
            several = {"serial": "mpi", "cuda": "mpi-cuda"}[name]
            raise UsageError(
                f"--stage {name} was launched as {launched} processes, which would all do the same work; "
                f"use --stage {several}, or run without mpirun"
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
