"""How a model is trained, and how a GPU stage computes."""

from __future__ import annotations

from dataclasses import dataclass

from distgpt.config.setting import Setting, check, setting
from distgpt.errors import UsageError

SCHEDULES = ("linear", "cosine", "constant")
DTYPES = ("float32", "float64", "bfloat16")
GRAD_SYNCS = ("packed", "chunked")
ALLREDUCES = ("auto", "nccl", "host", "cuda-aware")
RECOMPUTE = ("auto", "none", "mlp", "block")

# Another way to give batch_size, into which presets.py converts it.
BATCH_TOKENS = "batch_tokens"
BATCH_IN_TOKENS = Setting(int, "Tokens per optimizer step, instead of --batch-size.")


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Data, batch, schedule, optimizer, and what is written when."""

    data: str = setting(
        "corpus",
        "A bundled text (story, corpus, names), a text file, or a folder of token shards.",
        changeable=True,  # the content is compared
    )
    tokenizer: str = setting(
        "auto",
        "byte, char, word, gpt2, hub:ORG/NAME, or a path; auto: that of --init or of the shards, else byte.",
    )
    verify_data: bool = setting(
        True,
        "Read all shards before the first step to find damage.",
        flag="--verify-data/--trust-data",
        changeable=True,
    )
    shift_windows: bool = setting(
        True,
        "Cut the text at other places in every epoch.",
        flag="--shift-windows/--fixed-windows",
    )
    init: str = setting(
        "",
        "Weights file of a model to train further, instead of random weights.",
        changeable=True,  # no longer needed
    )
    steps: int = setting(600, "Optimizer steps.", low=1, changeable=True)
    batch_size: int = setting(16, "Sequences per optimizer step, over all ranks.", low=1)
    grad_accum: int = setting(
        0,
        "Micro-batches per optimizer step; 0: chosen by speed and by free memory.",
        low=0,
        changeable=True,
    )
    lr: float = setting(2e-3, "Peak learning rate.", above=0)
    min_lr: float = setting(0.0, "Learning rate at the end of the schedule.", low=0)
    schedule: str = setting("cosine", "How the learning rate falls after the warm-up.", choices=SCHEDULES)
    warmup: int = setting(20, "Steps of linear warm-up.", low=0)
    weight_decay: float = setting(0.1, "Weight decay of AdamW, on matrices only.", low=0)
    clip: float = setting(1.0, "Clip the gradient to this norm; 0: no clipping.", low=0)
    beta1: float = setting(0.9, "Decay of AdamW's first moment.", low=0, below=1)
    beta2: float = setting(0.95, "Decay of AdamW's second moment.", low=0, below=1)
    eps: float = setting(1e-8, "Added to the denominator of AdamW.", above=0)
    seed: int = setting(1337, "Seed of the initial weights and of the batches.", low=0, most=2**63 - 1)
    dtype: str = setting("float32", "Number format to compute in.", choices=DTYPES, changeable=True)
    grad_sync: str = setting(
        "packed",
        "Sum gradients over ranks in one call or in chunks (mpi).",
        choices=GRAD_SYNCS,
        changeable=True,
    )
    recompute: str = setting(
        "auto",
        "Activations that the backward pass recomputes; auto: as few as memory allows.",
        choices=RECOMPUTE,
        changeable=True,
    )
    log_every: int = setting(1, "Steps between lines of metrics.", low=1, changeable=True)
    save_every: int = setting(0, "Steps between checkpoints; 0: only at the end.", low=0, changeable=True)
    keep: int = setting(3, "Checkpoints to keep, the newest ones.", low=1, changeable=True)
    sample_every: int = setting(0, "Steps between text samples; 0: none.", low=0, changeable=True)
    eval_every: int = setting(0, "Steps between evaluations; 0: only at the end.", low=0, changeable=True)
    val_fraction: float = setting(
        0.0,
        "Fraction of a text, its first part, held out for validation (shards have their own).",
        low=0,
        below=1,
    )
    val_tokens: int = setting(0, "Validation tokens per evaluation; 0: all.", low=0, changeable=True)
    hellaswag: str = setting("", "HellaSwag file to score the model on at evaluations.", changeable=True)
    verify_every: int = setting(
        100, "Steps between comparisons of the ranks' weights; 0: none.", low=0, changeable=True
    )

    def __post_init__(self) -> None:
        check(self)
        if self.min_lr > self.lr:
            raise UsageError(f"min_lr {self.min_lr} is above lr {self.lr}")
        if self.grad_accum and self.batch_size % self.grad_accum:
            raise UsageError(
                f"batch_size {self.batch_size} cannot be split into grad_accum {self.grad_accum} parts"
            )


@dataclass(frozen=True, slots=True)
class GpuConfig:
    """How a GPU stage computes. Results are the same up to rounding."""

    graphs: bool = setting(
        True,
        "Record each step once as a CUDA graph and replay it (cuda stages).",
        flag="--cuda-graph/--no-cuda-graph",
    )
    # auto: nccl where each rank has a GPU of its own, else host
    allreduce: str = setting("auto", "How GPUs sum their gradients (mpi-cuda).", choices=ALLREDUCES)
    deterministic: bool = setting(False, "Compute the same bits in every run (cuda stages).")
    tf32: bool = setting(False, "float32 matmuls in TF32, faster but with a 10-bit mantissa (cuda stages).")

    def __post_init__(self) -> None:
        check(self)
