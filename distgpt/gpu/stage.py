"""The stages on GPUs. Libraries are loaded when a stage is opened.

| stage      | kernels | communicator |
|------------|---------|--------------|
| `cuda`     | GPU     | one process  |
| `mpi-cuda` | GPU     | NCCL or MPI  |
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import ClassVar, cast

from distgpt.core.base.errors import Say, UsageError, first_line
from distgpt.core.comm.agree import on_every_rank, raise_if_any
from distgpt.core.comm.api import Comm, SerialComm
from distgpt.core.config import DTYPES, QUANTIZED_DTYPES, GpuConfig, did_you_mean
from distgpt.core.cpu.stages import Choose, Dtype, Stage, StageKind
from distgpt.core.ops.kernels import Kernels
from distgpt.gpu import cublaslt, cudnn_attention, probe
from distgpt.gpu.attention import OwnAttention
from distgpt.gpu.cudnn_attention import SLOWER, CudnnAttention
from distgpt.gpu.device import CupyDevice
from distgpt.gpu.kernels import CudaKernels
from distgpt.gpu.matmul import LtMatmul
from distgpt.gpu.probe import OLDEST_BFLOAT16, Version, dotted
from distgpt.gpu.transport import DeviceComm, choose_transport, sharing

# The GPU of an estimate is an H200, since its multiprocessors determine the size of partial sums.
IMAGINED_GPU, ESTIMATED_BYTES, ESTIMATED_MULTIPROCESSORS = (9, 0), 141 << 30, 132


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuStage(Stage):
    """A stage whose kernels run on this rank's GPU."""

    device: CupyDevice
    gpu: GpuConfig = field(default_factory=GpuConfig)

    on_gpu: ClassVar[bool] = True

    def kernels(self, dtype: str, matmul: str = "auto") -> Kernels:
        raise_if_any(self.comm, self._trouble_with(dtype))
        # If one rank's GPU is full, no rank continues.
        return on_every_rank(self.comm, lambda: kernels_on(self.device, dtype, self.gpu, self.notes.add))

    def _trouble_with(self, dtype: str) -> str:
        if dtype not in (known := (*DTYPES, *QUANTIZED_DTYPES)):
            return f"unknown dtype {dtype!r}{did_you_mean(dtype, known)}"
        if dtype in QUANTIZED_DTYPES:
            return f"stage {self.name!r} uses a GPU; {dtype} requires a CPU stage"
        if dtype == "bfloat16" and self.device.capability < OLDEST_BFLOAT16:
            has = f"{self.device.name} has {dotted(self.device.capability)}"
            return (
                f"--dtype bfloat16 requires compute capability {dotted(OLDEST_BFLOAT16)}; {has}; use float32"
            )
        return ""

    def free_memory(self, ranks: int = 0) -> tuple[int, str]:
        return self.device.memory()[0] // self.device.sharing, f"GPU {self.device.index} ({self.device.name})"

    def taken_memory(self) -> int:
        return int(self.device.taken())

    def dtype_choice(self) -> Choose:
        """Return a function that chooses --dtype auto by the oldest GPU of all ranks. Collective."""
        major, minor = self.device.capability
        oldest = divmod(-self.comm.allreduce_max(-(10 * major + minor)), 10)
        return partial(_chosen, oldest, self.gpu.tf32)


def device_of(local_rank: int, count: int) -> int:
    """Return the GPU index for a local rank. Ranks share GPUs if there are too few."""
    return local_rank % count


def _chosen(oldest: Version, tf32: bool, matmul: str, weights: int) -> Dtype:
    if tf32:
        return Dtype("float32", "--tf32 applies to float32")
    if oldest >= OLDEST_BFLOAT16:
        return Dtype("bfloat16", "this GPU has tensor cores for bfloat16")
    needs = f"tensor cores for bfloat16 require compute capability {dotted(OLDEST_BFLOAT16)}"
    return Dtype("float32", f"{needs}, but this GPU has {dotted(oldest)}")


