"""All settings, declared once: default, help, choices, range, flag, and whether they may change on resume."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from distgpt.core.base.errors import UsageError, did_you_mean
from distgpt.core.config.setting import Setting, Value, check, setting
from distgpt.core.ops.activations import ACTIVATIONS

DEFAULT_TEMPERATURE = 0.8  # without randomness, small models repeat themselves
DEEPEST = 100  # layers of --depth
PARAMETERS_PER_TOKEN = 20  # the maximum per training token
NORMS = ("layernorm", "rmsnorm")
MLPS = tuple(ACTIVATIONS)
POSITIONS = ("learned", "rope", "none")
LORA_MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
DTYPES = ("float32", "float64", "bfloat16")
METRICS = ("hellaswag",)  # settings that name the data file of an evaluation metric
QUANTIZED_DTYPES = ("int8", "int4")
AUTO_DTYPE = "auto"  # see distgpt/core/cpu/stages.py
INFERENCE_DTYPES = (AUTO_DTYPE, *DTYPES, *QUANTIZED_DTYPES)
STAGES = ("serial", "mpi", "cuda", "mpi-cuda")
ON_GPU = ("cuda", "mpi-cuda")
WITH_MPI = ("mpi", "mpi-cuda")
SEVERAL = {"serial": "mpi", "cuda": "mpi-cuda"}  # the equivalent stage with multiple processes
GRAD_SYNCS = ("allreduce", "overlapped", "sharded")

# The sections of --help-all.
GROUPS = (
    *("data", "model", "optimizer", "schedule", "computing"),
    *("several ranks", "saving", "trouble", "display"),
)
of_data, of_model, of_optimizer, of_computing = (
    partial(setting, group=group) for group in ("data", "model", "optimizer", "computing")
)
# All settings of these groups may change on resume.
of_schedule, of_ranks, of_saving, of_trouble, of_display = (
    partial(setting, group=group, changeable=True)
    for group in ("schedule", "several ranks", "saving", "trouble", "display")
)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The architecture of a model, shared by all stages and checkpoints.

    Upper limits exceed all realistic models. They reject invalid files before memory is allocated.
    """

    vocab_size: int = of_model(
        0, "Vocabulary size, at least the tokenizer's. 0: the tokenizer's.", low=0, most=1 << 24
    )
    seq_len: int = of_model(128, "Context length: tokens per sequence.", low=1, most=1 << 20)
    n_layer: int = of_model(4, "Transformer layers.", low=1, most=1000)
    n_head: int = of_model(4, "Attention heads per layer.", low=1)
    n_kv_head: int = of_model(0, "Key/value heads (grouped-query attention). 0: n_head.", low=0)
    n_embd: int = of_model(128, "Width of the embedding and the residual stream.", low=1, most=1 << 17)
    head_dim: int = of_model(0, "Size of an attention head. 0: n_embd / n_head.", low=0, most=1 << 12)
    norm: str = of_model("layernorm", "Normalization layer.", choices=NORMS)
    norm_gain: bool = of_model(True, "Give norms a trained scale.")
    norm_eps: float = of_model(1e-5, "Epsilon added to the variance in norms.", above=0)
    norm_groups: int = of_model(
        1, "Normalize N equal parts of the channels separately. Set by weights ensemble.", low=1, most=64
    )
    embed_norm: bool = of_model(False, "Normalize the embeddings.")
    final_norm: bool = of_model(True, "Normalize before the output layer.")
    mlp: str = of_model("gelu", "Activation function of the MLP.", choices=ACTIVATIONS)
    # A gated MLP has three matrices of width 8/3 n_embd, with as many parameters as two of width 4 n_embd.
    mlp_width: int = of_model(
        0, "Hidden size of the MLP. 0: 4 n_embd, or 8/3 n_embd for swiglu.", low=0, most=1 << 19
    )
    positions: str = of_model("learned", "Position encoding.", choices=POSITIONS)
    rope_base: float = of_model(10_000.0, "Base of the RoPE frequencies; larger for longer contexts.", low=1)
    rope_scaling: str = of_model(
        "none",
        "Extend the context: linear divides all RoPE frequencies by rope_factor, llama3 only low ones"
        " (Llama 3.1).",
        choices=("none", "linear", "llama3"),
    )
    rope_factor: float = of_model(8.0, "With rope_scaling: factor that divides the RoPE frequencies.", low=1)
    rope_context: int = of_model(
        8192, "With rope_scaling llama3: context length of the original training.", low=1
    )
    rope_slow: float = of_model(
        1.0,
        "With rope_scaling llama3: divide frequencies with fewer than N rotations in rope_context.",
        low=0,
    )
    rope_fast: float = of_model(
        4.0,
        "With rope_scaling llama3: keep frequencies with more than N rotations in rope_context.",
        above=0,
    )
    qk_norm: bool = of_model(False, "Normalize the queries and keys of each head.")
    qk_norm_gain: bool = of_model(
        False, "With qk_norm: give these norms a trained scale, applied before RoPE (Qwen 3)."
    )
    value_embeddings: bool = of_model(
        False, "Add a learned per-token vector to the values of every other layer."
    )
    previous_embedding: bool = of_model(
        False, "Add a second learned vector to each embedding: that of the previous token."
    )
    window: int = of_model(
        0,
        "Let each token attend to the last N tokens, itself included. 0: no limit.",
        low=0,
        most=1 << 20,
    )
    full_every: int = of_model(
        4,
        "With --window: every Nth layer, counted from the last, has full attention. 0: none.",
        low=0,
        most=1000,
    )
    bias: bool = of_model(True, "Use biases in linear layers and layer norms.", flag="--bias/--no-bias")
    qkv_bias: bool = of_model(False, "Use biases for queries, keys and values even with --no-bias.")
    tied: bool = of_model(True, "Tie the output layer to the embedding.", flag="--tied/--untied")
    vocab_multiple: int = of_model(64, "Pad the vocabulary to a multiple of N.", low=1, most=1 << 20)
    init_weights: str = of_model(
        "gpt2",
        "Weight initialization: gpt2 (normal, init_std), unit (keeps activations at scale 1; residual"
        " projections start at zero), or bigrams (unit, with embedding and output layer fitted to the token"
        " pairs of the training text).",
        choices=("gpt2", "unit", "bigrams"),
    )
    init_std: float = of_model(0.02, "With init_weights gpt2: standard deviation of the weights.", above=0)
    init_residual: bool = of_model(
        True, "With init_weights gpt2: scale the projections into the residual stream by 1/√(2 n_layer)."
    )

    def __post_init__(self) -> None:
        check(self)
        if not self.head_dim and self.n_embd % self.n_head:
            raise UsageError(f"n_embd ({self.n_embd}) must be a multiple of n_head ({self.n_head})")
        if self.n_embd % self.norm_groups:
            raise UsageError(f"n_embd ({self.n_embd}) must be a multiple of norm_groups ({self.norm_groups})")
        if self.norm_groups > 1 and (self.norm != "rmsnorm" or self.norm_gain):
            raise UsageError("norm_groups requires norm = rmsnorm and norm_gain = false")
        if self.n_kv_head and self.n_head % self.n_kv_head:
            raise UsageError(f"n_head ({self.n_head}) must be a multiple of n_kv_head ({self.n_kv_head})")
        if self.init_weights == "bigrams" and (self.tied or not self.final_norm):
            raise UsageError(
                "init_weights bigrams requires tied = false and final_norm = true; change them, or set"
                " init_weights to unit"
            )
        if self.positions == "rope" and self.head_size % 2:
            size = "head_dim" if self.head_dim else "n_embd / n_head"
            raise UsageError(f"positions rope requires an even {size}, not {self.head_size}")
        if self.rope_slow >= self.rope_fast:
            raise UsageError(f"rope_slow ({self.rope_slow}) must be less than rope_fast ({self.rope_fast})")
        if self.qk_norm_gain and not self.qk_norm:
            raise UsageError("qk_norm_gain requires qk_norm")

    @property
    def head_size(self) -> int:
        return self.head_dim or self.n_embd // self.n_head

    @property
    def attention_width(self) -> int:
        """Width of the query heads, and of attention's output."""
        return self.n_head * self.head_size

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head

    @property
    def qkv_width(self) -> int:
        """Width of the concatenated queries, keys and values."""
        return (self.n_head + 2 * self.kv_heads) * self.head_size

    @property
    def value_layers(self) -> range:
        """The layers with value embeddings, which are every other one, including the last."""
        first = (self.n_layer - 1) % 2 if self.value_embeddings else self.n_layer
        return range(first, self.n_layer, 2)

    def window_of(self, layer: int) -> int:
        """Return the number of tokens each token attends to in a layer, including itself; 0: all before."""
        sees_all = self.full_every and (self.n_layer - 1 - layer) % self.full_every == 0
        return 0 if sees_all or self.window >= self.seq_len else self.window

    @property
    def windows(self) -> list[int]:
        return [self.window_of(layer) for layer in range(self.n_layer)]

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding. Rows from `vocab_size` on stay zero and are never predicted."""
        return _round_up(self.vocab_size, self.vocab_multiple)

    @property
    def hidden(self) -> int:
        """Width inside the MLP, after its activation."""
        if self.mlp_width:
            return self.mlp_width
        return _round_up(8 * self.n_embd // 3, 8) if self.gated else 4 * self.n_embd

    @property
    def gated(self) -> bool:
        """Whether half of the MLP's first matmul output multiplies the other half."""
        return ACTIVATIONS[self.mlp].gated

    @property
    def pre_width(self) -> int:
        """Width of the activation's input."""
        return 2 * self.hidden if self.gated else self.hidden

    @property
    def centred(self) -> bool:
        """Whether norms subtract the mean."""
        return self.norm == "layernorm"

    @property
    def has_position_vectors(self) -> bool:
        """Whether positions have learned vectors. If so, context length and cached tokens cannot shift."""
        return self.positions == "learned"


