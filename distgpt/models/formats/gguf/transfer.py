"""Import and export of GGUF models, tensor by tensor, and GGUF's names of settings and tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distgpt.core.base.caches import cache_folder
from distgpt.core.base.errors import DataError, UsageError, print_lines
from distgpt.core.base.files import storage_errors
from distgpt.core.base.formatting import count
from distgpt.core.config import ModelConfig
from distgpt.core.data.tokenizers import Tokenizer
from distgpt.core.model.layers import rope_frequencies
from distgpt.core.ops.low_precision import BLOCK, BLOCKS
from distgpt.core.saved.checkpoint import WEIGHTS
from distgpt.core.saved.modelfile import read_description
from distgpt.core.saved.rundir import RunDirectory
from distgpt.core.saved.tensors import Kind
from distgpt.core.saved.weights import find_weights, verified
from distgpt.models.adapters import adapters_by_matrix, read_adapter
from distgpt.models.formats.families import FAMILIES, Family, Settings, TensorMapping, family_for, recognised
from distgpt.models.formats.gguf.container import (
    NUMBERS,
    TYPES,
    Array,
    Container,
    Numbers,
    quantised,
    read_container,
    write_container,
)
from distgpt.models.formats.gguf.tokens import metadata_of, tokenizer_of
from distgpt.models.formats.huggingface import (
    Note,
    exportable,
    import_from,
    import_model,
    narrowed,
    our_rows,
    page,
    refuse_place,
)
from distgpt.models.formats.peft import adaptable_layers, joined, pieces_in

# Families whose GGUF name equals their name in transformers. A Mistral is a llama in GGUF.
ARCHITECTURES = {family.model_type: family for family in FAMILIES if family.model_type != "mistral"}
EMBEDDING, OUTPUT, FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
# Our settings and their keys, without the architecture's prefix.
_SHAPE = {
    "seq_len": "context_length",
    "n_embd": "embedding_length",
    "n_layer": "block_count",
    "mlp_width": "feed_forward_length",
    "n_head": "attention.head_count",
}
_HEADS = {"n_kv_head": "attention.head_count_kv", "head_dim": "attention.key_length"}
_EPS = {"norm_eps": "attention.layer_norm_epsilon"}
_RMS_EPS = {"norm_eps": "attention.layer_norm_rms_epsilon"}
_MOST_FACTORS = 1 << 12
LAYOUT = 2  # version of imported files in the cache; 2 keeps Q8_0 and Q4_0
_OLD_CONTEXT = "rope.scaling.original_context_length"
# distgpt's keys for settings that GGUF lacks: zero biases, and the parameters of Llama 3's factors.
_BIAS, _SLOW, _FAST = "distgpt.bias", "distgpt.rope_slow", "distgpt.rope_fast"
_RENAMED = """
    wte=token_embd wpe=position_embd ln_f=output_norm embed_tokens=token_embd norm=output_norm lm_head=output
    ln_1=attn_norm ln_2=ffn_norm attn.c_attn=attn_qkv attn.c_proj=attn_output mlp.c_fc=ffn_up
    mlp.c_proj=ffn_down input_layernorm=attn_norm post_attention_layernorm=ffn_norm self_attn.q_proj=attn_q
    self_attn.k_proj=attn_k self_attn.v_proj=attn_v self_attn.o_proj=attn_output self_attn.q_norm=attn_q_norm
    self_attn.k_norm=attn_k_norm mlp.gate_proj=ffn_gate mlp.up_proj=ffn_up mlp.down_proj=ffn_down
