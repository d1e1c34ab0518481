"""Which settings have an option, how it is spelled, and what the reference says of each setting."""

from __future__ import annotations

import json

from distgpt.core.config import BATCH_IN_TOKENS, BATCH_TOKENS, SETTINGS, RunConfig, Setting

# The settings that have an option, in the order of --help. The others are set by --set, TOML and presets.
OPTIONS = (
    *("data", "tokenizer", "init", "lora_rank"),
    *("steps", "batch_size", BATCH_TOKENS, "seq_len", "grad_accum", "pack"),
    *("optimizer", "lr", "schedule", "warmup", "weight_decay", "clip", "seed", "dtype"),
    *("vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd", "norm", "mlp"),
    *("positions", "window", "bias", "tied"),
    *("grad_sync", "gradient_dtype", "outer_every"),
    *("reproducible_parts", "balance", "recompute"),
    *("save_every", "save", "keep", "keep_every", "on_bad_step"),
    *("sample_every", "eval_every", "val", "val_fraction", "val_tokens", "hellaswag"),
)
KNOWN = {**SETTINGS, BATCH_TOKENS: BATCH_IN_TOKENS}
GRAPHS = "cuda_graph"  # what --set calls the field `graphs` of GpuConfig


def spelled(name: str, about: Setting) -> str:
    """Return the option's flag, as --seq-len; for a switch both, as --bias/--no-bias."""
    return about.flag or "--" + name.replace("_", "-")


def setting_text(name: str) -> str:
    """Return a setting's help, its values, its default, and how it is set, for the reference."""
    about, run = SETTINGS[name], RunConfig()
    default = getattr(run.model if hasattr(run.model, name) else run.train, name)
    signs = (("≥", about.low), (">", about.above), ("≤", about.most), ("<", about.below))
    bounds = [f"{sign} {limit:,}" for sign, limit in signs if limit is not None]
    choices = [*filter(None, [about.undecided]), *about.allowed]
    facts = [
        " or ".join(choices) or " ".join([about.kind.__name__, ", ".join(bounds)]).strip(),
        f"default {json.dumps(about.undecided or default)}",  # as TOML writes it
        *(["may change on resume"] if about.changeable else []),
        f"`{spelled(name, about)}`" if name in OPTIONS else f"`--set {name}=…`",
    ]
    return f"{about.help} *{'; '.join(facts)}*"
