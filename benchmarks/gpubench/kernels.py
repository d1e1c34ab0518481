"""Every kernel of ours at the sizes of GPT-2 124M with B = 64: time, bytes, share of the copy bandwidth.

Bytes count every input once and every output once, an array that is both twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from distgpt.config import ModelConfig
from distgpt.gpu.api import Work
from distgpt.kernels.api import KNOBS, AdamConstants, AdamState, Affine, Angles, Head, Stats
from gpubench.machine import Machine, NoProducts
from gpubench.section import Section
from gpubench.training import TOY, gpt2

DTYPE = "bfloat16"
STORED, REAL = 2, 4  # bytes of a number, stored and wide
Case = tuple[str, Callable[[], tuple[Work, float]]]  # name, and what makes the work and counts its bytes


@dataclass
class Sizes:
    """N rows of C numbers; all that the cases share."""

    machine: Machine
    shape: ModelConfig
    n_seq: int

    def __post_init__(self) -> None:
        self.seq_len, self.c = self.shape.seq_len, self.shape.n_embd
        self.n = self.n_seq * self.seq_len
        self.k = self.machine.kernels(DTYPE, products=NoProducts())

    def rows(self, width: int) -> Any:
        return self.machine.array((self.n, width), DTYPE)

    def wide(self, *shape: int) -> Any:
        return self.machine.array(shape, "float32")

    def tokens(self) -> tuple[Any, int]:
        """Token ids, and how many different ones there are."""
        host = np.random.default_rng(3).integers(0, self.shape.vocab_size, self.n)
        return self.k.integers(host), len(np.unique(host))


def kernels(section: Section) -> None:
    machine, report = section.machine, section.report
    n_seq = 2 if section.quick else 64
    sizes = Sizes(machine, TOY if section.quick else gpt2(section), n_seq)
    copy = machine.copy_bandwidth(1 << 16 if section.quick else 1 << 31)
    report.row("copy", bytes_per_s=copy)
    machine.free()
    for name, make in cases(sizes):
        if report.left < 10:
            report.note(f"{name} and what follows: no time left")
            break
        with report.attempt(name):
            work, moved = make()
            seconds = machine.seconds(work)
            report.row(name, seconds=seconds, bytes=moved, of_copy=moved / seconds / copy)
        work = None  # its arrays go with it
        machine.free()
    attention(section, sizes)


def cases(s: Sizes) -> Iterator[Case]:
    yield "residual + layer norm", partial(_norm, s, True)
    yield "residual + RMS norm", partial(_norm, s, False)
    yield "layer norm backward", partial(_norm_backward, s, True, False)
    yield "layer norm backward, output again", partial(_norm_backward, s, True, True)
    yield "RMS norm backward, output again", partial(_norm_backward, s, False, True)
    hidden = s.shape.hidden
    modern = -(-8 * s.c // 3 // 8) * 8
    for act, width, pre in (("gelu", hidden, 1), ("swiglu", modern, 2)):
        yield act, partial(_activation, s, act, width, pre)
        for again in (False, True):
            name = f"{act} backward{', output again' if again else ''}"
            yield name, partial(_activation_backward, s, act, width, pre, again)
    yield "rope", partial(_rope, s)
    yield "add", partial(_add, s)
    yield "embedding", partial(_embed, s)
    yield "embedding backward", partial(_embed_backward, s)
    yield "cross-entropy and its gradient", partial(_cross_entropy, s)
    yield "column sums", partial(_column_sums, s)
    yield "sum of squares", partial(_sum_squares, s)
    yield "AdamW", partial(_adamw, s)


def _norm(s: Sizes, centred: bool) -> tuple[Work, float]:
    y, total, x, r = (s.rows(s.c) for _ in range(4))
    mean, rstd, w = s.wide(s.n) if centred else None, s.wide(s.n), s.machine.array((s.c,), DTYPE)
    b = w if centred else None
    work = partial(s.k.add_norm, y, total, Stats(mean, rstd), x, r, Affine(w, b), 1e-5)
    return work, 4 * s.n * s.c * STORED + (2 if centred else 1) * s.n * REAL


def _norm_backward(s: Sizes, centred: bool, again: bool) -> tuple[Work, float]:
    dx, y, dy, dres, total = (s.rows(s.c) for _ in range(5))
    mean, rstd, w = s.wide(s.n) if centred else None, s.wide(s.n), s.machine.array((s.c,), DTYPE)
    partials = s.wide(s.k.norm_partials, 2 * s.c)
    b, y = w if centred else None, y if again else None
    work = partial(s.k.norm_backward, dx, y, partials, dy, dres, total, Stats(mean, rstd), Affine(w, b))
    return work, (5 if again else 4) * s.n * s.c * STORED + (2 if centred else 1) * s.n * REAL


def _activation(s: Sizes, act: str, width: int, branches: int) -> tuple[Work, float]:
    y, pre = s.rows(width), s.rows(branches * width)
    x, w = s.rows(s.c), s.machine.array((branches * width, s.c), DTYPE)
    return partial(s.k.linear_act, y, pre, x, Affine(w, None), act), (1 + branches) * s.n * width * STORED


def _activation_backward(s: Sizes, act: str, width: int, branches: int, again: bool) -> tuple[Work, float]:
    y, pre, dpre = s.rows(width), s.rows(branches * width), s.rows(branches * width)
    dy, w = s.rows(s.c), s.machine.array((s.c, width), DTYPE)
    work = partial(s.k.linear_backward_act, dpre, y, dy, w, pre, act, again)
    return work, (2 * branches + 1 + again) * s.n * width * STORED


def _rope(s: Sizes) -> tuple[Work, float]:
    qkv, half = s.rows(3 * s.c), s.shape.head_size // 2
    cos, sin = s.wide(s.seq_len, half), s.wide(s.seq_len, half)
    s.k.put(cos, np.full((s.seq_len, half), 0.8))
    s.k.put(sin, np.full((s.seq_len, half), 0.6))
    work = partial(s.k.rope, qkv, Angles(cos, sin), s.shape.n_head, s.seq_len, None, False)
    return work, 2 * 2 * s.n * s.c * STORED + 2 * s.seq_len * half * REAL


def _add(s: Sizes) -> tuple[Work, float]:
    return partial(s.k.add, *(s.rows(s.c) for _ in range(3))), 3 * s.n * s.c * STORED


def _embed(s: Sizes) -> tuple[Work, float]:
    (tokens, different), table = s.tokens(), (s.shape.padded_vocab, s.c)
    x, wte, wpe = s.rows(s.c), s.machine.array(table, DTYPE), s.machine.array((s.seq_len, s.c), DTYPE)
    work = partial(s.k.embed, x, tokens, wte, wpe, s.seq_len, None)
    return work, (s.n + different + s.seq_len) * s.c * STORED + s.n * 4


def _embed_backward(s: Sizes) -> tuple[Work, float]:
    tokens, different = s.tokens()
    dx, dwte, dwpe = s.rows(s.c), s.wide(s.shape.padded_vocab, s.c), s.wide(s.seq_len, s.c)
    work = partial(s.k.embed_backward, dwte, dwpe, dx, tokens, s.seq_len)
    return work, s.n * s.c * STORED + 2 * (different + s.seq_len) * s.c * REAL + s.n * 4


def _cross_entropy(s: Sizes) -> tuple[Work, float]:
    width = s.shape.padded_vocab
    chunk = max(1, min(s.n, s.k.logits_bytes // (width * STORED)))
    logits, x, dx = s.machine.array((chunk, width), DTYPE), s.rows(s.c), s.rows(s.c)
    w, losses, (targets, _) = s.machine.array((width, s.c), DTYPE), s.wide(s.n), s.tokens()
    head = Head(w, logits, s.shape.vocab_size)
    work = partial(s.k.linear_cross_entropy, losses, dx, None, x, head, targets, 1 / s.n, False)
    return work, 2 * s.n * width * STORED + 2 * s.n * 4


def _column_sums(s: Sizes) -> tuple[Work, float]:
    width = s.shape.hidden
    dy, x, dw, db = s.rows(width), s.rows(s.c), s.wide(width, s.c), s.wide(width)
    work = partial(s.k.linear_backward_weights, Affine(dw, db), dy, x, False)
    return work, s.n * width * STORED + width * REAL


def _parameters(s: Sizes) -> int:
    return s.shape.padded_vocab * s.c + 12 * s.shape.n_layer * s.c * s.c + s.seq_len * s.c


def _sum_squares(s: Sizes) -> tuple[Work, float]:
    g = s.wide(_parameters(s))
    return partial(s.k.sum_squares, s.k.scalars(1), g), g.size * REAL


def _adamw(s: Sizes) -> tuple[Work, float]:
    size = _parameters(s)
    p, g, m, v = s.wide(size), s.wide(size), s.k.wide_zeros(size), s.k.wide_zeros(size)
    low, norm, knobs = s.k.zeros(size), s.k.scalars(1), s.k.scalars(len(KNOBS))
    s.k.put(norm, np.ones(1))
    s.k.put(knobs, np.array([1.0, 0.0, 1e-4, 1.0, 1.0]))
    state = AdamState(p, low, m, v, g, s.k.integers([(0, size, True)], "int64"))
    work = partial(s.k.adamw, state, norm, knobs, AdamConstants(0.9, 0.95, 1e-8))
    return work, size * (7 * REAL + STORED)


def attention(section: Section, s: Sizes) -> None:
    """Ours beside the one that training would choose; causal, so half of the full square is counted."""
    square = s.n_seq * s.shape.n_head * s.seq_len**2 * s.shape.head_size
    for who in ("own", "chosen"):
        with section.report.attempt(f"attention, {who}"):
            k = s.k if who == "own" else section.machine.kernels(DTYPE)
            y, dy, qkv, dqkv = s.rows(s.c), s.rows(s.c), s.rows(3 * s.c), s.rows(3 * s.c)
            lse = s.wide(s.n, s.shape.n_head)
            forward = partial(k.attention, y, lse, qkv, s.seq_len)
            seconds = section.machine.seconds(forward)
            section.report.row(f"attention, {who}", seconds=seconds, tflops=2 * square / seconds / 1e12)
            backward = partial(k.attention_backward, dqkv, dy, y, lse, qkv, s.seq_len)
            seconds = section.machine.seconds(backward)
            name = f"attention backward, {who}"
            section.report.row(name, seconds=seconds, tflops=5 * square / seconds / 1e12)
        section.machine.free()