def _chosen_here(tf32: bool) -> Choose:
    """Return a function that chooses by the GPUs of this machine, which need not be open."""
    result = probe.driver()
    oldest = min((gpu.capability for gpu in result.gpus), default=IMAGINED_GPU) if result else IMAGINED_GPU
    return partial(_chosen, oldest, tf32)


def _open(name: str, comm: Comm, threads: int | None, gpu: GpuConfig) -> Stage:
    on_every_rank(comm, lambda: probe.require_gpu(name))
    return bound(name, comm, gpu)


def bound(name: str, comm: Comm, gpu: GpuConfig) -> GpuStage:
    """Open this rank's GPU, and the transport between GPUs. Collective."""
    device = on_every_rank(comm, lambda: open_device(device_of(comm.local_rank, gpu_count()), gpu))
    device.sharing = sharing(comm, device)
    if comm.size == 1:
        comm = SerialComm()
    stage = GpuStage(name, comm, 0, device=device, gpu=gpu)
    stage.notes.add(f"GPU {device.index}: {device.name}, {device.memory()[1] / 2**30:.0f} GiB")
    if device.sharing > 1:
        stage.notes.add(f"{device.sharing} ranks share this GPU")
    if comm.size == 1:
        return stage
    chosen = choose_transport(gpu.allreduce, comm, device)
    stage.notes.add(f"gradients are summed with {chosen.name}")
    return replace(stage, comm=DeviceComm(comm, chosen), transport=chosen.name)


def gpu_count() -> int:
    return int(import_module("cupy").cuda.runtime.getDeviceCount())


def open_device(index: int, options: GpuConfig) -> CupyDevice:
    known = probe.driver()
    uuid = known.gpus[index].uuid if known and index < len(known.gpus) else ""
    with _one_line(index):
        return CupyDevice(index, options.deterministic, options.graphs, uuid=uuid)


@contextmanager
def _one_line(index: int) -> Iterator[None]:
    """Convert CUDA's error about an unusable GPU into one line."""
    try:
        yield
    except Exception as error:  # naming CuPy's types requires CuPy
        if not type(error).__module__.startswith("cupy"):
            raise
        raise UsageError(
            f"cannot use GPU {index}: {first_line(error)}; check with nvidia-smi whether another process uses"
            " it, or select another GPU with CUDA_VISIBLE_DEVICES"
        ) from error


def kernels_on(device: CupyDevice, dtype: str, options: GpuConfig, say: Say) -> CudaKernels:
    """Create the kernels on this device. `say` reports avoidable slowness."""
    attention = partial(_attention_for, device, say) if dtype == "bfloat16" else None
    with _one_line(device.index):
        if (lt := cublaslt.load()) is None:
            missing = "cuBLASLt not found: pip install nvidia-cublas (nvidia-cublas-cu12 for CUDA 12)"
            raise UsageError(missing)
        device.keep_choices(lt.version, options.tf32)
        matmuls = LtMatmul(lt, device, options.tf32)
    return CudaKernels(device, matmuls, dtype, attention)


def kernels_for_estimate(dtype: str, memory: int | None) -> CudaKernels:
    """Create kernels of an imaginary GPU with this much memory, for estimates. They cannot compute."""
    total = memory or ESTIMATED_BYTES
    device = SimpleNamespace(
        multiprocessors=ESTIMATED_MULTIPROCESSORS, capability=IMAGINED_GPU, memory=lambda: (total, total)
    )
    return CudaKernels(cast(CupyDevice, device), cast(LtMatmul, None), dtype)


def _attention_for(device: CupyDevice, say: Say, head: int, own: OwnAttention) -> OwnAttention:
    """Choose cuDNN attention for a head size, or the default one with a note about the reason."""
    cuda = device.xp.cuda.runtime.runtimeGetVersion() // 1000
    reason = cudnn_attention.why_not(head, device.capability, cuda)
    if reason is None:
        return CudnnAttention(own.launcher, say)
    say(f"{SLOWER}: {reason}")
    return own


GPU = StageKind(_open, _chosen_here)
