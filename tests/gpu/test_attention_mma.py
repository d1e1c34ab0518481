"""Attention on tensor cores against the reference in float64, and the instructions it is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from devices import ON_GPU, device
from hostbuild import COMPILER
from hostdevice import HostDevice
from test_attention_source import REFERENCE, distance

from distgpt.gpu.api import from_bfloat16, to_bfloat16
from distgpt.gpu.attention import OwnAttention
from distgpt.gpu.launching import Launcher

needs_a_device = pytest.mark.skipif(
    not ON_GPU and COMPILER is None, reason="needs g++ to run the kernels on the processor"
)
needs_the_processor = pytest.mark.skipif(ON_GPU or COMPILER is None, reason="needs g++, and no GPU")

TOLERANCE = 1e-2


class Older(HostDevice):
    """Has no tensor cores that know bfloat16."""

    capability = (7, 5)


@dataclass(frozen=True)
class Case:
    """Random qkv and dy, rounded to bfloat16, and what the reference makes of them."""

    n_seq: int
    seq_len: int
    n_head: int
    head: int
    steep: float = 1.0

    def inputs(self) -> tuple[Any, Any]:
        rng = np.random.default_rng(self.seq_len)
        n, c = self.n_seq * self.seq_len, self.n_head * self.head
        return (
            to_bfloat16(rng.standard_normal((n, 3 * c)) * self.steep),
            to_bfloat16(rng.standard_normal((n, c))),
        )

    def wanted(self) -> dict[str, Any]:
        qkv, dy = (from_bfloat16(x).astype(np.float64) for x in self.inputs())
        y, lse, dqkv = np.empty_like(dy), np.empty((len(dy), self.n_head)), np.empty_like(qkv)
        REFERENCE.attention(y, lse, qkv, self.seq_len)
        REFERENCE.attention_backward(dqkv, dy, y, lse, qkv, self.seq_len)
        lse = lse.reshape(self.n_seq, self.seq_len, self.n_head).swapaxes(1, 2)
        return _named(y, lse, dqkv)

    def computed(self, ahead: Any, back: Any = None) -> dict[str, Any]:
        """By the kernels of a device; the gradient by those of another device, if that is given."""
        qkv, dy = (_on(ahead, x) for x in self.inputs())
        y, dqkv = (_on(ahead, np.full(x.shape, 0x7FFF, np.uint16)) for x in (dy, qkv))
        lse = _on(ahead, np.full((self.n_seq, self.n_head, self.seq_len), np.nan, np.float32))
        sizes = self.seq_len, self.n_head
        _attention(ahead).forward(y, lse, qkv, *sizes)
        if back is None:
            _attention(ahead).backward(dqkv, dy, y, lse, qkv, *sizes)
        else:
            moved = [_on(back, ahead.download(x)) for x in (dqkv, dy, y, lse, qkv)]
            _attention(back).backward(*moved, *sizes)
            return _named(ahead.download(y), ahead.download(lse), back.download(moved[0]))
        return _named(*map(ahead.download, (y, lse, dqkv)))


def _attention(on: Any) -> OwnAttention:
    return OwnAttention(Launcher(on, "bfloat16", 2))


def _on(on: Any, host: Any) -> Any:
    array = on.zeros(host.shape, host.dtype)
    on.upload(array, host)
    return array


def _named(y: Any, lse: Any, dqkv: Any) -> dict[str, Any]:
    arrays = (y, lse, *np.split(dqkv, 3, axis=1))
    numbers = (from_bfloat16(x).astype(np.float64) if x.dtype == np.uint16 else x for x in arrays)
    return dict(zip(("y", "lse", "dq", "dk", "dv"), numbers, strict=True))


def check(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, numbers in got.items():
        assert distance(numbers, wanted[name]) < (1e-5 if name == "lse" else TOLERANCE), name


@needs_a_device
@pytest.mark.parametrize(
    ("n_seq", "seq_len", "n_head", "head"),
    [
        (2, 7, 3, 16),
        (2, 64, 1, 16),
        (1, 130, 2, 32),
        (1, 33, 1, 48),
        (3, 33, 2, 64),
        (1, 64, 1, 64),
        (2, 65, 3, 64),
        (1, 200, 1, 64),
        (2, 65, 1, 80),
        (1, 130, 1, 96),
        (1, 65, 1, 112),
        (1, 64, 2, 128),
        (1, 200, 1, 128),
    ],
)
def test_attention_and_its_gradient_are_the_reference_s(n_seq, seq_len, n_head, head) -> None:
    case = Case(n_seq, seq_len, n_head, head)
    check(case.computed(device()), case.wanted())


@needs_a_device
def test_one_position_attends_to_itself_and_gives_no_gradient_to_scores() -> None:
    case = Case(3, 1, 2, 64)
    got, wanted = case.computed(device()), case.wanted()
    assert np.array_equal(got["y"], wanted["y"])
    assert np.array_equal(got["dv"], wanted["dv"])
    assert np.abs(got["dq"]).max() < 1e-2
    assert np.abs(got["dk"]).max() < 1e-2


@needs_a_device
@pytest.mark.parametrize("head", [64, 128])
def test_scores_far_from_zero_neither_overflow_nor_vanish(head) -> None:
    case = Case(1, 65, 1, head, steep=3.0)
    got, wanted = case.computed(device()), case.wanted()
    assert np.abs(wanted["lse"]).max() > 25
    check(got, wanted)
    # Here all weight lies on one position or two. Gradients of scores are differences of nearly equals,
    # one of which is made of the rounded y, and have no digits left; those of values have all.
    case = Case(1, 65, 1, head, steep=100.0)
    got, wanted = case.computed(device()), case.wanted()
    assert np.isfinite(got["dq"]).all() and np.isfinite(got["dk"]).all()
    check({name: got[name] for name in ("y", "lse", "dv")}, wanted)


@needs_the_processor
@pytest.mark.parametrize("head", [64, 128])
def test_the_order_of_blocks_and_threads_changes_no_bit(head) -> None:
    case = Case(2, 65, 2, head)
    ahead, reverse = (case.computed(HostDevice(backwards=backwards)) for backwards in (False, True))
    for name, numbers in ahead.items():
        assert np.array_equal(numbers, reverse[name]), name


@needs_the_processor
def test_each_source_s_gradient_goes_with_the_other_s_forward_pass() -> None:
    case = Case(2, 65, 2, 64)
    wanted = case.wanted()
    check(case.computed(HostDevice(), Older()), wanted)
    check(case.computed(Older(), HostDevice()), wanted)


def _sources(on: HostDevice, storage: str, head: int) -> set[str]:
    """From which forward and backward come."""
    attention = OwnAttention(Launcher(on, storage, 2 if storage == "bfloat16" else 4))
    stored = np.dtype(np.uint16 if storage == "bfloat16" else np.float32)
    y, dy = on.zeros((2, head), stored), on.zeros((2, head), stored)
    qkv, dqkv = on.zeros((2, 3 * head), stored), on.zeros((2, 3 * head), stored)
    lse = on.zeros((1, 1, 2), np.float32)
    attention.forward(y, lse, qkv, 2, 1)
    attention.backward(dqkv, dy, y, lse, qkv, 2, 1)
    return {launch.source for launch in on.launches if launch.kernel != "attention_delta"}


@needs_the_processor
def test_tensor_cores_are_for_bfloat16_on_able_devices_and_heads_that_they_can() -> None:
    assert _sources(HostDevice(), "bfloat16", 64) == {"attention_mma"}
    assert _sources(HostDevice(), "float32", 64) == {"attention"}
    assert _sources(Older(), "bfloat16", 64) == {"attention"}
    for head in (5, 72, 144):
        assert _sources(HostDevice(), "bfloat16", head) == {"attention"}


# ---- the stand-ins for the instructions, against the PTX ISA's figures written down a second time

INSTRUCTIONS = """
extern "C" __global__ void load(unsigned* out, const unsigned* tile, int transposed) {
    __shared__ __align__(16) unsigned rows[32 * 4];
    for (int i = 0; i < 4; i++) rows[threadIdx.x * 4 + i] = tile[threadIdx.x * 4 + i];
    __syncwarp();
    unsigned got[4];
    const SharedAddress row = shared_address(rows + threadIdx.x * 4);
    if (transposed) load_matrices_transposed(got, row);
    else load_matrices(got, row);
    for (int i = 0; i < 4; i++) out[threadIdx.x * 4 + i] = got[i];
}

