"""The tensors of a model that are rounded to int8 or int4, and their bits."""

from __future__ import annotations

from distgpt.core.model.memory import LEARNED, MATRIX, Spec


def is_quantised(spec: Spec) -> bool:
    """Return whether int8 models have it in int8: matrices, but not learned positions."""
    return spec.is_matrix and spec.name != LEARNED


def bits_of(spec: Spec, dtype: str) -> int:
    """Return the bits of its integers in a model rounded to int8 or int4; 0: it stays float32."""
    if not is_quantised(spec):
        return 0
    return 4 if dtype == "int4" and spec.group == MATRIX else 8
