"""Tells NumPy's BLAS about processors that it does not know yet. Works only before NumPy is imported."""

from __future__ import annotations

import os
from pathlib import Path

_AVX512 = {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}


def name_blas_core(cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
    """Let OpenBLAS use AVX-512 on AMD processors that have it.

    OpenBLAS goes by family and model, and falls back to AVX2 on those newer than itself. With the wider
    kernels matrix products run 1.8 times as fast on a Zen 5. A user's own choice of OPENBLAS_CORETYPE stands.
    """
    try:
        with cpuinfo.open() as lines:
            first = dict(_field(line) for line in iter(lines.readline, "\n") if ":" in line)
    except OSError:
        return
    if first.get("vendor_id") == "AuthenticAMD" and set(first.get("flags", "").split()) >= _AVX512:
        os.environ.setdefault("OPENBLAS_CORETYPE", "SkylakeX")


def _field(line: str) -> tuple[str, str]:
    key, _, value = line.partition(":")
    return key.strip(), value.strip()
