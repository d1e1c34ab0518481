"""Decide what `--dtype auto` is on a processor: bfloat16 where it is faster, else float32."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from distgpt.core.base.errors import UsageError
from distgpt.core.config import DTYPES, nearest
from distgpt.core.cpu import first_use

VARIABLE = (
    "DISTGPT_AUTO_DTYPE"  # names what auto is: for tests, and for sites with processors of several kinds
)
WORTHWHILE = 4 / 3  # times as fast as float32, from which on bfloat16 is taken
# Bytes of float32 weights that no cache holds, so that generation on a CPU reads them for every token. With
# GPT-2 124M (496 MB) bfloat16 decoded 1.4 to 2.0 times as fast on five x86 processors, three of them without
# instructions for it (docs/explanation/inference-measured.md). arm64 was not measured.
READ_FROM_MEMORY = 1 << 28


@dataclass(frozen=True, slots=True)
class Dtype:
    """A number format, and why it was chosen; "" where the user has named it."""

    name: str
    why: str = ""


# (width of the model, --matmul, weights that are read for every token) → what to take. The last is 0 for
# training, where a batch of tokens reads them at once.
Choose = Callable[[int, str, int], Dtype]


def chosen(choose: Choose, width: int, matmul: str = "auto", elements: int = 0) -> Dtype:
    """Return what the variable names, else what is chosen."""
    if fixed := os.environ.get(VARIABLE):
        if fixed not in DTYPES:
            raise UsageError(f"{VARIABLE} is {fixed!r:.80}{nearest(fixed, DTYPES)}")
        return Dtype(fixed)
    return choose(width, matmul, elements)


def on_cpu(width: int, matmul: str, elements: int) -> Dtype:
    """Choose by this processor's speed."""
    from distgpt.core.cpu.compiling import processor
    from distgpt.core.cpu.matmul.gain import gain

    if 4 * elements >= READ_FROM_MEMORY and not processor.shape().neon:
        return Dtype("bfloat16", "a token reads half the bytes of float32")
    if matmul != "auto":
        return Dtype("float32", f"--matmul {matmul} chooses how to multiply float32")
    with first_use.compiling_for("comparing bfloat16 with float32"):
        ratio = gain(width)
    if ratio >= WORTHWHILE:
        return Dtype("bfloat16", f"this processor multiplies it {ratio:.1f} times as fast as float32")
    if processor.shape().dot:
        return Dtype("float32", f"this processor multiplies bfloat16 only {ratio:.1f} times as fast")
    return Dtype("float32", processor.hint() or "this processor has no fast instructions for bfloat16")
