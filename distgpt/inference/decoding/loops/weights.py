"""A model's weights, packed once in panels for the decoder; all layers of a matrix share an array.

Neutral values replace the parts that an architecture lacks: gains of 1, biases of 0, positions of 0. So one
compiled decoder serves all architectures. Checksums detect weights that changed since they were packed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from distgpt.core.config import ModelConfig
from distgpt.core.cpu.compiling.jit import jit
from distgpt.core.cpu.matmul.packing import COLUMNS, aligned, pack_transposed
from distgpt.core.cpu.pool import Pool
from distgpt.core.model.memory import PREVIOUS
from distgpt.core.ops.api import Angles, Array
from distgpt.core.ops.low_precision import BITS, from_bfloat16
from distgpt.inference.decoding.loops.operands import UNIT


class Layer(NamedTuple):
    """A linear layer of every block: w (layers, panels, elements of a panel), bias (layers, columns).

    `inputs`, int64 (panels, 2): the range of inputs of each panel. All others have weight 0.
    """

    w: Array
    bias: Array
    inputs: Array


class Weights(NamedTuple):
    """Packed weights. `gates` multiplies a gated activation's output; without gates, it has no panels."""

    qkv: Layer
    out: Layer
    gates: Layer
    fc: Layer
    proj: Layer
    norms: Array  # (2 layers + 2, 2, C): gain and bias; the last two are embedding norm and final norm
    head_gains: Array  # (2, layers, head): gains of queries and keys; 0 layers if there are none
    head: Array  # (panels, elements of a panel)
    head_inputs: Array  # like Layer.inputs
    embedding: Array  # like head, and the same memory if they are tied
    previous: Array  # embedding of previous tokens, without panels if there is none
    values: Array  # value embeddings of the layers that have them, as Layer.w
    windows: Array  # int64 (layers,), window of attention; T if unlimited
    places: Array  # (T, C), or zeros (1, C)
    cos: Array  # (T, head / 2), or (1, 0)
    sin: Array


class Form:
    """A matrix (rows, k) that can pack itself; this one is float32, or bfloat16 as uint16."""

    def __init__(self, w: Any) -> None:
        self._w = w

    def nonzero(self) -> Array:
        """Return which elements are not 0."""
        result: Array = self._w != 0
        return result

    def panels(self, count: int, columns: int) -> Array:
        """Allocate `count` matrices like this one, with `columns` of its rows, padded."""
        pair = 2 if self._w.dtype == BITS else 1
        shape = count, columns // COLUMNS, -(-self._w.shape[1] // pair) * pair * COLUMNS
        return aligned(shape, self._w.dtype.name)

    def pack(self, panels: Array, first: int, last: int) -> None:
        """Panels ← rows first … last of this matrix."""
        pack_transposed(0, last - first, panels, self._w[first:last], 0, self._w.shape[1])


Forms = Mapping[type, type[Form]]
FLOATS: Forms = {np.ndarray: Form}


def packed_weights(
    config: ModelConfig, params: Mapping[str, Array], angles: Angles | None, forms: Forms = FLOATS
) -> Weights:
    """Pack parameters; `forms` specifies how to pack each type of matrix.

    Each parameter is read when it is packed, the largest first, so that they are not all in memory.
    """
    c, vocab, gated = config.n_embd, config.vocab_size, config.gated
    block = [f"blocks.{i}" for i in range(config.n_layer)]
    packed = partial(_packed, forms)

    def matrix(name: str, rows: int) -> Any:
        return packed([params[name]], 1, [rows])[0][0]

    def layers(name: str, k: int, *rows: int, heights: Sequence[int] = ()) -> list[Layer]:
        """Pack a matrix of each block with k columns, split by rows into layers. `heights`: of q, k and v."""
        names, groups, heights = [f"{each}.{name}.w" for each in block], config.norm_groups, heights or rows
        if groups > 1:  # an ensemble, unless it was trained further
            group = _group_of_rows(groups, heights)
            others = group[:, None] != np.arange(k) * groups // k
            if any((forms[type(w)](w).nonzero() & others).any() for w in (params[each] for each in names)):
                groups = 1
        ws, inputs = packed((params[each] for each in names), len(block), rows), _inputs(groups, k, heights)
        bias = np.zeros((len(block), sum(rows)), np.float32)
        for to, each in zip(bias, block, strict=True):
            if f"{each}.{name}.b" in params:
                to[:] = wide(params[f"{each}.{name}.b"])
        ends = np.cumsum(rows)
        parts = [bias[:, end - count : end] for end, count in zip(ends, rows, strict=True)]
        padded = [np.pad(part, ((0, 0), (0, _up(part.shape[1]) - part.shape[1]))) for part in parts]
        return [Layer(w, b, inputs) for w, b in zip(ws, padded, strict=True)]

    head = matrix("wte" if config.tied else "head.w", vocab)
    embedding = head if config.tied else matrix("wte", vocab)
    q, kv = config.attention_width, config.kv_heads * config.head_size
    fc, *gates = layers("mlp.fc", c, *[config.hidden] * (2 if gated else 1))
    (qkv,) = layers("attn.qkv", c, config.qkv_width, heights=(q, kv, kv))
    (out,) = layers("attn.proj", q, c)
    (proj,) = layers("mlp.proj", config.hidden, c)
    return Weights(
        qkv=qkv,
        out=out,
        gates=gates[0] if gated else Layer(fc.w[:, :0], fc.bias[:, :0], fc.inputs),
        fc=fc,
        proj=proj,
        norms=_norms(config, params, block),
        head_gains=_head_gains(config, params, block),
        head=head,
        head_inputs=_inputs(1, c, [vocab]),
        embedding=embedding,
        previous=matrix(PREVIOUS, vocab) if config.previous_embedding else head[:0],
        values=_values(config, params, packed) if config.value_layers else head[None][:0],
        windows=np.array([window or config.seq_len for window in config.windows], np.int64),
        places=wide(params["wpe"]) if "wpe" in params else np.zeros((1, c), np.float32),
        cos=np.zeros((1, 0), np.float32) if angles is None else angles.cos,
        sin=np.zeros((1, 0), np.float32) if angles is None else angles.sin,
    )