"""
_TENSORS = dict(pair.split("=") for pair in _RENAMED.split())


def named(mapping: TensorMapping) -> str:
    """Return the GGUF name of a tensor."""
    stem, _, kind = mapping.theirs.rpartition(".")
    if layer := re.fullmatch(r"(?:h|layers)\.(\d+)\.(.+)", stem):
        return f"blk.{layer[1]}.{_TENSORS[layer[2]]}.{kind}"
    return f"{_TENSORS[stem]}.{kind}"


def order_of(mapping: TensorMapping, family: Family, config: ModelConfig) -> Array | None:
    """Return, for each row of the GGUF tensor, the index of our row. None: the same order.

    In GGUF, a llama's RoPE rotates adjacent elements; ours rotates the halves of a head.
    """
    if family.model_type != "llama" or not re.search(r"self_attn\.[qk]_proj", mapping.theirs):
        return None
    rows = np.arange(mapping.rows).reshape(-1, 2, config.head_size // 2)
    return rows.swapaxes(1, 2).reshape(-1)


def family_in_gguf(config: ModelConfig, source: object) -> Family:
    """Return the family for exporting our model. Raises a UsageError that names the obstacle."""
    family = family_for(config, source, "GGUF")
    if config.mlp == "relu":
        raise UsageError(f"cannot export {source}: GPT-2 has no ReLU in GGUF")
    if any(config.windows):
        raise UsageError(f"cannot export {source}: llama.cpp ignores attention windows (window)")
    if factors_for(config) is not None and family.model_type != "llama":
        raise UsageError(f"cannot export {source}: in GGUF only Llama supports Llama 3's rope_scaling")
    return family


def metadata_for(family: Family, config: ModelConfig) -> dict[str, Any]:
    """Return the metadata of a model, without its tokenizer."""
    keys = _SHAPE | (_EPS if family.is_gpt2 else _RMS_EPS)
    result: dict[str, Any] = {key: getattr(config, ours) for ours, key in keys.items()}
    result |= {"feed_forward_length": config.hidden, "vocab_size": config.vocab_size}
    result["attention.head_count_kv"] = config.kv_heads
    own: dict[str, Any] = {}
    if family.is_gpt2:
        own = {} if config.bias else {_BIAS: False}
    else:
        sizes = ("attention.key_length", "attention.value_length", "rope.dimension_count")
        result |= dict.fromkeys(sizes, config.head_size) | {"rope.freq_base": config.rope_base}
    if config.positions == "rope" and config.rope_scaling == "linear":
        result |= {"rope.scaling.type": "linear", "rope.scaling.factor": config.rope_factor}
    if factors_for(config) is not None:
        result[_OLD_CONTEXT] = config.rope_context
        own = {_SLOW: config.rope_slow, _FAST: config.rope_fast}
    arch = family.model_type
    return {"general.architecture": arch, **{f"{arch}.{key}": result[key] for key in result}, **own}


def factors_for(config: ModelConfig) -> Array | None:
    """Return Llama 3's divisors of RoPE frequencies, a tensor in GGUF, or None."""
    if config.positions != "rope" or config.rope_scaling != "llama3":
        return None
    plain = rope_frequencies(replace(config, rope_scaling="none"))
    return (plain / rope_frequencies(config)).astype(np.float32)


def model_in(container: Container, tied: bool) -> tuple[Family, ModelConfig]:
    """Return the family and our configuration of the model in a file. Raises a DataError if unsupported."""
    metadata, path = container.metadata, container.path
    if metadata.get("split.count", 1) not in (0, 1):
        raise DataError(f"{path} is one part of a model; merge its files first (llama-gguf-split --merge)")
    if metadata.get("general.type") == "adapter":
        raise DataError(f"{path} is an adapter, not a model; pass the .gguf of its base model")
    arch = metadata.get("general.architecture")
    family = ARCHITECTURES.get(arch) if isinstance(arch, str) else None
    if family is None:
        known = ", ".join(ARCHITECTURES)
        raise DataError(f"{path}: unknown architecture {arch!r:.40}; known: {known}")
    values = _settings(container, family, tied)
    scaling = _scaling(container, family.model_type)
    _, config = recognised(Settings({**values, "rope_scaling": scaling}, str(path)))
    factors = factors_for(config)
    if factors is not None:
        result = next(container.rows(FACTORS))[1].reshape(-1)
        if result.shape != factors.shape or not np.allclose(result, factors, rtol=1e-4):
            raise DataError(f"{path}: {FACTORS} has an unsupported RoPE scaling")
    return family, config


