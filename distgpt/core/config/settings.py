"""All settings, declared once: default, help, choices, range, flag, and whether they may change on resume."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from distgpt.core.base.errors import UsageError, nearest
from distgpt.core.config.setting import Setting, Value, check, setting
from distgpt.core.ops.activations import ACTIVATIONS

DEFAULT_TEMPERATURE = 0.8  # without randomness, small models repeat themselves
DEEPEST = 100  # layers of --depth
PARAMETERS_PER_TOKEN = 10  # the maximum per training token: larger models overfit
NORMS = ("layernorm", "rmsnorm")
MLPS = tuple(ACTIVATIONS)
POSITIONS = ("learned", "rope", "none")
LORA_MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
DTYPES = ("float32", "float64", "bfloat16")
METRICS = ("hellaswag",)  # settings that name the data file of an evaluation metric
ROUNDED_DTYPES = ("int8", "int4")
AUTO_DTYPE = "auto"  # see distgpt/core/cpu/stages.py
INFERENCE_DTYPES = (AUTO_DTYPE, *DTYPES, *ROUNDED_DTYPES)
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
    seq_len: int = of_model(128, "Tokens per sequence: the context length.", low=1, most=1 << 20)
    n_layer: int = of_model(4, "Transformer layers.", low=1, most=1000)
    n_head: int = of_model(4, "Attention heads per layer.", low=1)
    n_kv_head: int = of_model(
        0, "Heads of keys and values, each for n_head / n_kv_head heads of queries. 0: n_head.", low=0
    )
    n_embd: int = of_model(128, "Width of the embedding and of every layer.", low=1, most=1 << 17)
    head_dim: int = of_model(0, "Elements of an attention head. 0: n_embd / n_head.", low=0, most=1 << 12)
    norm: str = of_model("layernorm", "Kind of normalization.", choices=NORMS)
    norm_gain: bool = of_model(True, "Scale normalized values by trained weights.")
    norm_eps: float = of_model(1e-5, "Number added to the variance in a normalization.", above=0)
    embed_norm: bool = of_model(False, "Normalize the embeddings.")
    final_norm: bool = of_model(True, "Normalize before the output layer.")
    mlp: str = of_model("gelu", "Activation function of the MLP.", choices=ACTIVATIONS)
    # A gated MLP has three matrices of width 8/3 n_embd, with as many parameters as two of width 4 n_embd.
    mlp_width: int = of_model(
        0, "Width inside the MLP. 0: 4 n_embd, or 8/3 n_embd for swiglu.", low=0, most=1 << 19
    )
    positions: str = of_model("learned", "How the model learns where a token stands.", choices=POSITIONS)
    rope_base: float = of_model(10_000.0, "Base of RoPE's angles: larger for longer contexts.", low=1)
    rope_scaling: str = of_model(
        "none",
        "Slow RoPE's rotations down by rope_factor, for longer contexts: all of them (linear), or slow ones"
        " alone, as Llama 3.1 does.",
        choices=("none", "linear", "llama3"),
    )
    rope_factor: float = of_model(8.0, "With rope_scaling: divide RoPE's frequencies by this.", low=1)
    rope_context: int = of_model(
        8192, "With llama3's rope_scaling: the context length of the training before.", low=1
    )
    rope_slow: float = of_model(
        1.0, "With llama3's rope_scaling: divide what turns less often than this in that context.", low=0
    )
    rope_fast: float = of_model(
        4.0, "With llama3's rope_scaling: leave what turns more often than this in that context.", above=0
    )
    qk_norm: bool = of_model(False, "Normalize queries and keys, head by head.")
    qk_norm_gain: bool = of_model(
        False, "With qk_norm: scale them by trained weights, before RoPE turns them, as Qwen 3 does."
    )
    value_embeddings: bool = of_model(
        False, "Add a vector of each token, trained for it, to the values in every other layer."
    )
    window: int = of_model(
        0,
        "Let each token attend to this many tokens alone: itself and those before it. 0: no limit.",
        low=0,
        most=1 << 20,
    )
    full_every: int = of_model(
        4,
        "With --window: one layer in this many, counted back from the last, has no limit. 0: none.",
        low=0,
        most=1000,
    )
    bias: bool = of_model(True, "Give linear layers and layer norms biases.", flag="--bias/--no-bias")
    qkv_bias: bool = of_model(False, "Give queries, keys and values biases, even with --no-bias.")
    tied: bool = of_model(
        True, "Share the embedding's weights with the output layer.", flag="--tied/--untied"
    )
    vocab_multiple: int = of_model(64, "Pad the embedding's rows to a multiple of this.", low=1, most=1 << 20)
    init_weights: str = of_model(
        "gpt2",
        "Draw initial weights as GPT-2's, or (unit) such that layers keep a size of 1 and add nothing."
        " bigrams: as unit, with embedding and output layer learned from the counts of the text's pairs.",
        choices=("gpt2", "unit", "bigrams"),
    )
    init_std: float = of_model(0.02, "Standard deviation of GPT-2's initial weights.", above=0)
    init_residual: bool = of_model(
        True, "Scale the initial projections into the residual stream by 1/√(2 n_layer)."
    )

    def __post_init__(self) -> None:
        check(self)
        if not self.head_dim and self.n_embd % self.n_head:
            raise UsageError(f"n_embd {self.n_embd} cannot be divided among n_head {self.n_head} heads")
        if self.n_kv_head and self.n_head % self.n_kv_head:
            raise UsageError(f"n_head {self.n_head} is no multiple of n_kv_head {self.n_kv_head}")
        if self.init_weights == "bigrams" and (self.tied or not self.final_norm):
            raise UsageError(
                "init_weights is bigrams, which needs an output layer of its own and a norm before it: tied"
                " must be false and final_norm true, or init_weights unit"
            )
        if self.positions == "rope" and self.head_size % 2:
            size = "head_dim" if self.head_dim else "n_embd / n_head"
            raise UsageError(f"positions is rope, which rotates pairs: {size} = {self.head_size} is odd")
        if self.rope_slow >= self.rope_fast:
            raise UsageError(f"rope_slow {self.rope_slow} must be below rope_fast {self.rope_fast}")
        if self.qk_norm_gain and not self.qk_norm:
            raise UsageError("qk_norm_gain scales what qk_norm normalizes: it needs qk_norm")

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
        "Train on a bundled text (story, corpus, names), a text file, a folder of token shards, or documents:"
        " a folder of texts, .jsonl, .parquet, .gz.",
        changeable=True,  # the content is compared on resume
        first=True,
    )
    tokenizer: str = of_data(
        "auto",
        "Cut text into tokens by this: byte, char, word, bpe:N (N entries, learned from the text), gpt2,"
        " hub:ORG/NAME, or a path. auto: the tokenizer of --init or of the shards, else byte.",
        first=True,
    )
    verify_data: bool = of_data(
        True, "Read all shards before the first step, to find damage.", changeable=True
    )
    shift_windows: bool = of_data(
        True, "Cut the text at other positions in every epoch, or always at the same ones."
    )
    pack: bool = of_data(
        False,
        "Begin each sequence with a document, and fill it by best fit. What does not fit is left out.",
        flag="--pack/--no-pack",
    )
    chats: bool = of_data(
        False,
        "Read --data and --val as chats, in lines of JSON, and learn their answers alone: distgpt tune.",
        flag="--chats/--no-chats",
    )
    init: str = of_model(
        "", "Train the model of this weights file further, instead of random weights.", first=True
    )
    lora_rank: int = of_model(
        0,
        "Leave the weights of --init (tune: of --weights) as they are, and train adapters of this rank beside"
        " the matrices of its layers (LoRA). 0: off.",
        low=0,
        most=1 << 12,
    )
    lora_alpha: float = of_model(
        0.0, "Scale what adapters add by this number over their rank. 0: twice the rank.", low=0, most=1e6
    )
    lora_matrices: str = of_model(
        "all",
        "Put adapters beside these matrices, separated by commas: q, k, v, o (of attention), gate, up, down"
        " (of the MLP; gate with swiglu alone). all: beside each.",
    )
    steps: int = of_schedule(600, "Train for this many optimizer steps.", low=1, first=True)
    epochs: float = of_schedule(
        0.0, "Train for this many passes over the examples, instead of for --steps. 0: off.", low=0, most=1e6
    )
    train_minutes: float = of_schedule(
        0.0,
        "End the run after this many minutes, by which the learning rate falls too, instead of after --steps."
        " What it took before it resumed counts. 0: off.",
        low=0,
        most=1e7,
    )
    within_minutes: float = of_schedule(
        0.0,
        "The minutes that --within asked for. Where a text is too short for them, train_minutes are fewer.",
        low=0,
        most=1e7,
    )
    batch_size: int = of_optimizer(
        16, "Sequences per optimizer step, on all ranks together.", low=1, most=1 << 32, first=True
    )
    grad_accum: int = of_computing(
        0, "Micro-batches per optimizer step. 0: chosen by speed and by free memory.", low=0, changeable=True
    )
    optimizer: str = of_optimizer(
        "adamw",
        "Update parameters by AdamW, or the layers' matrices by Muon and all others by AdamW.",
        choices=("adamw", "muon"),
    )
    lr: float = of_optimizer(
        2e-3,
        "Peak learning rate. With --init 5e-5, if not given; with --lora-rank 1/n_embd.",
        above=0,
        changeable=True,
        first=True,
    )
    min_lr: float = of_schedule(0.0, "Learning rate at the end of the schedule.", low=0)
    embedding_lr: float = of_optimizer(
        0.0, "Peak learning rate of the embedding. 0: --lr.", low=0, changeable=True
    )
    value_lr: float = of_optimizer(
        0.0, "Peak learning rate of the value embeddings. 0: embedding_lr.", low=0, changeable=True
    )
    head_lr: float = of_optimizer(
        0.0, "Peak learning rate of an output layer of its own. 0: --lr.", low=0, changeable=True
    )
    vector_lr: float = of_optimizer(
        0.0, "Peak learning rate of norms, biases and gates. 0: --lr.", low=0, changeable=True
    )
    schedule: str = of_schedule(
        "cosine",
        "How the learning rate falls after the warm-up. wsd: constant, then linear at the end.",
        choices=("linear", "cosine", "wsd", "constant"),
    )
    decay_fraction: float = of_schedule(
        0.65, "With --schedule wsd: let it fall over this last part of the steps.", low=0, most=1
    )
    warmup: int = of_schedule(20, "Raise the learning rate linearly over this many steps.", low=0)
    weight_decay: float = of_optimizer(
        0.1, "Weight decay, which acts on matrices only.", low=0, changeable=True
    )
    momentum: float = of_optimizer(0.95, "Momentum of Muon.", low=0, below=1)
    clip: float = of_optimizer(1.0, "Clip the gradient to this norm. 0: never.", low=0, changeable=True)
    beta1: float = of_optimizer(0.9, "Decay of AdamW's first moment.", low=0, below=1)
    beta2: float = of_optimizer(0.95, "Decay of AdamW's second moment.", low=0, below=1)
    eps: float = of_optimizer(1e-8, "Number added to the denominator of AdamW.", above=0)
    seed: int = of_computing(1337, "Seed of the initial weights and of the batches.", low=0, most=2**63 - 1)
    dtype: str = of_computing(
        "float32",
        "Compute in this number format. auto: bfloat16 where it is faster by a third or more, else float32.",
        choices=DTYPES,
        changeable=True,
        first=True,
        undecided=AUTO_DTYPE,
    )
    matmul: str = of_computing(
        "auto",
        "Multiply float32 matrices on CPUs by our own loops or by the BLAS. auto: by our own on processors"
        " where they were measured to be faster.",
        choices=("auto", "own", "blas"),
        changeable=True,
    )
    grad_sync: str = of_ranks(
        "allreduce",
        "How ranks sum gradients. allreduce: after the backward pass (on CPUs within nodes first)."
        " overlapped: during the backward pass. sharded: each rank sums and updates a part, and keeps only"
        " the optimizer state of that part (mpi, mpi-cuda).",
        choices=GRAD_SYNCS,
        former_choices=tuple((name, "allreduce") for name in ("auto", "chunked", "hierarchical", "packed")),
    )
    gradient_dtype: str = of_ranks(
        "float32", "Send gradients in this number format (mpi, mpi-cuda).", choices=("float32", "bfloat16")
    )
    outer_every: int = of_ranks(
        0,
        "Let each rank take this many steps of its own, then average how far the weights have come (DiLoCo,"
        " for slow networks; mpi, mpi-cuda). 0: exchange gradients in every step.",
        low=0,
    )
    outer_lr: float = of_ranks(
        0.9, "With --outer-every: learning rate of the step that all ranks then take together.", above=0
    )
    outer_momentum: float = of_ranks(
        0.7, "With --outer-every: Nesterov momentum of that step.", low=0, below=1
    )
    reproducible_parts: int = of_ranks(
        0,
        "Make results bit-identical on any number of threads, and on any number of ranks that divides this"
        " power of two (CPUs). 0: off.",
        low=0,
        most=1 << 20,
    )
    balance: str = of_ranks(
        "even",
        "Give each rank as many sequences as the others, or (auto) more to faster ones, measured at the start"
        " (mpi, mpi-cuda).",
        choices=("even", "auto"),
    )
    recompute: str = of_computing(
        "auto",
        "Compute these activations again in the backward pass, to save memory. auto: as few as possible.",
        choices=("auto", "none", "mlp", "block"),
        changeable=True,
    )
    save_every: int = of_saving(0, "Save a checkpoint every N steps. 0: by time.", low=0)
    save_minutes: float = of_saving(
        5.0, "Minutes between checkpoints, without --save-every. 0: only at the end.", low=0
    )
    save: str = of_saving(
        "auto",
        "Stop training while a checkpoint is written (sync), or write a copy meanwhile (async). auto: async"
        " where memory allows.",
        choices=("auto", "sync", "async"),
    )
    on_disk_error: str = of_trouble(
        "keep-going",
        "What to do when a write fails and an older checkpoint exists. keep-going also gives up the oldest"
        " checkpoints where the disk is full.",
        choices=("keep-going", "stop"),
    )
    keep: int = of_saving(3, "Keep the newest N checkpoints.", low=1)
    keep_every: int = of_saving(
        0, "Keep one checkpoint for good in every N steps, beside the newest. 0: none.", low=0
    )
    keep_every_minutes: float = of_saving(
        0.0, "Keep one checkpoint for good in this many minutes, beside the newest. 0: none.", low=0
    )
    sample_every: int = of_display(0, "Write a sample of text every N steps. 0: never.", low=0)
    eval_every: int = of_data(0, "Evaluate every N steps. 0: only at the end.", low=0, changeable=True)
    val: str = of_data("", "Validate on this text, of the kinds that --data takes.", changeable=True)
    val_fraction: float = of_data(
        0.0,
        "Hold out this fraction for validation: a text's first part, or documents. Shards have their own.",
        low=0,
        below=1,
        first=True,
    )
    val_tokens: int = of_data(
        0, "Use this many validation tokens per evaluation. 0: all.", low=0, changeable=True
    )
    hellaswag: str = of_data(
        "", "Also score the model on this HellaSwag file at evaluations.", changeable=True
    )
    on_bad_step: str = of_trouble(
        "stop",
        "What to do when a loss or gradient is not finite: stop, skip the step, or go back to the last"
        " checkpoint and leave these data out (rollback).",
        choices=("stop", "skip", "rollback"),
    )
    spike_zscore: float = of_trouble(
        0.0,
        "Also treat a step as bad if its loss or gradient norm exceeds the last 100 by this many standard"
        " deviations. 0: never.",
        low=0,
    )
    bad_steps_allowed: int = of_trouble(10, "End a run after more bad steps than this.", low=0)
    verify_every: int = of_trouble(
        100, "Compare the ranks' weights every N steps, after the first one and at the end. 0: never.", low=0
    )

    # An extension's settings are checked when a run is planned, so weights can be read without the extension.
    extra: Mapping[str, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(self)
        if not isinstance(self.extra, dict) or not all(map(str.isidentifier, self.extra)):
            raise UsageError(f"extra is {self.extra!r:.80}: it must be a table of settings")
        for name, value in self.extra.items():
            Setting(type(value) if type(value) in (bool, int, float) else str, "").check(name, value)
        for name in self.adapted:
            if name not in LORA_MATRICES:
                raise UsageError(
                    f"lora_matrices is {self.lora_matrices!r:.80}: {name!r:.40}{nearest(name, LORA_MATRICES)}"
                )
        if self.min_lr > self.lr:
            raise UsageError(f"min_lr {self.min_lr} is above lr {self.lr}")
        if self.grad_accum and self.batch_size % self.grad_accum:
            raise UsageError(
                f"batch_size {self.batch_size} cannot be split into grad_accum {self.grad_accum} parts"
            )

    @property
    def adapted(self) -> tuple[str, ...]:
        """The matrices that get LoRA adapters."""
        return LORA_MATRICES if self.lora_matrices == "all" else tuple(self.lora_matrices.split(","))

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
        "Record each step once as a CUDA graph and replay it (cuda stages).",
        flag="--cuda-graph/--no-cuda-graph",
    )
    # auto: nccl if each rank has its own GPU, otherwise host
    allreduce: str = of_ranks(
        "auto", "How GPUs sum their gradients (mpi-cuda).", choices=("auto", "nccl", "host")
    )
    deterministic: bool = of_computing(
        False, "Compute the same bits in every run. On CPUs: see --reproducible-parts."
    )
    tf32: bool = of_computing(
        False, "Multiply float32 matrices in TF32: faster, with a 10-bit mantissa (cuda stages)."
    )

    def __post_init__(self) -> None:
        check(self)
