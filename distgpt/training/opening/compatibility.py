"""Settings that do not go together, and settings that this job's MPI or GPUs do not allow."""

from __future__ import annotations

from distgpt.comm.agree import refuse_anywhere
from distgpt.comm.api import Comm
from distgpt.config import TrainConfig
from distgpt.data.batches import refuse_uneven
from distgpt.errors import UsageError, refuse_beside

WITHOUT_THREADS = (
    "--grad-sync overlapped needs an MPI with MPI_THREAD_MULTIPLE, which this one does not grant"
)
WITHOUT_NCCL = (
    "--grad-sync overlapped on GPUs needs NCCL (pip install nvidia-nccl-cu13, or -cu12), a GPU for every rank"
    " and --allreduce auto or nccl"
)
LACKS_ALLTOALL = (
    "--allreduce cuda-aware is for --grad-sync allreduce and chunked with --gradient-dtype float32: use nccl"
    " or host"
)


def refuse_unsuited(t: TrainConfig, ranks: int, on_gpu: bool) -> None:
    """Raise a UsageError about settings that do not go together."""
    if t.lora_rank:
        _check_adapters(t)
    if t.val:
        refuse_beside("--val", {"val-fraction": t.val_fraction}, "each says what is held out")
    if t.chats and not t.init:
        raise UsageError("chats are for a model that has learned to read: distgpt tune --weights")
    if t.reproducible_parts:
        from distgpt.training.exchange.reproducible import check_parts

        check_parts(t, ranks, on_gpu)
    else:
        refuse_uneven(t.batch_size, ranks, t.grad_accum or 1)
    if t.outer_every and ranks > 1:
        from distgpt.training.exchange.local_steps import check_local

        check_local(t)
    if t.balance == "auto" and ranks > 1:
        _check_balance(t)
    if ranks == 1:
        return
    if on_gpu and t.grad_sync == "hierarchical":
        raise UsageError(
            "--grad-sync hierarchical is for CPU stages; between GPUs use allreduce, or overlapped with NCCL"
        )
    if t.gradient_dtype == "bfloat16" and t.dtype == "float64":
        raise UsageError(
            "--gradient-dtype bfloat16 leaves nothing of --dtype float64: use float32 for one of them"
        )


def refuse_unmeasurable(t: TrainConfig, ranks: int) -> None:
    """Raise a UsageError about settings that find out while a run trains how ranks share their work."""
    if t.balance == "auto" and ranks > 1:
        raise UsageError("--balance auto is for training: ranks are measured with even shares")
    if t.grad_sync == "auto" and not (t.outer_every and ranks > 1):
        raise UsageError("--grad-sync auto chooses while it trains: measure one of the others by its name")


def refuse_unable(t: TrainConfig, comm: Comm, on_gpu: bool) -> None:
    """Raise on all ranks a UsageError about what this job's MPI or NCCL cannot do. Collective."""
    refuse_anywhere(comm, _lacking(t, comm, on_gpu) if comm.size > 1 else "")


def _lacking(t: TrainConfig, comm: Comm, on_gpu: bool) -> str:
    if t.grad_sync == "overlapped" and on_gpu:
        return "" if comm.nccl else WITHOUT_NCCL
    if t.grad_sync == "overlapped":
        return "" if comm.threads else WITHOUT_THREADS
    in_parts = t.grad_sync == "sharded" or t.gradient_dtype != "float32"
    return LACKS_ALLTOALL if on_gpu and comm.lacks_alltoall and in_parts else ""


def _check_adapters(t: TrainConfig) -> None:
    """Raise a UsageError about what adapters do not go with."""
    if not t.init:
        raise UsageError("--lora-rank trains adapters beside a model's weights: name them with --init FILE")
    if t.optimizer != "adamw":
        raise UsageError(f"--lora-rank does not go with --optimizer {t.optimizer}: use adamw")


def _check_balance(t: TrainConfig) -> None:
    """Raise a UsageError about what needs as many sequences on each rank."""
    others = {
        "deterministic (reproducible parts)": t.reproducible_parts,
        "outer-every": t.outer_every,
        "recheck-every": t.recheck_every,
    }
    refuse_beside("--balance auto", others, "ranks get unlike parts")
