"""Models in GGUF: imported to files of ours and exported, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distgpt.core.base.errors import DataError
from distgpt.core.base.formatting import count
from distgpt.core.data.tokenizers import Tokenizer
from distgpt.core.saved.tensors import read_header, read_rows, verify_data
from distgpt.models.formats.families import TensorMapping
from distgpt.models.formats.gguf.blocks import NUMBERS, TYPES, quantised
from distgpt.models.formats.gguf.container import Container, read_container, write_container
from distgpt.models.formats.gguf.names import (
    EMBEDDING,
    FACTORS,
    OUTPUT,
    factors_for,
    family_in_gguf,
    metadata_for,
    model_in,
    named,
    order_of,
    shape_of,
)
from distgpt.models.formats.gguf.tokens import metadata_of, tokenizer_of
from distgpt.models.formats.huggingface import (
    Note,
    exportable,
    import_from,
    narrowed,
    page,
    refuse_nonfinite,
    refuse_place,
)

# Types by our names, with the number that stands for a file of them (general.file_type).
DTYPES = {
    "float32": ("F32", 0),
    "float16": ("F16", 1),
    "bfloat16": ("BF16", 32),
    "q8_0": ("Q8_0", 7),
    "q4_0": ("Q4_0", 2),
}
_POSITIONS = "position_embd.weight"
_WIDEST = 1 << 17  # elements of a row that is read before its shape is compared with the model's


class GgufModel:
    """A model in GGUF, read by the names that transformers has for its tensors."""

    dtype = "<f4"

    def __init__(self, path: Path) -> None:
        """Check everything but the tensors' data; a DataError says what is wrong."""
        self.path = path
        self.container = read_container(path)
        tensors = self.container.tensors
        self.has_spare_head = OUTPUT in tensors and _alike(self.container, OUTPUT, EMBEDDING)
        self.family, self.config = model_in(self.container, OUTPUT not in tensors or self.has_spare_head)
        expected = {named(each): shape_of(each) for each in self.family.all_mappings(self.config)}
        expected |= {OUTPUT: expected[EMBEDDING]} if self.has_spare_head else {}
        if (factors := factors_for(self.config)) is not None:
            expected[FACTORS] = factors.shape
        _refuse_others({name: entry.shape for name, entry in tensors.items()}, expected, path)

    def verify(self) -> None:
        """GGUF has no checksums. Where a configuration says so, biases must be zeros."""
        for tensor in self.family.all_mappings(self.config):
            if not tensor.ours and any(rows.any() for _, rows in self.container.rows(named(tensor))):
                raise DataError(f"{self.path}: {named(tensor)} is not zero, but its model has no bias")

    def read(self, mapping: TensorMapping, out: NDArray[Any]) -> None:
        """Fill our rows that correspond to this tensor."""
        order = order_of(mapping, self.family, self.config)
        rows = out.reshape(-1, shape_of(mapping)[-1])
        for first, strip in self.container.rows(named(mapping)):
            place = slice(first, first + len(strip))
            rows[place if order is None else order[place]] = strip

    def tokenizer(self) -> Tokenizer | None:
        return tokenizer_of(self.container)


def _alike(container: Container, left: str, right: str) -> bool:
    """Return if two tensors are the same to the bit, as where a tied output layer is stored twice."""
    one, other = container.tensors[left], container.tensors.get(right)
    if other is None or (one.kind, one.shape) != (other.kind, other.shape) or one.shape[-1] > _WIDEST:
        return False
    pairs = zip(container.rows(left), container.rows(right), strict=True)
    return all(np.array_equal(a, b) for (_, a), (_, b) in pairs)


def _refuse_others(
    found: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]], path: Path
) -> None:
    for name in expected | found:
        if name not in found:
            raise DataError(f"{path} has no tensor {name}, which its model needs")
        if name not in expected:
            raise DataError(f"{path} has a tensor {name!r:.80}, which its model does not have in distgpt")
        if found[name] != expected[name]:
            raise DataError(f"{path}: {name} is {found[name]!r:.80}, not {expected[name]}")


def export_gguf(path: Path, out: Path, dtype: str, note: Note = lambda text: None) -> str:
    """Write a file of GGUF. Holds little more than one tensor. Return what was written, for people."""
    path, description = exportable(path)
    config = description.run.model
    family = family_in_gguf(config, path)
    refuse_place(out)
    metadata = {**metadata_for(family, config), "general.type": "model", "general.name": path.stem}
    metadata |= {"general.quantization_version": 2, "general.file_type": DTYPES[dtype][1]}
    tokenizer = description.tokenizer
    metadata |= (
        metadata_of(tokenizer, config.vocab_size, path) if tokenizer else {"tokenizer.ggml.model": "no_vocab"}
    )
    header = read_header(path)
    verify_data(path, header)
    mappings = {named(mapping): mapping for mapping in family.all_mappings(config)}
    kinds = {
        name: (_kind(name, shape_of(m), dtype, config.tied), shape_of(m)) for name, m in mappings.items()
    }
    factors = factors_for(config)
    if factors is not None:
        kinds[FACTORS] = ("F32", factors.shape)

    def pieces(name: str) -> Iterator[NDArray[Any]]:
        if name == FACTORS and factors is not None:
            yield factors
            return
        mapping, (kind, shape) = mappings[name], kinds[name]
        array = np.zeros(shape, "<f4")
        if mapping.ours:
            read_rows(path, header, mapping.ours, array, mapping.first)
        refuse_nonfinite(array, mapping.ours, path)
        order = order_of(mapping, family, config)
        yield from _encoded(array if order is None else array[order], kind, mapping.ours, path)

    note(f"writing {family.title} with {count(config.n_layer, 'layer')} of width {config.n_embd}")
    wide = [name for name, (kind, shape) in kinds.items() if kind == "F32" and len(shape) > 1]
    if dtype.startswith("q") and (others := [name for name in wide if name != _POSITIONS]):
        note(f"{len(others)} of the matrices in float32, as their rows are no multiple of 32")
    write_container(out, metadata, kinds, pieces)
    described = tokenizer.describe() if tokenizer else "none"
    use = f"llama-cli -m {out}, or a Modelfile for Ollama that says FROM ./{out.name}"
    return page("file", out, described, use)


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
            raise DataError(f"{path}: {name} holds values too large for {kind}; use --dtype bfloat16")
        yield blocks


def describe(path: Path) -> dict[str, Any]:
    """Return the facts of `weights info` about a file of GGUF, besides the model."""
    container = read_container(path)
    types = sorted({entry.kind.name for entry in container.tensors.values()})
    name = container.metadata.get("general.architecture")
    found = {"kind": "gguf", "what": f"a {name!s:.40} in GGUF", "types": types, "bytes": path.stat().st_size}
    return {**found, "checksum": "none to verify the data by"}


def import_gguf(path: Path, out: Path, tokenizer: str | None, note: Note = lambda text: None) -> str:
    """Write `out`, a weights file, from a model in GGUF. Holds little more than one tensor."""
    refuse_place(out)
    return import_from(GgufModel(path), path.name, out, tokenizer, note)