def _settings(container: Container, family: Family, tied: bool) -> dict[str, Any]:
    """Return the metadata as settings of a config.json."""
    metadata, arch = container.metadata, family.model_type
    keys = _SHAPE | (_EPS if family.is_gpt2 else _RMS_EPS)
    result: dict[str, Any] = {ours: metadata.get(f"{arch}.{key}") for ours, key in keys.items()}
    if missing := [keys[ours] for ours, value in result.items() if value is None]:
        raise DataError(f"{container.path} lacks {arch}.{missing[0]}")
    embedding = container.tensors.get(EMBEDDING)
    if embedding is None:
        raise DataError(f"{container.path} has no {EMBEDDING}")
    result["vocab_size"] = embedding.shape[0]
    if family.is_gpt2 and type(result["n_embd"]) is int and result["mlp_width"] == 4 * result["n_embd"]:
        result["mlp_width"] = 0
    if not family.is_gpt2:
        heads = result["n_head"]
        size = result["n_embd"] // heads if type(heads) is int and heads > 0 else 0
        defaults = {"n_kv_head": heads, "head_dim": size}
        result |= {ours: metadata.get(f"{arch}.{key}", defaults[ours]) for ours, key in _HEADS.items()}
        result["rope_base"] = metadata.get(f"{arch}.rope.freq_base", 10_000.0)
    for key, value in result.items():
        if isinstance(value, Numbers):
            raise DataError(f"{container.path}: {key} must be the same for all layers")
    named = {family.keys[ours][0]: value for ours, value in result.items()}
    window = metadata.get(f"{arch}.attention.sliding_window")
    if window and f"{arch}.attention.sliding_window_pattern" in metadata:
        raise DataError(f"{container.path}: distgpt does not support {arch}.attention.sliding_window_pattern")
    kind = "mistral" if arch == "llama" and window else arch
    more = {"sliding_window": window, "use_sliding_window": bool(window), "max_window_layers": 0}
    bias = {"bias": metadata.get(_BIAS, True)} if family.is_gpt2 else {}
    return {"model_type": kind, "tie_word_embeddings": tied, **named, **more, **bias}


def _scaling(container: Container, arch: str) -> Mapping[str, Any]:
    """Return the RoPE scaling in the terms of transformers."""
    metadata, factors = container.metadata, container.tensors.get(FACTORS)
    unnamed = "linear" if f"{arch}.rope.scaling.factor" in metadata else "none"
    kind = metadata.get(f"{arch}.rope.scaling.type", unnamed)
    if factors is None:
        factor = metadata.get(f"{arch}.rope.scaling.factor", 1.0)
        return {} if kind == "none" else {"rope_type": kind, "factor": factor}
    if kind != "none":
        raise DataError(f"{container.path}: {FACTORS} and {arch}.rope.scaling.type cannot be combined")
    if len(factors.shape) != 1 or factors.shape[0] > _MOST_FACTORS:
        raise DataError(f"{container.path}: {FACTORS} has the invalid shape {factors.shape!r:.80}")
    most = max(float(rows.max()) for _, rows in container.rows(FACTORS))
    return {
        "rope_type": "llama3",
        "factor": float(str(np.float32(most))),
        "low_freq_factor": metadata.get(_SLOW, 1.0),
        "high_freq_factor": metadata.get(_FAST, 4.0),
        "original_max_position_embeddings": metadata.get(f"{arch}.{_OLD_CONTEXT}", 8192),
    }


# Types by our names, with their number in general.file_type.
DTYPES = {
    "float32": ("F32", 0),
    "float16": ("F16", 1),
    "bfloat16": ("BF16", 32),
    "q8_0": ("Q8_0", 7),
    "q4_0": ("Q4_0", 2),
}
_POSITIONS = "position_embd.weight"


