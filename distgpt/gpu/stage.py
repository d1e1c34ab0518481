"""The stages on GPUs. Libraries are loaded when a stage is opened.

| stage      | kernels | communicator |
|------------|---------|--------------|
| `cuda`     | GPU     | one process  |
| `mpi-cuda` | GPU     | NCCL or MPI  |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

from distgpt.core.comm.agree import on_every_rank, refuse_anywhere
from distgpt.core.comm.api import Comm
from distgpt.core.comm.serial import SerialComm
from distgpt.core.config import DTYPES, ROUNDED_DTYPES, GpuConfig, nearest
from distgpt.core.cpu.stages import Choose, Dtype, Stage, StageKind
from distgpt.core.ops.kernels import Kernels
from distgpt.gpu import probe
from distgpt.gpu.device import CupyDevice
from distgpt.gpu.probe import OLDEST_BFLOAT16, Version, dotted

SLOW_FLOAT32 = (
    "float32 uses no tensor cores: with --dtype bfloat16 gpt-mini trained 4.8 times as fast on an H100;"
    " --tf32 was not measured"
)
IMAGINED_GPU = (9, 0)  # of an estimate for a GPU that is not here, as in accelerator.py


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuStage(Stage):
    """A stage whose kernels compute on this rank's GPU."""

    device: CupyDevice
    sharing: int = 1  # ranks on this rank's GPU
    gpu: GpuConfig = field(default_factory=GpuConfig)

    on_gpu: ClassVar[bool] = True

    def kernels(self, dtype: str, matmul: str = "auto") -> Kernels:
        from distgpt.gpu.accelerator import kernels_on

        refuse_anywhere(self.comm, self._trouble_with(dtype))
        # A GPU may be full: then no rank goes on.
        return on_every_rank(self.comm, lambda: kernels_on(self.device, dtype, self.gpu, self.notes.add))

    def _trouble_with(self, dtype: str) -> str:
        if dtype not in (known := (*DTYPES, *ROUNDED_DTYPES)):
            return f"unknown dtype {dtype!r}{nearest(dtype, known)}"
        if dtype in ROUNDED_DTYPES:
            return f"stage {self.name!r} computes on a GPU: {dtype} is for the CPU stages"
        if dtype != "bfloat16":
            return ""
        has = f"{self.device.name} has {dotted(self.device.capability)}"
        if self.device.capability < OLDEST_BFLOAT16:
            return f"--dtype bfloat16 needs compute capability {dotted(OLDEST_BFLOAT16)}, {has}: use float32"
        return ""

    def compile_ahead(self, dtype: str, work: Callable[[Kernels], None]) -> None:
        from distgpt.gpu.accelerator import compile_ahead

        compile_ahead(self.device, dtype, work, self.comm.local_rank)

    def free_memory(self, ranks: int = 0) -> tuple[int, str]:
        return self.device.memory()[0] // self.sharing, f"GPU {self.device.index} ({self.device.name})"

    def taken_memory(self) -> int:
        return int(self.device.taken())

    def dtype_choice(self) -> Choose:
        """Return what chooses --dtype auto by the oldest GPU of all ranks. Collective."""
        major, minor = self.device.capability
        oldest = divmod(-self.comm.allreduce_max(-(10 * major + minor)), 10)
        return partial(_chosen, oldest, self.gpu.tf32)

    def cost_of(self, dtype: object) -> str:
        is_slow = dtype == "float32" and not self.gpu.tf32 and self.device.capability >= OLDEST_BFLOAT16
        return SLOW_FLOAT32 if is_slow else ""


def device_of(local_rank: int, count: int) -> int:
    """Return the GPU that a rank with this local number binds to; ranks share where there are too few."""
    return local_rank % count


def _chosen(oldest: Version, tf32: bool, matmul: str, weights: int) -> Dtype:
    if tf32:
        return Dtype("float32", "--tf32 chooses how to multiply float32")
    if oldest >= OLDEST_BFLOAT16:
        return Dtype("bfloat16", "this GPU has tensor cores for it")
    needs = f"tensor cores for bfloat16 come with compute capability {dotted(OLDEST_BFLOAT16)}"
    return Dtype("float32", f"{needs}, this GPU has {dotted(oldest)}")


def _chosen_here(tf32: bool) -> Choose:
    """Return what chooses by the GPUs of this machine, which need not be open."""
    found = probe.driver()
    oldest = min((gpu.capability for gpu in found.gpus), default=IMAGINED_GPU) if found else IMAGINED_GPU
    return partial(_chosen, oldest, tf32)


def _open(name: str, comm: Comm, threads: int | None, gpu: GpuConfig) -> Stage:
    on_every_rank(comm, lambda: probe.require_gpu(name))
    return bound(name, comm, gpu)


def bound(name: str, comm: Comm, gpu: GpuConfig) -> GpuStage:
    """Open this rank's GPU, and the transport between GPUs. Collective."""
    from distgpt.gpu.accelerator import gpu_count, open_device
    from distgpt.gpu.transport import DeviceComm, choose_transport, sharing

    device = on_every_rank(comm, lambda: open_device(device_of(comm.local_rank, gpu_count()), gpu))
    ranks = sharing(comm, device)
    device.share(ranks)
    if comm.size == 1:
        comm = SerialComm()
    stage = GpuStage(name, comm, 0, device=device, sharing=ranks, gpu=gpu)
    stage.notes.add(f"GPU {device.index}: {device.name}, {device.memory()[1] / 2**30:.0f} GiB")
    if ranks > 1:
        stage.notes.add(f"{ranks} ranks share this GPU")
    if comm.size == 1:
        return stage
    chosen = choose_transport(gpu.allreduce, comm, device, ranks)
    stage.notes.add(f"gradients are summed by way of {chosen.name}")
    return replace(stage, comm=DeviceComm(comm, chosen), transport=chosen.name)


GPU = StageKind(_open, _chosen_here)
