"""What the GPU kernels require: a device, a library for matmuls, one for attention; and the storage types.

Three storage types exist. Arrays of bfloat16 hold its bits in the dtype uint16: neither NumPy nor CuPy
needs to know the type, and whoever needs the values converts them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Array = Any  # on a GPU a cupy.ndarray; tests have a device whose arrays are numpy's
Work = Callable[[], None]

STORAGE: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(np.uint16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
WIDE: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(np.float32),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
TYPE_OF = {dtype: name for name, dtype in STORAGE.items()}


def to_bfloat16(values: Any) -> Any:
    """The bits (uint16) of the nearest bfloat16, ties to even; a NaN stays one."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    quiet = (bits >> 16) | 0x40
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)


def from_bfloat16(bits: Any) -> Any:
    """The same values as float32."""
    return (np.asarray(bits, np.uint32) << 16).view(np.float32)


class Mirror(Protocol):
    """A device array's copy on the host: `host` is a NumPy array of the same type and shape."""

    host: Any

    def fetch(self) -> None:
        """Start copying to the host; `ready` waits until that is done."""

    def ready(self) -> None: ...

    def send(self) -> None:
        """Start copying to the device; `ready` waits until `host` may be changed again."""


class Mark(Protocol):
    """A point in the device's stream."""

    def seconds_since(self, earlier: Any) -> float:
        """Return the device's time between another mark and this one. Waits for it."""


class Device(Protocol):
    """Memory, kernels and time on one device. All work goes to one stream, in the order of the calls."""

    name: str
    multiprocessors: int
    deterministic: bool  # the same bits in every run, at the price of speed
    choices: dict[Hashable, int]  # by key: which candidate `fastest` chose

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Allocate an array. Not while recording."""

    def upload(self, array: Array, host: Any) -> None:
        """array ← a host array of the same type and size, which may be changed on return."""

    def download(self, array: Array) -> Any:
        """Return the array as a new NumPy array. Waits for all work so far."""

    def later(self, array: Array) -> Callable[[], Any]:
        """Like `download`, of the array at this point of the stream; calling the result waits."""

    def mirror(self, array: Array) -> Mirror:
        """Make a host copy for an array that is transferred again and again."""

    def zero(self, array: Array) -> None:
        """array ← 0, contiguous arrays of any type"""

    def copy(self, array: Array, source: Array) -> None:
        """array ← source, both contiguous on the device and of one type and size"""

    def launch(
        self,
        source: str,
        kernel: str,
        defines: tuple[str, ...],
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Any],
        shared: int = 0,
    ) -> None:
        """Start `kernel` of gpu/cu/`source`.cu, compiled with -D for each of `defines`.

        Arrays become pointers and None the null pointer; a Python int becomes a C int, a float a double.
        `shared`: dynamic shared memory in bytes.
        """

    def record(self, work: Work) -> Work:
        """Return a function that repeats the launches of `work` without running its Python code.

        The first call runs `work` itself, so that everything it needs is compiled and chosen; later calls
        repeat its launches on the same arrays.
        """

    def fastest(self, key: Hashable, candidates: Sequence[Work]) -> None:
        """Run one of these candidates, which all do the same and are repeatable.

        The first where `deterministic`, else the fastest, timed when a key is new. While recording nothing
        can be timed: the first unless the key is known.
        """

    def mark(self) -> Mark:
        """Mark this point of the stream, to measure times. Not while recording."""

    def synchronize(self) -> None:
        """Wait until all work is done."""

    def memory(self) -> tuple[int, int]:
        """Return free and total bytes."""


@dataclass(frozen=True, slots=True)
class Matmul:
    """A kind of matmul, out (m, n) ← a (m, k) · b (k, n), everything row-major and contiguous.

    With `transpose_a`, a is stored as (k, m); with `transpose_b`, b as (n, k). Types are "bfloat16",
    "float32" or "float64"; sums are taken in one of the latter. `epilogue`, with `extra` beside the factors:

    | epilogue    | meaning                                                       | extra    |
    |-------------|---------------------------------------------------------------|----------|
    | "none"      | out ← a b, or += with `accumulate`                            |          |
    | "bias"      | out ← a b + bias, bias (n,) of the type of out                | bias     |
    | "gelu"      | aux ← a b (+ bias, if one is given); out ← gelu(aux), tanh    | aux      |
    | "dgelu"     | out ← (a b) · gelu'(aux)                                      | aux      |
    | "column_sums" | out ← aᵀ-product as "none", bias ← Σ over k of a (m,), the type of out | bias |
    """

    m: int
    n: int
    k: int
    transpose_a: bool
    transpose_b: bool
    in_type: str
    out_type: str
    epilogue: str = "none"
    accumulate: bool = False
    has_bias: bool = False  # for "gelu"


class MatmulLibrary(Protocol):
    """A library for matmuls."""

    def can(self, kind: Matmul) -> bool:
        """Return whether the library supports it. Plans it, which is not allowed while recording."""

    def run(
        self,
        kind: Matmul,
        out: Array,
        a: Array,
        b: Array,
        bias: Array | None = None,
        aux: Array | None = None,
    ) -> None:
        """Compute it. The first call of a kind plans it, which keeps out's contents intact."""


class Attention(Protocol):
    """A library's causal attention on packed qkv (B·T, 3·H·head), as `Kernels.attention` has it."""

    def forward(self, y: Array, lse: Array, qkv: Array, seq_len: int, n_head: int) -> None:
        """lse: B·H·T elements of float32 in the library's own order."""

    def backward(
        self, dqkv: Array, dy: Array, y: Array, lse: Array, qkv: Array, seq_len: int, n_head: int
    ) -> None: ...
