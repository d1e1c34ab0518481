"""How hard a text is to predict, before anything is trained on it: by how well zlib packs samples of it."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

from distgpt.corpora.prepare.documents import FIELD, TEXT, Input, Offset, find_inputs, opened, parts, pieces
from distgpt.corpora.shards import ShardTokens, is_shards, read_manifest, shards_tokenizer
from distgpt.recipes.scaling import bytes_per_token

SAMPLES, SAMPLE = 16, 1 << 16  # number and bytes; zlib looks back no further than half of one
PACKED_REFERENCE = 2.73  # bits per byte that zlib needs for the text of the laws, less 2 %: see below
# Models differ less between texts than zlib: both constants fit five texts (docs/explanation/learning.md)
EXPONENT = 0.75
LEAST, MOST = 0.5, 1.7  # what was seen of real texts, and a little more; a few bytes pack to anything


def difficulty(path: Path) -> float:
    """Return by what factor a model needs more bits per byte here than on the laws' own text."""
    samples = list(_of_shards(path) if is_shards(path) else _of_files(find_inputs((path,))))
    size = sum(map(len, samples))
    if not size:
        return 1.0
    packed = 8 * sum(len(zlib.compress(each, 9)) for each in samples) / size
    return min(MOST, max(LEAST, float((packed / PACKED_REFERENCE) ** EXPONENT)))


def _of_files(inputs: list[Input]) -> Iterator[bytes]:
    """Yield samples from places all over the files."""
    chosen = inputs[:: -(-len(inputs) // SAMPLES)]
    each = -(-SAMPLES // len(chosen))
    for source in chosen:
        if source.kind == TEXT and not source.compressed:
            yield from _of_text(source, each)
        elif piece := next(pieces([source], FIELD, Offset()), None):
            text = "".join(part for part, _ in parts(piece, FIELD)).encode()
            yield from (text[start : start + SAMPLE] for start in range(0, len(text), SAMPLE)[:each])


def _of_text(source: Input, count: int) -> Iterator[bytes]:
    apart = max(SAMPLE, source.bytes // count)
    for start in range(0, source.bytes, apart):
        with opened(source, start) as (stream, _):
            yield stream.read(SAMPLE)


def _of_shards(folder: Path) -> Iterator[bytes]:
    manifest = read_manifest(folder)
    tokenizer, tokens = shards_tokenizer(folder, manifest), ShardTokens(folder, manifest, "train")
    length = int(SAMPLE / bytes_per_token(manifest.vocab_size))
    for start in range(0, len(tokens), max(length, len(tokens) // SAMPLES)):
        yield tokenizer.decode(tokens.read(start, min(start + length, len(tokens)))).encode()
