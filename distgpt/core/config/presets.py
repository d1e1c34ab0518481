"""Presets: published models and workloads, as differences from the defaults."""

from __future__ import annotations

from collections.abc import Mapping

from distgpt.core.base.errors import UsageError, did_you_mean
from distgpt.core.config.run_config import RunConfig, layered
from distgpt.core.config.setting import Value, Values
from distgpt.core.config.settings import BATCH_TOKENS

DEFAULT_PRESET = "tiny"

_GPT2_RECIPE: Values = {
    "vocab_size": 50257,
    "seq_len": 1024,
    BATCH_TOKENS: 1 << 19,
    "steps": 19073,
    "lr": 6e-4,
    "min_lr": 6e-5,
    "schedule": "cosine",
    "warmup": 715,
    "weight_decay": 0.1,
    "tokenizer": "gpt2",
    "eval_every": 250,
    "val_tokens": 20 << 16,
    "sample_every": 250,
}


def _gpt2(n_layer: int, n_head: int, n_embd: int, **more: Value) -> Values:
    return {**_GPT2_RECIPE, "n_layer": n_layer, "n_head": n_head, "n_embd": n_embd, **more}


_LLAMA: Values = {
    "positions": "rope",
    "norm": "rmsnorm",
    "mlp": "swiglu",
    "bias": False,
    "seq_len": 2048,
    "tokenizer": "auto",
}


def _llama(n_layer: int, n_head: int, n_kv_head: int, n_embd: int, **more: Value) -> Values:
    """Return a published architecture with GPT-2's recipe and a shorter context."""
    return _gpt2(n_layer, n_head, n_embd, n_kv_head=n_kv_head, **{**_LLAMA, **more})


def _microgpt(n_layer: int, n_embd: int, seq_len: int, n_head: int) -> Values:
    return {
        "n_layer": n_layer,
        "n_embd": n_embd,
        "seq_len": seq_len,
        "n_head": n_head,
        "norm": "rmsnorm",
        "norm_gain": False,
        "embed_norm": True,
        "final_norm": False,
        "mlp": "relu",
        "bias": False,
        "tied": False,
        "vocab_size": 27,
        "vocab_multiple": 1,
        "init_std": 0.08,
        "init_residual": False,
        "data": "names",
        "tokenizer": "char",
        "steps": 1000,
        "batch_size": 16,
        "lr": 0.01,
        "schedule": "linear",
        "warmup": 0,
        "weight_decay": 0.0,
        "clip": 0.0,
        "beta1": 0.85,
        "beta2": 0.99,
    }


# The recipe with the fastest convergence (docs/explanation/learning.md). `lr` is for the layers' matrices.
_FAST: Values = {
    "norm": "rmsnorm",
    "norm_gain": False,
    "embed_norm": True,
    "mlp": "relu2",
    "positions": "rope",
    "qk_norm": True,
    "value_embeddings": True,
    "previous_embedding": True,
    "bias": False,
    "tied": False,
    "init_weights": "unit",
    "optimizer": "muon",
    "lr": 0.03,
    "embedding_lr": 0.3,
    "head_lr": 0.008,
    "vector_lr": 0.01,
    "schedule": "wsd",
    "warmup": 40,
    "weight_decay": 0.28,
    "clip": 0.0,
    "beta1": 0.8,
    "eps": 1e-10,
}

# Initial weights from token bigrams, and their learning rates, for short runs.
_FROM_PAIRS: Values = {
    "init_weights": "bigrams",
    "lr": 0.04,
    "embedding_lr": 0.02,
    "value_lr": 0.1,
    "head_lr": 0.0007,
}

# Choices of --family, as differences from the architecture of `fast`. Its norms without gain and its norm of
# the embedding can be exported as tensors.
_FAST_LLAMA: Values = {"mlp": "swiglu", "value_embeddings": False, "previous_embedding": False, "window": 0}
FAMILIES: dict[str, Values] = {
    "qwen3": _FAST_LLAMA,
    "llama": {**_FAST_LLAMA, "qk_norm": False},
    "gpt2": {
        **_FAST_LLAMA,
        "norm": "layernorm",
        "mlp": "gelu",
        "positions": "learned",
        "embed_norm": False,
        "qk_norm": False,
    },
}