def _group_of_rows(groups: int, heights: Sequence[int]) -> Array:
    """Return the group of each row of matrices with these heights."""
    return np.concatenate([np.arange(height) * groups // height for height in heights])


def _inputs(groups: int, k: int, heights: Sequence[int]) -> Array:
    """Return `Layer.inputs` of matrices with these heights and k inputs, in whole units."""
    group = _group_of_rows(groups, heights)
    first = np.arange(0, len(group), COLUMNS)
    low = np.minimum.reduceat(group, first) * k // groups // UNIT * UNIT
    high = -(-(np.maximum.reduceat(group, first) + 1) * k // groups // UNIT) * UNIT
    return np.stack([low, np.minimum(high, k)], axis=1)


def _values(config: ModelConfig, params: Mapping[str, Array], packed: Callable[..., list[Array]]) -> Array:
    values = (params[f"blocks.{i}.values.w"] for i in config.value_layers)
    return packed(values, len(config.value_layers), [config.vocab_size])[0]


def wide(x: Array) -> Array:
    return from_bfloat16(x) if x.dtype == BITS else np.asarray(x, np.float32)


def _up(columns: int) -> int:
    return -(-columns // UNIT) * UNIT


def _packed(forms: Forms, ws: Iterable[Any], count: int, parts: Sequence[int]) -> list[Array]:
    """Split `count` matrices (columns, k) of the same shape by rows; return a packed array for each part.

    They are transposed, in panels of COLUMNS columns, k by k.
    """
    result: list[Array] = []
    for i, w in enumerate(forms[type(w)](w) for w in ws):
        first = 0
        for part, rows in enumerate(parts):
            if i == 0:
                result.append(w.panels(count, _up(rows)))
            w.pack(result[part][i], first, first + rows)
            first += rows
    return result


def _norms(config: ModelConfig, params: Mapping[str, Array], block: list[str]) -> Array:
    names = [f"{each}.{norm}" for each in block for norm in ("norm1", "norm2")]
    norms: Array = np.zeros((len(names) + 2, 2, config.n_embd), np.float32)
    norms[:, 0] = 1
    for to, name in zip(norms, [*names, "embed_norm", "final_norm"], strict=True):
        for row, kind in zip(to, "wb", strict=True):
            if f"{name}.{kind}" in params:
                row[:] = wide(params[f"{name}.{kind}"])
    return norms


def _head_gains(config: ModelConfig, params: Mapping[str, Array], block: list[str]) -> Array:
    gains: Array = np.zeros((2, len(block) * config.qk_norm_gain, config.head_size), np.float32)
    for i in range(gains.shape[1]):
        gains[:, i] = wide(params[f"{block[i]}.qk_norm.w"]).reshape(2, -1)
    return gains


PIECE = 1 << 16  # 8-byte words that share a row of checksums
LANES = 32  # checksums of a piece: independent chains, which vectorize
FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so multiplication is invertible
HALF = np.uint64(32)


def checksums_of(x: Array, pool: Pool) -> Array:
    """Compute checksums of a flat array of whole words.

    A change of one word is always detected. A change of more words is missed with probability 2^-64.
    """
    words = x.view(np.uint64)
    checksums = np.zeros((-(-len(words) // PIECE), LANES), np.uint64)
    pool.split_range(len(checksums), 1, _checksum, checksums, words)
    return checksums


@jit
def _checksum(first, last, checksums, words):
    """Compute the checksums of pieces first … last by an invertible step for each word."""
    for piece in range(first, last):
        mine, end = checksums[piece], min((piece + 1) * PIECE, len(words))
        for left in range(piece * PIECE, end, LANES):
            some = words[left : min(left + LANES, end)]
            for lane in range(len(some)):
                mixed = (mine[lane] ^ some[lane]) * FACTOR
                mine[lane] = mixed ^ (mixed >> HALF)
