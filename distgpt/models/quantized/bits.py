"""Which parameters are quantized. A separate file, because the digest of the loops must not cover it."""

from __future__ import annotations

from distgpt.core.model.memory import LEARNED, MATRIX, Spec


def bits_of(spec: Spec, dtype: str) -> int:
    """Return the bits of a parameter in a model rounded to int8 or int4. 0: float32.

    Matrices are rounded, except learned positions. int4 applies only to the matrices of layers; the others
    get int8.
    """
    if not spec.is_matrix or spec.name == LEARNED:
        return 0
    return 4 if dtype == "int4" and spec.group == MATRIX else 8