extern "C" __global__ void product(float* c, const unsigned* a, const unsigned* b) {
    unsigned left[4];
    float sums[4];
    for (int i = 0; i < 4; i++) left[i] = a[threadIdx.x * 4 + i], sums[i] = c[threadIdx.x * 4 + i];
    multiply_add(sums, left, b[threadIdx.x * 2], b[threadIdx.x * 2 + 1]);
    for (int i = 0; i < 4; i++) c[threadIdx.x * 4 + i] = sums[i];
}

extern "C" __global__ void copies(unsigned* early, unsigned* late, const unsigned* from) {
    __shared__ __align__(16) unsigned to[32 * 4];
    start_copy<16>(shared_address(to + threadIdx.x * 4), from + threadIdx.x * 4, threadIdx.x % 2);
    for (int i = 0; i < 4; i++) early[threadIdx.x * 4 + i] = to[threadIdx.x * 4 + i];
    wait_for_copies();
    for (int i = 0; i < 4; i++) late[threadIdx.x * 4 + i] = to[threadIdx.x * 4 + i];
}
"""


def _run(kernel: str, *args: Any) -> list[Any]:
    on = HostDevice(texts={"instructions": INSTRUCTIONS})
    given = [_on(on, arg) if isinstance(arg, np.ndarray) else arg for arg in args]
    on.launch("instructions", kernel, (), (1,), (32,), given)
    return [on.download(array) for array in given if not isinstance(array, int)]


@needs_the_processor
@pytest.mark.parametrize("transposed", [0, 1])
def test_matrices_out_of_shared_memory_are_dealt_as_documented(transposed) -> None:
    matrices = np.arange(4 * 8 * 8, dtype=np.uint16).reshape(4, 8, 8)
    out, _ = _run("load", np.zeros(128, np.uint32), matrices.reshape(-1).view(np.uint32), transposed)
    dealt = matrices.swapaxes(1, 2) if transposed else matrices
    # Row r of matrix i goes to lanes 4 r … 4 r + 3, two neighbours to each, into register i.
    wanted = np.ascontiguousarray(dealt).reshape(4, 32, 2).swapaxes(0, 1)
    assert np.array_equal(out.view(np.uint16).reshape(32, 4, 2), wanted)


@needs_the_processor
def test_a_product_of_fragments_is_the_product_of_the_matrices_they_are_of() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(-8, 9, (16, 16)), rng.integers(-8, 9, (16, 8))
    c = rng.integers(-8, 9, (16, 8))
    # The figures' quarters of a: upper left, lower left, upper right, lower right; the halves of b and of c.
    quarters = np.stack([a[:8, :8], a[8:, :8], a[:8, 8:], a[8:, 8:]])
    left = to_bfloat16(quarters).reshape(4, 32, 2).swapaxes(0, 1).copy().view(np.uint32)
    columns = np.stack([b[:8].T, b[8:].T])
    right = to_bfloat16(columns).reshape(2, 32, 2).swapaxes(0, 1).copy().view(np.uint32)

    def sums(matrix: Any) -> Any:
        return np.stack([matrix[:8], matrix[8:]]).reshape(2, 32, 2).swapaxes(0, 1).astype(np.float32).copy()

    got, *_ = _run("product", sums(c).reshape(-1), left.reshape(-1), right.reshape(-1))
    assert np.array_equal(got.reshape(32, 2, 2), sums(c + a @ b))


@needs_the_processor
def test_copies_arrive_when_they_are_waited_for() -> None:
    numbers = np.arange(128, dtype=np.uint32)
    early, late, _ = _run("copies", np.zeros_like(numbers), np.zeros_like(numbers), numbers)
    assert (early == 0xFFFFFFFF).all()
    wanted = numbers.reshape(32, 4) * (np.arange(32) % 2)[:, None]
    assert np.array_equal(late.reshape(32, 4), wanted)
