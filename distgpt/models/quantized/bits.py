"""Which parameters are rounded, apart from loops, whose digest would cover the names of layers."""

from __future__ import annotations

from distgpt.core.model.memory import LEARNED, MATRIX, Spec


def bits_of(spec: Spec, dtype: str) -> int:
    """Return the bits of its integers in a model rounded to int8 or int4; 0: it stays float32.

    Matrices are rounded, but not learned positions; to int4 those of layers.
    """
    if not spec.is_matrix or spec.name == LEARNED:
        return 0
    return 4 if dtype == "int4" and spec.group == MATRIX else 8