# An alternative to batch_size. `layered` in run_config.py converts it.
BATCH_TOKENS = "batch_tokens"
BATCH_IN_TOKENS = Setting(int, "Tokens per optimizer step, instead of --batch-size.", group="optimizer")


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Data, batch, schedule, optimizer, and when to write files."""

    data: str = of_data(
        "corpus",
        "Training data: a bundled text (tales, corpus, story, names), a text file, a directory of token"
        " shards, or documents (a directory of text files, .jsonl, .parquet, .gz). Several with weights:"
        " --data a.txt:3 --data b/:1, or a.txt:3,b/:1.",
        changeable=True,  # the content is compared on resume
        first=True,
    )
    tokenizer: str = of_data(
        "auto",
        "Tokenizer: byte, char, word, bpe:N (N entries, learned from the data), gpt2, hub:ORG/NAME, or a"
        " path. auto: the tokenizer of --init or the shards; otherwise byte.",
        first=True,
    )
    verify_data: bool = of_data(
        True, "Verify the checksums of all shards before the first step.", changeable=True
    )
    shift_windows: bool = of_data(True, "Shift the windows over the text by a random offset in every epoch.")
    pack: bool = of_data(
        False,
        "Start each sequence with a document and fill it by best-fit packing. Drops document ends that do"
        " not fit.",
        flag="--pack/--no-pack",
    )
    chats: bool = of_data(
        False,
        "Read --data and --val as chats (JSON lines) and train only on the answers: distgpt tune.",
        flag="--chats/--no-chats",
    )
    input_noise: float = of_data(
        0.0,
        "Fraction of input tokens replaced by others of their sequence, against overfitting on a short text.",
        low=0,
        below=1,
    )
    init: str = of_model("", "Start from this weights file instead of random weights.", first=True)
    lora_rank: int = of_model(
        0,
        "Freeze the weights of --init (tune: --weights) and train LoRA adapters of this rank. 0: off.",
        low=0,
        most=1 << 12,
    )
    lora_alpha: float = of_model(
        0.0, "LoRA alpha: adapters are scaled by alpha / rank. 0: twice the rank.", low=0, most=1e6
    )
    lora_base: str = of_model(
        "none",
        "With --lora-rank: keep the layers' frozen matrices in int8 or int4 in memory, and embeddings and the"
        " output layer in int8 (CPUs). none: in --dtype.",
        choices=("none", *QUANTIZED_DTYPES),
        flag="--base",
    )
    lora_matrices: str = of_model(
        "all",
        "Matrices with LoRA adapters, separated by commas: q, k, v, o (attention), gate, up, down (MLP;"
        " gate only with swiglu). all: every matrix.",
    )
    steps: int = of_schedule(600, "Number of optimizer steps.", low=1, first=True)
    epochs: float = of_schedule(
        0.0, "Number of passes over the examples, instead of --steps. 0: off.", low=0, most=1e6
    )
    train_minutes: float = of_schedule(
        0.0,
        "Stop after N minutes instead of after --steps; the learning rate follows the clock. Includes time"
        " before a resume. 0: off.",
        low=0,
        most=1e7,
    )
    within_minutes: float = of_schedule(
        0.0,
        "Minutes set by --within. 0: it was not used.",
        low=0,
        most=1e7,
    )
    ensemble: int = of_schedule(
        1, "Train N models with consecutive seeds, and average their predictions.", low=1, most=64
    )
    batch_size: int = of_optimizer(
        16, "Sequences per optimizer step, over all ranks.", low=1, most=1 << 32, first=True
    )
    grad_accum: int = of_computing(
        0, "Micro-batches per optimizer step. 0: choose by speed and free memory.", low=0, changeable=True
    )
    optimizer: str = of_optimizer(
        "adamw",
        "Optimizer: AdamW, or Muon for the matrices of the layers and AdamW for all other parameters.",
        choices=("adamw", "muon"),
    )
    lr: float = of_optimizer(
        2e-3,
        "Peak learning rate. If not set: 5e-5 with --init, 1/n_embd with --lora-rank.",
        above=0,
        changeable=True,
        first=True,
    )
    min_lr: float = of_schedule(0.0, "Final learning rate.", low=0)
    embedding_lr: float = of_optimizer(
        0.0, "Peak learning rate of the embedding. 0: --lr.", low=0, changeable=True
    )
    value_lr: float = of_optimizer(
        0.0, "Peak learning rate of value and previous embeddings. 0: embedding_lr.", low=0, changeable=True
    )
    head_lr: float = of_optimizer(
        0.0, "Peak learning rate of the output layer, if not tied. 0: --lr.", low=0, changeable=True
    )
    vector_lr: float = of_optimizer(
        0.0, "Peak learning rate of norms, biases and gates. 0: --lr.", low=0, changeable=True
    )
    schedule: str = of_schedule(
        "cosine",
        "Learning rate schedule after the warm-up. wsd: constant, then a linear decay.",
        choices=("linear", "cosine", "wsd", "constant"),
    )
    decay_fraction: float = of_schedule(
        0.65, "With --schedule wsd: share of the steps in which the learning rate decays.", low=0, most=1
    )
    warmup: int = of_schedule(20, "Steps of linear learning rate warm-up.", low=0)
    weight_decay: float = of_optimizer(0.1, "Weight decay; applies only to matrices.", low=0, changeable=True)
    table_decay: float = of_optimizer(
        0.0,
        "With Muon: weight decay of value and previous embeddings and an untied output layer, times --lr.",
        low=0,
        changeable=True,
    )
    momentum: float = of_optimizer(0.95, "Muon's momentum.", low=0, below=1)
    clip: float = of_optimizer(1.0, "Clip the gradient norm to this value. 0: off.", low=0, changeable=True)
    beta1: float = of_optimizer(0.9, "AdamW's beta1, the decay of the first moment.", low=0, below=1)
    beta2: float = of_optimizer(0.95, "AdamW's beta2, the decay of the second moment.", low=0, below=1)
    eps: float = of_optimizer(1e-8, "AdamW's epsilon.", above=0)
    seed: int = of_computing(1337, "Seed of the initial weights and the data order.", low=0, most=2**63 - 1)
    dtype: str = of_computing(
        "float32",
        "Number format for computing. auto: bfloat16 if it is at least 33% faster; otherwise float32.",
        choices=DTYPES,
        changeable=True,
        first=True,
        undecided=AUTO_DTYPE,
    )
    matmul: str = of_computing(
        "auto",
        "Backend for float32 matmuls on CPUs: distgpt's own kernels or the BLAS. auto: the one measured to"
        " be faster on this processor.",
        choices=("auto", "own", "blas"),
        changeable=True,
    )
    grad_sync: str = of_ranks(
        "allreduce",
        "Gradient synchronization (mpi, mpi-cuda). allreduce: after the backward pass. overlapped: during"
        " the backward pass. sharded: each rank updates a part of the weights and keeps only its"
        " optimizer state.",
        choices=GRAD_SYNCS,
        former_choices=tuple((name, "allreduce") for name in ("auto", "chunked", "hierarchical", "packed")),
    )
    gradient_dtype: str = of_ranks(
        "float32",
        "Number format for sending gradients (mpi, mpi-cuda).",
        choices=("float32", "bfloat16"),
    )
    outer_every: int = of_ranks(
        0,
        "DiLoCo, for slow networks: take N local steps, then average the weight changes (mpi, mpi-cuda)."
        " 0: off.",
        low=0,
    )
    outer_lr: float = of_ranks(0.9, "With --outer-every: learning rate of the averaged step.", above=0)
    outer_momentum: float = of_ranks(
        0.7, "With --outer-every: Nesterov momentum of the averaged step.", low=0, below=1
    )
    reproducible_parts: int = of_ranks(
        0,
        "Make results bitwise identical for any thread count and any rank count that divides N, a power of"
        " two (CPUs). 0: off.",
        low=0,
        most=1 << 20,
    )
    balance: str = of_ranks(
        "even",
        "Sequences per rank. even: equal. auto: more for faster ranks, measured at startup (mpi, mpi-cuda).",
        choices=("even", "auto"),
    )
    recompute: str = of_computing(
        "auto",
        "Activations to recompute in the backward pass to save memory. auto: as few as possible.",
        choices=("auto", "none", "mlp", "block"),
        changeable=True,
    )
    save_every: int = of_saving(0, "Steps between checkpoints. 0: use save_minutes.", low=0)
    save_minutes: float = of_saving(
        5.0, "Minutes between checkpoints if save_every is 0. 0: save only at the end.", low=0
    )
    save: str = of_saving(
        "auto",
        "Write checkpoints while training waits (sync) or in the background (async). auto: async if memory"
        " allows.",
        choices=("auto", "sync", "async"),
    )
    on_disk_error: str = of_trouble(
        "keep-going",
        "If a write fails and an older checkpoint exists: stop, or keep going and, on a full disk, delete"
        " the oldest.",
        choices=("keep-going", "stop"),
    )
    keep: int = of_saving(3, "Keep the newest N checkpoints.", low=1)
    keep_every: int = of_saving(0, "Also keep a checkpoint permanently every N steps. 0: none.", low=0)
    keep_every_minutes: float = of_saving(
        0.0, "Also keep a checkpoint permanently every N minutes. 0: none.", low=0
    )
    sample_every: int = of_display(0, "Print a generated sample every N steps. 0: off.", low=0)
    eval_every: int = of_data(
        0,
        "Evaluate every N steps. 0: only at the end, or with --patience ten times.",
        low=0,
        changeable=True,
    )
    patience: int = of_schedule(
        0,
        "Stop after N consecutive evaluations without a lower validation loss. 0: off.",
        low=0,
        changeable=True,
    )
    val: str = of_data("", "Validation data, in any format that --data accepts.", changeable=True)
    val_fraction: float = of_data(
        0.0,
        "Fraction held out for validation: eight pieces of a text file, or random documents.",
        low=0,
        below=1,
        first=True,
    )
    val_tokens: int = of_data(0, "Validation tokens per evaluation. 0: all.", low=0, changeable=True)
    hellaswag: str = of_data("", "Also evaluate on this HellaSwag file.", changeable=True)
    on_bad_step: str = of_trouble(
        "stop",
        "If a loss or gradient is not finite: stop, skip the step, or roll back to the last checkpoint and"
        " skip the data.",
        choices=("stop", "skip", "rollback"),
    )
    spike_zscore: float = of_trouble(
        0.0,
        "Also treat a step as bad if its loss or gradient norm is N standard deviations above the mean of"
        " the last 100. 0: off.",
        low=0,
    )
    bad_steps_allowed: int = of_trouble(10, "Stop the run after more than N bad steps.", low=0)
    verify_every: int = of_trouble(
        100,
        "Compare the ranks' weights every N steps, after the first and at the end. 0: off.",
        low=0,
    )

    # An extension's settings are checked when a run is planned, so weights can be read without the extension.
    extra: Mapping[str, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(self)
        if not isinstance(self.extra, dict) or not all(map(str.isidentifier, self.extra)):
            raise UsageError(f"extra must be a table of settings, not {self.extra!r:.80}")
        for name, value in self.extra.items():
            Setting(type(value) if type(value) in (bool, int, float) else str, "").check(name, value)
        for name in self.adapted:
            if name not in LORA_MATRICES:
                raise UsageError(
                    f"lora_matrices {self.lora_matrices!r:.80} has {name!r:.40}"
                    f"{did_you_mean(name, LORA_MATRICES)}"
                )
        if self.min_lr > self.lr:
            raise UsageError(f"min_lr ({self.min_lr}) must not exceed lr ({self.lr})")
        if self.grad_accum and self.batch_size % self.grad_accum:
            raise UsageError(
                f"batch_size ({self.batch_size}) must be a multiple of grad_accum ({self.grad_accum})"
            )

    @property
    def adapted(self) -> tuple[str, ...]:
        """The matrices that get LoRA adapters."""
        return LORA_MATRICES if self.lora_matrices == "all" else tuple(self.lora_matrices.split(","))

    @property
    def is_base_small(self) -> bool:
        """Whether the frozen matrices are quantized in memory."""
        return self.lora_base != "none"

    @property
    def lora_scale(self) -> float:
        """LoRA's scale, alpha / rank. By default, alpha is twice the rank."""
        return (self.lora_alpha or 2.0 * self.lora_rank) / max(1, self.lora_rank)

    @property
    def matmul_backend(self) -> str:
        """The matmul backend: distgpt's own kernels if results must not depend on the thread count."""
        return "own" if self.reproducible_parts and self.matmul == "auto" else self.matmul

    @property
    def text_kind(self) -> str:
        """The kind of text if a setting determines it; "" if the path does."""
        if self.chats:
            return "chats"
        return "packing" if self.pack else ""

    @property
    def is_of_examples(self) -> bool:
        """Whether a row packs multiple examples that do not attend to each other."""
        return self.chats

    @property
    def metrics(self) -> dict[str, str]:
        """Data files of additional evaluation metrics, by metric name."""
        return {"hellaswag": self.hellaswag} if self.hellaswag else {}


@dataclass(frozen=True, slots=True)
class GpuConfig:
    """GPU computation settings. They change results only by rounding."""

    graphs: bool = of_computing(
        True,
        "Capture each step as a CUDA graph and replay it (cuda stages).",
        flag="--cuda-graph/--no-cuda-graph",
    )
    # auto: nccl if each rank has its own GPU, otherwise host
    allreduce: str = of_ranks(
        "auto", "Transport for gradient sums between GPUs (mpi-cuda).", choices=("auto", "nccl", "host")
    )
    deterministic: bool = of_computing(
        False,
        "Make results bitwise identical between runs. On CPUs: sets --reproducible-parts, usually to 8.",
    )
    tf32: bool = of_computing(
        False, "Use TF32 for float32 matmuls: faster, with a 10-bit mantissa (cuda stages)."
    )

    def __post_init__(self) -> None:
        check(self)
