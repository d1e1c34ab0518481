"""The tiles of each processor: who writes them, where it is not microkernel.py.

Each file is imported only where its processor is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from distgpt.core.cpu.compiling.registers import BFLOAT16, Shape
from distgpt.core.cpu.matmul import microkernel

Writer = Callable[[str], str]  # of the IR of `tile`, given the type of C


def module_of(shape: Shape, factor: str) -> Writer:
    """Return what writes the tiles of one type of factors."""
    low = factor == BFLOAT16
    if low and shape.amx:
        from distgpt.processors import amx

        return partial(amx.module, shape)
    if shape.neon:
        from distgpt.processors import mmla, neon

        return partial(mmla.module, shape) if low and shape.dot else partial(neon.module, shape, factor)
    if shape.widens(factor) and shape.lanes == 16:
        from distgpt.processors import widening

        return partial(widening.module, shape)
    return partial(microkernel.module, shape, factor)


def steps_of(shape: Shape) -> tuple[Callable[[], str], int] | None:
    """Return what writes a rearrangement of packed steps, and its flag; None where tiles want none."""
    if not (shape.neon and shape.dot):
        return None
    from distgpt.processors import mmla

    return partial(mmla.fours, shape.vectors), mmla.FOURS
