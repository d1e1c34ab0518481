"""Do in small all that compiles kernels, so that an installation has them before its users do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from distgpt import api
from distgpt.core.components import components
from distgpt.core.config import GRAD_SYNCS, ROUNDED_DTYPES, ModelConfig, TrainConfig
from distgpt.core.cpu.kernels import Bfloat16Kernels, CpuKernels
from distgpt.core.cpu.stages import open_stage
from distgpt.core.data.textfile import read_text, resolve_data
from distgpt.core.generate.engine_setup import rehearse
from distgpt.core.model.model import Architecture, Model
from distgpt.core.saved.opening import open_model
from distgpt.inference.evaluation.evaluate import evaluate
from distgpt.models.quantized.packed import calibrated
from distgpt.models.quantized.rounded import quantize

PRESETS = ("tiny", "tiny-adamw", "sprint", "gpt2", "qwen3-0.6b", "microgpt")  # others have the same parts
# The ways to multiply, and to store or recompute: `auto` is one of the two by the processor.
WAYS: dict[str, tuple[dict[str, Any], ...]] = {
    "float32": ({"matmul": "own"}, {"matmul": "blas", "recompute": "block"}),
    "bfloat16": ({}, {"recompute": "block"}),
}
LONG = 1 << 20  # characters, from which on a tokenizer is compiled
SMALL: dict[str, Any] = {
    "n_layer": 2,
    "n_head": 2,
    "n_kv_head": 1,
    "n_embd": 128,  # wider than a tile
    "head_dim": 0,
    "mlp_width": 0,
    "vocab_size": 0,
    "seq_len": 32,
    "batch_size": 2,
    "steps": 1,
    "warmup": 0,
    "tokenizer": "byte",
}

Part = tuple[str, Callable[[], object]]


def parts(folder: Path) -> Iterator[Part]:
    """Yield what there is to compile and what compiles it; runs are written into the folder."""
    text, chats = folder / "text.txt", folder / "chats.jsonl"
    content = read_text(resolve_data("corpus"))
    text.write_text(content * (LONG // len(content) + 1))
    chats.write_text(json.dumps({"prompt": "Is it?", "completion": "It is."}) + "\n")
    for dtype in WAYS:
        for preset in PRESETS:
            yield f"training {preset} in {dtype}", partial(_train, folder, preset, dtype)
        yield from _tuning(folder, folder / f"tiny-{dtype}", chats, dtype)
        yield f"exchange in {dtype}", partial(_exchange, dtype)
    how = {**SMALL, "data": str(text), "tokenizer": "bpe:300"}
    yield "tokenizing", partial(api.train, "tiny", out=folder / "bpe", **how)
    for dtype in (*WAYS, *ROUNDED_DTYPES):
        yield f"generating text in {dtype}", partial(_generate, folder, dtype)


def _train(folder: Path, preset: str, dtype: str) -> None:
    for number, way in enumerate(WAYS[dtype]):
        out = folder / f"{preset}-{dtype}{f'-{number}' if number else ''}"
        api.train(preset, out=out, data="corpus", val_fraction=0.01, dtype=dtype, **SMALL, **way)


def _exchange(dtype: str) -> None:
    """Compile what ranks call to share a step in any way, as a run does before its first step."""
    config = ModelConfig(vocab_size=64, seq_len=8, n_layer=1, n_head=1, n_embd=32)
    kernels = Bfloat16Kernels(1) if dtype == "bfloat16" else CpuKernels("float32", 1)
    model = Model(Architecture(config), kernels)
    model.allocate_master_weights()
    ways = [TrainConfig(grad_sync=name) for name in GRAD_SYNCS]
    ways += [TrainConfig(reproducible_parts=4), TrainConfig(outer_every=2)]
    for t in ways:
        components().strategy(replace(t, gradient_dtype=dtype), 2).rehearse(model)
        components().strategy(t, 2).rehearse(model)


def _tuning(folder: Path, weights: Path, chats: Path, dtype: str) -> Iterator[Part]:
    how: dict[str, Any] = {"init": str(weights), "data": str(chats), "chats": True, "dtype": dtype}
    how |= {"batch_size": 1, "steps": 1}
    tuned, adapter = folder / f"tuned-{dtype}", folder / f"adapter-{dtype}"
    yield f"tuning in {dtype}", partial(api.train, out=tuned, **how)
    yield f"tuning adapters in {dtype}", partial(api.train, out=adapter, lora_rank=2, **how)


def _generate(folder: Path, dtype: str) -> None:
    """Generate, evaluate, with an adapter too, and make a file of this type."""
    weights, stage = folder / "tiny-float32", open_stage("serial")
    rehearse(open_model(stage, weights, dtype, part=folder / "adapter-float32")[0])
    evaluate(stage, weights, val="corpus", val_tokens=64, dtype=dtype)
    if dtype in ROUNDED_DTYPES:
        done = calibrated(weights, folder / "text.txt") if dtype == "int4" else {}
        made = folder / f"{dtype}.safetensors"
        quantize(weights, made, dtype, done)
        rehearse(open_model(stage, made, dtype)[0])
