"""Decide what `--dtype auto` is on a processor: bfloat16 where it is faster, else float32."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from distgpt.core.base.errors import UsageError
from distgpt.core.config import DTYPES, nearest

VARIABLE = (
    "DISTGPT_AUTO_DTYPE"  # names what auto is: for tests, and for sites with processors of several kinds
)
# Bytes of float32 weights that no cache holds, so that generation on a CPU reads them for every token. With
# GPT-2 124M (496 MB) bfloat16 decoded 1.4 to 2.0 times as fast on five x86 processors, three of them without
# instructions for it (docs/explanation/inference-measured.md). arm64 was not measured.
READ_FROM_MEMORY = 1 << 28


class Dtype(NamedTuple):
    """A number format, and why it was chosen; "" where the user has named it."""

    name: str
    why: str = ""


# (--matmul, weights that are read for every token) → what to take. The second is 0 for training, where a
# batch of tokens reads them at once.
Choose = Callable[[str, int], Dtype]


def chosen(choose: Choose, matmul: str, weights: int) -> Dtype:
    """Return what the variable names, else what is chosen."""
    if fixed := os.environ.get(VARIABLE):
        if fixed not in DTYPES:
            raise UsageError(f"{VARIABLE} is {fixed!r:.80}{nearest(fixed, DTYPES)}")
        return Dtype(fixed)
    return choose(matmul, weights)


def on_cpu(matmul: str, weights: int) -> Dtype:
    """Choose by the instructions of this processor."""
    from distgpt.core.cpu.compiling import processor

    shape = processor.shape()
    if 4 * weights >= READ_FROM_MEMORY and shape != processor.ARM64:
        return Dtype("bfloat16", "a token reads half the bytes of float32")
    if matmul != "auto":
        return Dtype("float32", f"--matmul {matmul} chooses how to multiply float32")
    if not shape.dot:  # tiles widen pairs to float32 and multiply those: at best as fast as float32
        return Dtype("float32", processor.hint() or "this processor has no fast instructions for bfloat16")
    # A Zen 4 multiplies 768 by 3,072 columns at 439 GFLOP/s instead of 207, and those of tiny 1.9 times as
    # fast; with AMX a Sapphire Rapids trained 3.8 times as fast as by vdpbf16ps (performance.md).
    return Dtype("bfloat16", "this processor multiplies it up to twice as fast as float32")
