"""Models for tests of import and export, in all shapes and without a backend."""

import json

import numpy as np
import pytest
from distgpt.core.config import ModelConfig, RunConfig
from distgpt.core.data.tokenizers import load_tokenizer
from distgpt.core.model.model import Architecture
from distgpt.core.saved.modelfile import Description
from distgpt.core.saved.tensors import read_header, read_into, write_tensors
from distgpt.models.formats.huggingface import export_model

MODERN = {"norm": "rmsnorm", "mlp": "swiglu", "positions": "rope", "bias": False}
QWEN3 = {**MODERN, "qk_norm": True, "qk_norm_gain": True}


def shape(vocab_size, seq_len, n_layer, n_head, n_embd, **more):
    sizes = {"vocab_size": vocab_size, "seq_len": seq_len, "n_layer": n_layer, "n_head": n_head}
    return {**sizes, "n_embd": n_embd, **more}


SHAPES = {
    "odd": shape(77, 13, 2, 3, 15, mlp_width=37),
    "one layer, heads of one": shape(64, 1, 1, 6, 6),
    "untied": shape(65, 9, 1, 1, 70, tied=False),
    "no bias": shape(300, 9, 2, 2, 12, bias=False),
    "relu": shape(258, 9, 1, 2, 12, mlp="relu"),
    "eps": shape(257, 9, 1, 2, 12, norm_eps=1e-3),
    "llama": shape(77, 13, 2, 3, 18, **MODERN),
    "llama, grouped": shape(77, 13, 2, 6, 36, n_kv_head=2, rope_base=500.0, **MODERN),
    "llama, one key": shape(77, 13, 1, 3, 18, n_kv_head=1, rope_base=2e6, **MODERN),
    "llama 3": shape(77, 13, 2, 3, 18, n_kv_head=1, rope_scaling="llama3", rope_context=6, rope_fast=3.0, **MODERN),
    "llama, linear": shape(77, 13, 1, 3, 18, rope_scaling="linear", rope_factor=2.5, head_dim=10, **MODERN),
    "qwen 2": shape(77, 13, 2, 6, 36, n_kv_head=2, mlp_width=37, qkv_bias=True, **MODERN),
    "qwen 3": shape(77, 13, 2, 4, 20, n_kv_head=2, head_dim=8, mlp_width=37, **QWEN3),
    "mistral": shape(77, 13, 2, 3, 18, window=4, full_every=0, **MODERN),
    "qwen 3, windows": shape(77, 13, 5, 2, 12, window=3, full_every=2, **QWEN3),
    "llama, odd": shape(259, 9, 1, 5, 10, mlp_width=7, tied=False, norm_eps=1e-3, **MODERN),
}
SMALL = SHAPES["odd"]
# The architectures of --family, whose norms without gain become tensors of ones, and whose embedding is stored
# after its norm.
NO_GAIN = {"norm_gain": False, "bias": False, "tied": False}
OF_RECIPES = {
    "qwen3": shape(77, 13, 2, 2, 32, embed_norm=True, qk_norm=True, mlp_width=96, **{**MODERN, **NO_GAIN}),
    "llama": shape(77, 13, 2, 2, 32, embed_norm=True, mlp_width=96, **{**MODERN, **NO_GAIN}),
    "gpt2": shape(77, 13, 2, 2, 32, **NO_GAIN),
}


def random_model(path, shape, tokenizer="byte", dtype=np.float32):
    config = ModelConfig(**shape)
    draw = np.random.default_rng(5)
    arrays = {}
    for spec in Architecture(config).layout.specs:
        arrays[spec.name] = (0.3 * draw.standard_normal(spec.shape)).astype(dtype)
        if spec.name in ("wte", "head.w"):
            arrays[spec.name][config.vocab_size :] = 0
    own = load_tokenizer(tokenizer, "a b c") if tokenizer and config.vocab_size >= 256 else None
    write_tensors(path, arrays, Description(RunConfig(model=config), own).to_metadata())
    return arrays


def tensors_in(path):
    wide = {"F64": np.float64}
    header = read_header(path)
    arrays = {n: np.empty(e.shape, wide.get(e.dtype, np.float32)) for n, e in header.tensors.items()}
    read_into(path, arrays)
    return arrays


def same(left, right):
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and np.array_equal(left[name], right[name]) for name in left
    )


def change_json(path, **changes):
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def exported_model(directory, shape=SMALL, tokenizer="byte"):
    ours = directory.with_name("ours.safetensors")
    arrays = random_model(ours, shape, tokenizer)
    export_model(ours, directory, "float32")
    return arrays


@pytest.fixture
def exported(tmp_path):
    exported_model(tmp_path / "gpt2")
    return tmp_path / "gpt2"


@pytest.fixture
def llama(tmp_path):
    exported_model(tmp_path / "llama", SHAPES["llama"])
    return tmp_path / "llama"


def rewritten(directory, change):
    path = directory / "model.safetensors"
    tensors = tensors_in(path)
    write_tensors(path, change(tensors) or tensors, {"format": "pt"})


def in_parts(directory, count=3):
    tensors = tensors_in(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    mapping = {name: f"model-{i % count + 1:05}-of-{count:05}.safetensors" for i, name in enumerate(tensors)}
    for file in set(mapping.values()):
        part = {name: tensors[name] for name, where in mapping.items() if where == file}
        write_tensors(directory / file, part, {"format": "pt"})
    write_index(directory, mapping)
    return mapping


def write_index(directory, mapping):
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": mapping}))
