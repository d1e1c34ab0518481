"""What a run is: the model's architecture and how it is trained. Frozen, validated, written as TOML."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any, TypeVar

from distgpt.errors import UsageError

NORMS = ("layernorm", "rmsnorm")
MLPS = ("gelu", "relu", "swiglu")
POSITIONS = ("learned", "rope", "none")
SCHEDULES = ("linear", "cosine", "constant")
DTYPES = ("float32", "float64", "bfloat16")
GRAD_SYNCS = ("packed", "chunked")
ALLREDUCES = ("auto", "nccl", "host", "cuda-aware")
RECOMPUTE = ("auto", "none", "mlp", "block")

BATCH_TOKENS = "batch_tokens"  # another way to say batch_size, which it becomes in presets.py

# Beyond any model of this kind: a file that claims more is not believed, before memory is asked for.
LARGEST = {
    "n_layer": 1000,
    "seq_len": 1 << 20,
    "n_embd": 1 << 17,
    "mlp_width": 1 << 19,
    "vocab_size": 1 << 24,
}


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The architecture, the same in every stage and in every checkpoint."""

    vocab_size: int = 0  # 0: as many as the tokenizer knows
    seq_len: int = 128
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    norm: str = "layernorm"
    norm_gain: bool = True
    norm_eps: float = 1e-5
    embed_norm: bool = False
    final_norm: bool = True
    mlp: str = "gelu"
    mlp_width: int = 0  # 0: four times the width; for swiglu 8/3 of it, which costs as many parameters
    positions: str = "learned"
    bias: bool = True
    tied: bool = True
    vocab_multiple: int = 64
    init_std: float = 0.02
    init_residual: bool = True  # projections into the residual stream start smaller, by 1/√(2 layers)

    def __post_init__(self) -> None:
        for name in ("seq_len", "n_layer", "n_head", "n_embd", "vocab_multiple"):
            _at_least(name, getattr(self, name), 1)
        for name in ("vocab_size", "mlp_width"):
            _at_least(name, getattr(self, name), 0)
        for name, most in LARGEST.items():
            if getattr(self, name) > most:
                raise UsageError(f"{name} is {getattr(self, name)}: it must be at most {most}")
        _above("norm_eps", self.norm_eps, 0)
        _above("init_std", self.init_std, 0)
        _one_of("norm", self.norm, NORMS)
        _one_of("mlp", self.mlp, MLPS)
        _one_of("positions", self.positions, POSITIONS)
        if self.n_embd % self.n_head:
            raise UsageError(f"n_embd {self.n_embd} cannot be divided among n_head {self.n_head} heads")
        if self.positions == "rope" and self.head_size % 2:
            raise UsageError(
                f"positions is rope, which turns pairs of numbers: n_embd / n_head = {self.head_size} is odd"
            )

    @property
    def head_size(self) -> int:
        return self.n_embd // self.n_head

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding; those past `vocab_size` stay zero and are never predicted."""
        return _round_up(self.vocab_size, self.vocab_multiple)

    @property
    def hidden(self) -> int:
        """Width inside the MLP, after its activation."""
        if self.mlp_width:
            return self.mlp_width
        return _round_up(8 * self.n_embd // 3, 8) if self.mlp == "swiglu" else 4 * self.n_embd


_COUNTS = (
    *("grad_accum", "warmup", "save_every", "sample_every", "eval_every"),
    *("val_tokens", "verify_every", "seed"),
)


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """How the model is trained: data, batch, schedule, optimizer, and what is written when."""

    data: str = "corpus"  # a text, or a folder of shards
    tokenizer: str = "auto"  # the shards' own; of a text its bytes
    verify_data: bool = True  # read all shards once before the first step
    shift_windows: bool = True  # cut the text elsewhere in every epoch
    init: str = ""  # weights to begin with, else random ones
    steps: int = 600
    batch_size: int = 16  # sequences per step, over all ranks and accumulation rounds
    grad_accum: int = 0  # rounds per step; 0: of a useful size that fits into memory
    lr: float = 2e-3
    min_lr: float = 0.0
    schedule: str = "cosine"
    warmup: int = 20
    weight_decay: float = 0.1
    clip: float = 1.0  # 0: off
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    seed: int = 1337
    dtype: str = "float32"
    grad_sync: str = "packed"
    recompute: str = "auto"  # what the backward pass computes again: as little as memory allows
    log_every: int = 1
    save_every: int = 0  # 0: only at the end
    keep: int = 3
    sample_every: int = 0  # 0: never
    eval_every: int = 0  # steps between evaluations on what is held out; 0: only at the end
    val_fraction: float = 0.0  # of a text, its first part, held out; shards bring theirs
    val_tokens: int = 0  # how much of what is held out an evaluation reads; 0: all of it
    hellaswag: str = ""  # a file of that benchmark, for evaluations too
    verify_every: int = 100

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "log_every", "keep"):
            _at_least(name, getattr(self, name), 1)
        for name in _COUNTS:
            _at_least(name, getattr(self, name), 0)
        if not 0 <= self.val_fraction < 1:
            raise UsageError(f"val_fraction is {self.val_fraction}: it must lie in [0, 1)")
        for name in ("min_lr", "weight_decay", "clip"):
            _at_least(name, getattr(self, name), 0.0)
        if self.seed >= 2**63:
            raise UsageError(f"seed is {self.seed}: it must be below 2^63")
        _above("lr", self.lr, 0)
        _above("eps", self.eps, 0)
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}: it must lie in [0, 1)")
        if self.min_lr > self.lr:
            raise UsageError(f"min_lr {self.min_lr} lies above lr {self.lr}")
        _one_of("schedule", self.schedule, SCHEDULES)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("grad_sync", self.grad_sync, GRAD_SYNCS)
        _one_of("recompute", self.recompute, RECOMPUTE)
        if self.grad_accum and self.batch_size % self.grad_accum:
            raise UsageError(
                f"batch_size {self.batch_size} cannot be split into grad_accum {self.grad_accum} rounds"
            )


@dataclass(frozen=True, slots=True)
class GpuConfig:
    """How a GPU stage works; what it computes is the same, up to rounding."""

    graphs: bool = True  # record steps, and repeat them without Python in the way
    allreduce: str = "auto"  # nccl where each rank has a GPU of its own, else host
    deterministic: bool = False  # the same bits in every run, at the price of speed
    tf32: bool = False  # products of float32 in a faster format with 10 bits

    def __post_init__(self) -> None:
        _one_of("allreduce", self.allreduce, ALLREDUCES)


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Both halves, as saved in a run directory and inside every weights file."""

    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def with_values(self, values: Mapping[str, Any]) -> RunConfig:
        """A copy with some keys, of either half, set anew. Unknown keys and wrong types are refused."""
        known = {f.name: f for f in (*fields(ModelConfig), *fields(TrainConfig))}
        for key, value in values.items():
            if key not in known:
                raise UsageError(f"unknown setting {key!r}{nearest(key, known)}")
            _check_type(key, value, known[key].type)
        return RunConfig(_updated(self.model, values), _updated(self.train, values))

    def to_toml(self) -> str:
        halves = (("model", self.model), ("train", self.train))
        return "\n".join(
            f"[{title}]\n" + "".join(f"{f.name} = {_toml(getattr(half, f.name))}\n" for f in fields(half))
            for title, half in halves
        )


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """The settings in a TOML text, from its top level, [model] and [train] alike, as one flat dict."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{source} is not valid TOML: {error}") from None
    flat: dict[str, Any] = {}
    for key, value in document.items():
        if not isinstance(value, dict):
            flat[key] = value
        elif key in ("model", "train"):
            half = ModelConfig if key == "model" else TrainConfig
            belongs = {f.name for f in fields(half)} | ({BATCH_TOKENS} if half is TrainConfig else set())
            for name, inner in value.items():
                if name not in belongs:
                    raise UsageError(f"{source}: [{key}] has no setting {name!r}{nearest(name, belongs)}")
                flat[name] = inner
        else:
            raise UsageError(f"{source}: unknown table [{key}]; [model] and [train] are known")
    return flat


def nearest(word: str, known: Iterable[str]) -> str:
    """“; did you mean …?” with the closest known word, then what is allowed when that is short."""
    options = list(known)
    close = get_close_matches(word, options, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return hint if len(options) > 40 else f"{hint} (allowed: {', '.join(sorted(options))})"


H = TypeVar("H", ModelConfig, TrainConfig)


def _updated(half: H, values: Mapping[str, Any]) -> H:
    own = {f.name for f in fields(half)}
    return replace(half, **{key: value for key, value in values.items() if key in own})


def _check_type(key: str, value: Any, expected: Any) -> None:
    """Types arrive as words because annotations are lazy: 'int', 'float', 'bool', 'str'."""
    accepted: dict[str, tuple[type, ...]] = {
        "int": (int,),
        "float": (int, float),
        "bool": (bool,),
        "str": (str,),
    }
    is_bool = isinstance(value, bool)
    if not isinstance(value, accepted[expected]) or (is_bool and expected != "bool"):
        raise UsageError(f"{key} is {value!r}: it must be of type {expected}")
    if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        raise UsageError(f"{key} is {value!r}, which is not valid UTF-8")


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in value)
        return f'"{escaped}"'
    return repr(value)


def _at_least(name: str, value: float, low: float) -> None:
    if not low <= value < float("inf"):
        raise UsageError(f"{name} is {value}: it must be at least {low}")


def _above(name: str, value: float, low: float) -> None:
    if not low < value < float("inf"):
        raise UsageError(f"{name} is {value}: it must be above {low}")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{name} is {value!r}{nearest(value, allowed)}")
