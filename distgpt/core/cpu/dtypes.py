"""Decide what `--dtype auto` is: bfloat16 where this processor or GPU computes it faster, else float32."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from distgpt.core.base.errors import UsageError
from distgpt.core.comm.agree import on_root
from distgpt.core.config import DTYPES, RunConfig, nearest
from distgpt.core.cpu import first_use
from distgpt.core.cpu.stages import ON_GPU, Stage

VARIABLE = (
    "DISTGPT_AUTO_DTYPE"  # names what auto is: for tests, and for sites with processors of several kinds
)
WORTHWHILE = 4 / 3  # times as fast as float32, from which on bfloat16 is taken
SLOW_FLOAT32 = (
    "float32 uses no tensor cores: with --dtype bfloat16 gpt-mini trained 4.8 times as fast on an H100;"
    " --tf32 was not measured"
)
IMAGINED_GPU = (9, 0)  # of an estimate for a GPU that is not here, as in gpu/accelerator.py
# Bytes of float32 weights that no cache holds, so that generation on a CPU reads them for every token. With
# GPT-2 124M (496 MB) bfloat16 decoded 1.4 to 2.0 times as fast on five x86 processors, three of them without
# instructions for it (docs/explanation/inference-measured.md). arm64 was not measured.
READ_FROM_MEMORY = 1 << 28

Version = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Dtype:
    """A number format, and why it was chosen; "" where the user has named it."""

    name: str
    why: str = ""


def for_training(stage: Stage, configured: Callable[[], RunConfig]) -> Dtype:
    """Return what a run takes: rank 0, which configures it, decides for all, by the oldest of their GPUs.

    Collective.
    """
    oldest = _oldest(stage)

    def decide() -> list[str]:
        run = configured()
        found = _decided(oldest, run.model.n_embd, run.train.matmul, stage.gpu.tf32)
        return [found.name, found.why]

    return Dtype(*on_root(stage.comm, decide))


def cost_of(stage: Stage, asked: object) -> str:
    """Return what the dtype that was asked for costs on this rank's GPU; "" where it costs nothing."""
    if asked != "float32" or stage.device is None or stage.gpu.tf32:
        return ""
    from distgpt.gpu.probe import OLDEST_BFLOAT16

    return SLOW_FLOAT32 if stage.device.capability >= OLDEST_BFLOAT16 else ""


def expected(stage: str, run: RunConfig, tf32: bool = False) -> Dtype:
    """Return what a run takes that a stage of this name begins on this machine, without opening it."""
    oldest = _oldest_here() if stage in ON_GPU else None
    return _decided(oldest, run.model.n_embd, run.train.matmul, tf32)


def for_generation(stage: Stage, width: int, elements: int) -> Dtype:
    """Return what generation by a model of that many elements takes. Collective."""
    oldest = _oldest(stage)

    def decide() -> list[str]:
        if oldest is None and not os.environ.get(VARIABLE) and _reads_memory(elements):
            return ["bfloat16", "a token reads half the bytes of float32"]
        found = _decided(oldest, width, "auto", stage.gpu.tf32)
        return [found.name, found.why]

    return Dtype(*on_root(stage.comm, decide))


def _decided(oldest: Version | None, width: int, matmul: str, tf32: bool) -> Dtype:
    """Decide by the oldest GPU, or without one by this processor."""
    if fixed := os.environ.get(VARIABLE):
        if fixed not in DTYPES:
            raise UsageError(f"{VARIABLE} is {fixed!r:.80}{nearest(fixed, DTYPES)}")
        return Dtype(fixed)
    return _on_cpu(width, matmul) if oldest is None else _on_gpu(oldest, tf32)


def _on_gpu(oldest: Version, tf32: bool) -> Dtype:
    from distgpt.gpu.probe import OLDEST_BFLOAT16, dotted

    if tf32:
        return Dtype("float32", "--tf32 chooses how to multiply float32")
    if oldest >= OLDEST_BFLOAT16:
        return Dtype("bfloat16", "this GPU has tensor cores for it")
    needs = f"tensor cores for bfloat16 come with compute capability {dotted(OLDEST_BFLOAT16)}"
    return Dtype("float32", f"{needs}, this GPU has {dotted(oldest)}")


def _on_cpu(width: int, matmul: str) -> Dtype:
    from distgpt.core.cpu.compiling import processor
    from distgpt.core.cpu.matmul.gain import gain

    if matmul != "auto":
        return Dtype("float32", f"--matmul {matmul} chooses how to multiply float32")
    with first_use.compiling_for("comparing bfloat16 with float32"):
        ratio = gain(width)
    if ratio >= WORTHWHILE:
        return Dtype("bfloat16", f"this processor multiplies it {ratio:.1f} times as fast as float32")
    if processor.shape().dot:
        return Dtype("float32", f"this processor multiplies bfloat16 only {ratio:.1f} times as fast")
    if processor.has_amx() and not processor.amx_wanted():
        return Dtype("float32", f"this processor has AMX for bfloat16: {processor.AMX_HINT}")
    return Dtype("float32", "this processor has no fast instructions for bfloat16")


def _reads_memory(elements: int) -> bool:
    from distgpt.core.cpu.compiling.processor import shape

    return 4 * elements >= READ_FROM_MEMORY and not shape().neon


def _oldest(stage: Stage) -> Version | None:
    """Return the lowest compute capability of all ranks' GPUs; None on CPUs. Collective."""
    if stage.device is None:
        return None
    major, minor = stage.device.capability
    return divmod(-stage.comm.allreduce_max(-(10 * major + minor)), 10)


def _oldest_here() -> Version:
    from distgpt.gpu.probe import driver

    found = driver()
    return min((gpu.capability for gpu in found.gpus), default=IMAGINED_GPU) if found else IMAGINED_GPU
