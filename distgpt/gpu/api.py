"""What the GPU kernels ask of a device, of a library for matrix products, and of one for attention.

Three storage types exist. Arrays of bfloat16 have the dtype uint16, whose bits they are: neither NumPy nor
CuPy needs to know the type, and a module that wants numbers converts (`storage.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Array = Any  # on a GPU a cupy.ndarray; tests have a device whose arrays are numpy's
Work = Callable[[], None]


class Mirror(Protocol):
    """The twin on the host of a device's array: `host` is a numpy array of the same type and shape."""

    host: Any

    def fetch(self) -> None:
        """Start copying to the host; `ready` waits until that is done."""

    def ready(self) -> None: ...

    def send(self) -> None:
        """Start copying to the device; `ready` waits until `host` may be changed again."""


class Mark(Protocol):
    """A place in the device's stream."""

    def seconds_since(self, earlier: Any) -> float:
        """How long the device took from another mark to this one. Waits for it."""


class Device(Protocol):
    """Memory, kernels and time on one device. All work goes to one stream, in the order of the calls."""

    name: str
    multiprocessors: int
    deterministic: bool  # the same bits in every run, at the price of speed

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """A new array. For construction time only: no work that is recorded may allocate."""

    def upload(self, array: Array, host: Any) -> None:
        """array ← numbers of the same type and size from the host, which may be changed on return."""

    def download(self, array: Array) -> Any:
        """The array as a new numpy array. Waits for all work so far."""

    def later(self, array: Array) -> Callable[[], Any]:
        """Like `download`, but of the array as it is at this point of the stream; the call waits."""

    def mirror(self, array: Array) -> Mirror:
        """For an array that goes back and forth."""

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
        `shared` is dynamic shared memory in bytes.
        """

    def record(self, work: Work) -> Work:
        """Something to call in place of `work` again and again: the same launches without Python in the way.

        The first call runs `work` itself, so that everything it needs is compiled and chosen; what comes
        later repeats its launches on the same arrays.
        """

    def fastest(self, key: Hashable, candidates: Sequence[Work]) -> None:
        """Run one of these, which all do the same and are repeatable: the first where `deterministic`, else
        the fastest, found out by timing when a key is new. While recording nothing can be timed: there it is
        the first unless the key is known."""

    def mark(self) -> Mark:
        """Where in the stream this is, to tell times by. Not for work that is recorded."""

    def synchronize(self) -> None:
        """Wait until all work is done."""

    def memory(self) -> tuple[int, int]:
        """Bytes that are free, and bytes there are."""


@dataclass(frozen=True, slots=True)
class Product:
    """A kind of matrix product, out (m, n) ← a (m, k) · b (k, n), everything row-major and contiguous.

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


class Products(Protocol):
    """A library for matrix products."""

    def can(self, product: Product) -> bool:
        """Whether the library knows a way. Plans it, which is not allowed while recording."""

    def run(
        self,
        product: Product,
        out: Array,
        a: Array,
        b: Array,
        bias: Array | None = None,
        aux: Array | None = None,
    ) -> None:
        """Compute it. Planned at the first call of its kind; out's contents are kept intact by planning."""


class Attention(Protocol):
    """A library's causal attention on packed qkv (B·T, 3·H·head), as `Kernels.attention` has it."""

    def forward(self, y: Array, lse: Array, qkv: Array, seq_len: int, n_head: int) -> None:
        """lse is B·H·T numbers of float32 in an order of its own."""

    def backward(
        self, dqkv: Array, dy: Array, y: Array, lse: Array, qkv: Array, seq_len: int, n_head: int
    ) -> None: ...
