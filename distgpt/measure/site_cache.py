"""Runs everything that compiles kernels on small models, to fill an installation's cache for all its users.

`distgpt compile` does this. It requires write access to the package.
"""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from distgpt import api
from distgpt.core.base.errors import StorageError
from distgpt.core.base.files import atomic_file, storage_errors
from distgpt.core.components import components
from distgpt.core.config import GRAD_SYNCS, QUANTIZED_DTYPES, ModelConfig, TrainConfig
from distgpt.core.cpu.compiling import disk_cache
from distgpt.core.cpu.kernels import Bfloat16Kernels, CpuKernels
from distgpt.core.cpu.stages import open_stage
from distgpt.core.data.textfile import read_text, resolve_data
from distgpt.core.generate.engine_setup import warmup_pass
from distgpt.core.model.model import Architecture, Model
from distgpt.core.saved.modelfile import open_model
from distgpt.inference.evaluation.evaluate import evaluate
from distgpt.models.quantized.packed import calibrated
from distgpt.models.quantized.rounded import quantize

PRESETS = ("tiny", "tiny-adamw", "sprint", "gpt2", "qwen3-0.6b", "microgpt")  # the rest adds no kernels
# The matmul implementations, and storing or recomputing activations. `auto` picks one by processor.
WAYS: dict[str, tuple[dict[str, Any], ...]] = {
    "float32": ({"matmul": "own"}, {"matmul": "blas", "recompute": "block"}),
    "bfloat16": ({}, {"recompute": "block"}),
}
LONG = 1 << 20  # characters; from this length on, the tokenizer is compiled
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
    """Yield names of parts to compile and functions that compile them; runs are written to the directory."""
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
    for dtype in (*WAYS, *QUANTIZED_DTYPES):
        yield f"generating text in {dtype}", partial(_generate, folder, dtype)


def _train(folder: Path, preset: str, dtype: str) -> None:
    for number, way in enumerate(WAYS[dtype]):
        out = folder / f"{preset}-{dtype}{f'-{number}' if number else ''}"
        api.train(preset, out=out, data="corpus", val_fraction=0.01, dtype=dtype, **SMALL, **way)


def _exchange(dtype: str) -> None:
    """Compile what ranks call to share a step with each strategy, as a run does before its first step."""
    config = ModelConfig(vocab_size=64, seq_len=8, n_layer=1, n_head=1, n_embd=32)
    kernels = Bfloat16Kernels(1) if dtype == "bfloat16" else CpuKernels("float32", 1)
    model = Model(Architecture(config), kernels)
    model.allocate_master_weights()
    ways = [TrainConfig(grad_sync=name) for name in GRAD_SYNCS]
    ways += [TrainConfig(reproducible_parts=4), TrainConfig(outer_every=2)]
    for t in ways:
        components().strategy(replace(t, gradient_dtype=dtype), 2).warmup_pass(model)
        components().strategy(t, 2).warmup_pass(model)


def _tuning(folder: Path, weights: Path, chats: Path, dtype: str) -> Iterator[Part]:
    how: dict[str, Any] = {"init": str(weights), "data": str(chats), "chats": True, "dtype": dtype}
    how |= {"batch_size": 1, "steps": 1}
    tuned, adapter = folder / f"tuned-{dtype}", folder / f"adapter-{dtype}"
    yield f"tuning in {dtype}", partial(api.train, out=tuned, **how)
    yield f"tuning adapters in {dtype}", partial(api.train, out=adapter, lora_rank=2, **how)
    for base in QUANTIZED_DTYPES:
        above = partial(api.train, out=folder / f"above-{base}-{dtype}", lora_rank=2, lora_base=base, **how)
        yield f"tuning adapters of {base} in {dtype}", above


def _generate(folder: Path, dtype: str) -> None:
    """Generate and evaluate, also with an adapter, and write a file of this type."""
    weights, stage = folder / "tiny-float32", open_stage("serial")
    warmup_pass(open_model(stage, weights, dtype, part=folder / "adapter-float32")[0])
    evaluate(stage, weights, val="corpus", val_tokens=64, dtype=dtype)
    if dtype in QUANTIZED_DTYPES:
        done = calibrated(weights, folder / "text.txt") if dtype == "int4" else {}
        made = folder / f"{dtype}.safetensors"
        quantize(weights, made, dtype, done)
        warmup_pass(open_model(stage, made, dtype)[0])


# The site's file of loops, which disk_cache.py reads


def require_writable() -> None:
    """Create the directory, readable for all. Raise an error if this user may not write there."""
    folder, package = disk_cache.SITE, disk_cache.PACKAGE
    try:
        if os.geteuid() not in {0, package.stat().st_uid}:  # other users would not trust its files
            raise StorageError(f"cannot write {folder}: {package} belongs to another user")
        with storage_errors("write", folder):
            folder.mkdir(exist_ok=True)
            folder.chmod(0o755)
    except StorageError as error:
        raise StorageError(f"{error}; run this as the owner of {package}") from None


def share() -> Path:
    """Move all loops that this process used to the site's cache. Return the path of its file."""
    disk_cache.site.cache_clear()  # another process may have written it
    used = sorted(disk_cache.used)
    files = {name: content for name in used if (content := disk_cache.read(name)) is not None}
    if len(files) < len(used):
        raise StorageError(f"cannot cache compiled loops in {disk_cache.folder()}; check the free disk space")
    files = {**disk_cache.site(), **files}
    path, content = disk_cache.site_path(), pickle.dumps(files)
    with atomic_file(path) as file:
        os.fchmod(file.fileno(), 0o644)
        file.write(disk_cache.site_digest(path, content) + content)
    kind = re.escape(path.name.rpartition("-")[0])
    for other in disk_cache.SITE.glob("*.loops"):  # other versions' files for this kind of processor
        if other != path and re.fullmatch(rf"{kind}-[0-9a-f]{{16}}\.loops", other.name):
            other.unlink(missing_ok=True)
    disk_cache.site.cache_clear()
    if disk_cache.site().keys() != files.keys():
        raise StorageError(f"{path} cannot be read back, or other users can write to its directory")
    if own := disk_cache.folder():
        for name in files:
            (own / name).unlink(missing_ok=True)
    return path