class GgufModel:
    """A GGUF model that is read by the tensor names of transformers."""

    dtype = "<f4"

    def __init__(self, path: Path) -> None:
        """Check everything except the tensors' data."""
        self.path = path
        self.container = read_container(path)
        tensors = self.container.tensors
        self.family, self.config = model_in(self.container, tied=OUTPUT not in tensors)
        expected = {named(each): each.our_shape for each in self.family.all_mappings(self.config)}
        if (factors := factors_for(self.config)) is not None:
            expected[FACTORS] = factors.shape
        for name in expected | tensors:
            if name not in tensors:
                raise DataError(f"{path} has no tensor {name}, which its model requires")
            if name not in expected:
                raise DataError(f"{path} has a tensor {name!r:.80}, which its model does not have in distgpt")
            if (result := tensors[name].shape) != expected[name]:
                raise DataError(f"{path}: {name} must have the shape {expected[name]}, not {result!r:.80}")

    def stored(self, mappings: list[TensorMapping], shape: tuple[int, ...]) -> Kind:
        """Keep matrices in Q8_0 and Q4_0 as they are, unless one of ours combines different types."""
        kinds = {self.container.tensors[named(mapping)].kind.name for mapping in mappings}
        if len(shape) == 2 and len(kinds) == 1 and (block := BLOCKS.get(kinds.pop())):
            return block, (*shape[:-1], shape[-1] // BLOCK)
        return np.dtype(self.dtype), shape

    def verify(self) -> None:
        """Do nothing, because GGUF has no checksums."""

    def read(self, mapping: TensorMapping, out: NDArray[Any]) -> None:
        """Fill our rows that correspond to this tensor."""
        order = order_of(mapping, self.family, self.config)
        rows = out.reshape(-1, out.shape[-1])
        for first, strip in self.container.rows(named(mapping), bool(out.dtype.names)):
            place = slice(first, first + len(strip))
            rows[place if order is None else order[place]] = strip

    def tokenizer(self) -> Tokenizer | None:
        return tokenizer_of(self.container)


def export_gguf(path: Path, out: Path, dtype: str, note: Note = lambda text: None) -> str:
    """Write a GGUF file and return a summary. Uses little more memory than the largest tensor."""
    path, description, merge = exportable(path, merges=True)
    config = description.run.model
    family = family_in_gguf(config, path)
    refuse_place(out)
    metadata = {**metadata_for(family, config), "general.type": "model", "general.name": path.stem}
    metadata |= {"general.quantization_version": 2, "general.file_type": DTYPES[dtype][1]}
    tokenizer = description.tokenizer
    metadata |= (
        metadata_of(tokenizer, config.vocab_size, path) if tokenizer else {"tokenizer.ggml.model": "no_vocab"}
    )
    header = verified(path)
    mappings = {named(mapping): mapping for mapping in family.all_mappings(config)}
    shapes = {name: mapping.our_shape for name, mapping in mappings.items()}
    kinds = {name: (_kind(name, shape, dtype, config.tied), shape) for name, shape in shapes.items()}
    factors = factors_for(config)
    if factors is not None:
        kinds[FACTORS] = ("F32", factors.shape)

    def pieces(name: str) -> Iterator[NDArray[Any]]:
        if name == FACTORS and factors is not None:
            yield factors
            return
        mapping = mappings[name]
        array, order = our_rows(path, header, mapping, merge), order_of(mapping, family, config)
        yield from _encoded(array if order is None else array[order], kinds[name][0], mapping.ours, path)

    note(f"writing {family.title} with {count(config.n_layer, 'layer')} of width {config.n_embd}")
    write_container(out, metadata, kinds, pieces)
    described = tokenizer.describe() if tokenizer else "none"
    use = f"llama-cli -m {out}, or an Ollama Modelfile with FROM ./{out.name}"
    return page("file", out, described, use)


def export_lora(path: Path, out: Path, dtype: str, note: Note = lambda text: None) -> str:
    """Write an adapter as a GGUF file that llama.cpp applies to the exported model. Return a summary.

    llama.cpp scales by alpha / rank, with one alpha for all tensors. If a tensor combines several adapters,
    it has a larger rank, which b makes up for.
    """
    path = find_weights(path)
    about = read_description(path)
    if about.base is None:
        raise UsageError(f"{path} is a complete model, not an adapter; export it without --adapter")
    config, t = about.run.model, about.run.train
    family = family_in_gguf(config, path)
    refuse_place(out)
    held, ours, tensors = read_adapter(path, about), adapters_by_matrix(about.run), dict[str, Array]()
    for mapping in adaptable_layers(family, about.run):
        if pieces := list(pieces_in(ours, mapping)):
            a, b = joined(held, pieces, mapping.rows)
            if (order := order_of(mapping, family, config)) is not None:
                b = b[order]
            b *= np.float32(len(a) / t.lora_rank)
            for side, array in (("a", a), ("b", b)):
                tensors[f"{named(mapping)}.lora_{side}"] = narrowed(array, dtype, mapping.ours, path)
    metadata: dict[str, Any] = {"general.architecture": family.model_type, "general.name": path.stem}
    metadata |= {"general.type": "adapter", "adapter.type": "lora"}
    metadata["adapter.lora.alpha"] = t.lora_scale * t.lora_rank
    kinds = {name: (DTYPES[dtype][0], array.shape) for name, array in tensors.items()}
    note(f"writing adapters of rank {t.lora_rank} for {family.title}")
    write_container(out, metadata, kinds, lambda name: iter([tensors[name]]))
    base = f"BASE.gguf is the file that was tuned, or an export of {about.base.file}"
    return f"adapter    {out}\nnext       llama-cli -m BASE.gguf --lora {out}, where {base}"


def _kind(name: str, shape: tuple[int, ...], dtype: str, tied: bool) -> str:
    """Return the type of a tensor in a file of this dtype. The output layer needs more than four bits."""
    if len(shape) == 1 or name == _POSITIONS:
        return "F32"
    if dtype.startswith("q") and shape[-1] % 32:
        return "F32"
    is_output = name == OUTPUT or (tied and name == EMBEDDING)
    return "Q8_0" if dtype == "q4_0" and is_output else DTYPES[dtype][0]


def _encoded(array: NDArray[Any], kind: str, name: str, path: Path) -> Iterator[NDArray[Any]]:
    """Yield the tensor in this type, some rows at a time."""
    step = max(1, (1 << 20) // array.shape[-1])
    for first in range(0, len(array), step):
        rows = array[first : first + step]
        if kind not in ("Q8_0", "Q4_0"):
            dtype = next(ours for ours, (theirs, _) in DTYPES.items() if theirs == kind)
            yield narrowed(np.ascontiguousarray(rows), dtype, name, path)
            continue
        blocks = quantised(TYPES[NUMBERS[kind]], rows)
        if not np.isfinite(blocks["d"]).all():
            raise DataError(f"{path}: {name} has values too large for {kind}; use --dtype bfloat16")
        yield blocks


def describe(path: Path) -> dict[str, Any]:
    """Return the facts for `weights info`, except the model."""
    container = read_container(path)
    types = sorted({entry.kind.name for entry in container.tensors.values()})
    name = container.metadata.get("general.architecture")
    result = {"kind": "gguf", "what": f"a {name!s:.40} in GGUF", "types": types, "bytes": path.stat().st_size}
    return {**result, "checksum": "none for the data"}


def import_gguf(path: Path, out: Path, tokenizer: str | None, note: Note = lambda text: None) -> str:
    """Write the weights file `out` from a GGUF model. Uses little more memory than the largest tensor."""
    refuse_place(out)
    return import_from(GgufModel(path), path.name, out, tokenizer, note)


def imported_weights(path: Path) -> Path | None:
    """Return a model's weights file, imported into the user's cache if needed; None if it is one of ours."""
    if RunDirectory(path).config.exists() or (path / WEIGHTS).exists():
        return None
    folder = cache_folder("models")
    if folder is None:
        return None  # the error names the command to import it
    with storage_errors("read", path):
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        states = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = sha256(repr((LAYOUT, path.resolve(), states)).encode()).hexdigest()[:16]
    result = folder / f"{path.stem}-{key}.safetensors"
    if not result.exists():
        note = partial(print_lines, err=True)
        if path.is_dir():
            import_model(str(path), result, None, note)
        else:
            import_gguf(path, result, None, note)
        note(f"stored {path} as {result}; later starts read this file")
    return result