# A size for minutes on a CPU.
_FOUR_LAYERS: Values = {
    "n_layer": 4,
    "n_head": 4,
    "n_embd": 256,
    "seq_len": 512,
    BATCH_TOKENS: 1 << 12,
}

_STUDY = {
    "S": (1, 64, 128, 4),
    "M": (2, 128, 128, 8),
    "L": (4, 256, 256, 8),
    "VL": (6, 384, 512, 12),
    "XL": (8, 512, 512, 16),
}

# A model this small allows a higher learning rate than `fast`. It reads short texts many times, which an
# embedding of the previous token memorizes.
_TINY: Values = {**_FAST, "lr": 0.05, "previous_embedding": False}

# Published models and workloads, as differences from the defaults.
PRESETS: dict[str, Values] = {
    # Trains on a short text within a minute.
    "tiny": _TINY,
    # A first model: `tiny` learns to write short tales within a minute.
    "tales": {**_TINY, "data": "tales", "tokenizer": "bpe:1024", "val_fraction": 0.05},
    # The same size with AdamW. With a shorter warm-up, gradient norms reached 17 to 75 on other corpora.
    "tiny-adamw": {
        "positions": "rope",
        "norm": "rmsnorm",
        "mlp": "swiglu",
        "bias": False,
        "steps": 1000,
        "warmup": 120,
    },
    # The recipe with the fastest convergence, and its variant for up to about two million tokens.
    "fast": {**_FAST, **_FOUR_LAYERS, "window": 128, "steps": 1000},
    "sprint": {**_FAST, **_FROM_PAIRS, **_FOUR_LAYERS, "steps": 330},
    "gpt-mini": {
        "n_layer": 6,
        "n_head": 6,
        "n_embd": 384,
        "seq_len": 256,
        "tied": False,
        "data": "story",
        "tokenizer": "word",
        "shift_windows": False,
        "steps": 50,
        "batch_size": 16,
        "lr": 3e-4,
        "schedule": "linear",
        "warmup": 0,
        "weight_decay": 0.0,
        "clip": 1.0,
    },
    "gpt2": _gpt2(12, 12, 768),
    # The larger the model, the lower its learning rate, as published for GPT-3 at these sizes.
    "gpt2-medium": _gpt2(24, 16, 1024, lr=3e-4, min_lr=3e-5),
    "gpt2-large": _gpt2(36, 20, 1280, lr=2.5e-4, min_lr=2.5e-5),
    "gpt2-xl": _gpt2(48, 25, 1600, lr=2e-4, min_lr=2e-5),
    "gpt2-modern": _gpt2(12, 12, 768, positions="rope", norm="rmsnorm", mlp="swiglu", bias=False),
    "gpt2-fast": _gpt2(12, 12, 768, **_FAST, window=256),
    "smollm2-135m": _llama(30, 9, 3, 576, vocab_size=49152, mlp_width=1536, rope_base=1e5),
    "smollm2-360m": _llama(
        32, 15, 5, 960, vocab_size=49152, mlp_width=2560, rope_base=1e5, lr=3e-4, min_lr=3e-5
    ),
    "qwen3-0.6b": {
        **_llama(28, 16, 8, 1024, vocab_size=151936, mlp_width=3072, rope_base=1e6, lr=2.5e-4, min_lr=2.5e-5),
        "head_dim": 128,
        "qk_norm": True,
        "qk_norm_gain": True,
        "norm_eps": 1e-6,
    },
    "llama3.2-1b": {
        **_llama(16, 32, 8, 2048, vocab_size=128256, mlp_width=8192, rope_base=5e5, lr=2e-4, min_lr=2e-5),
        "rope_scaling": "llama3",
        "rope_factor": 32.0,
    },
    "microgpt": _microgpt(1, 16, 16, 4),
    **{name: _microgpt(*shape) for name, shape in _STUDY.items()},
    **{f"M{name}5": _microgpt(n, c, 512, h) for name, (n, c, _, h) in _STUDY.items()},
}


def preset(name: str, *changes: Mapping[str, object]) -> RunConfig:
    """Return a preset's full configuration, with changes applied in order.

    `batch_tokens` is `batch_size` in tokens; the later of the two overrides the other.
    """
    return layered(RunConfig(), base_preset(name), *changes)


def base_preset(name: str) -> Values:
    if name not in PRESETS:
        raise UsageError(f"unknown preset {name!r:.80}{did_you_mean(name[:80], PRESETS)}")
    return PRESETS[name]
