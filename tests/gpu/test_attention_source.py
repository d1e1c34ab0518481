"""Our own attention kernels, run on this machine's processor, against the reference in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hostbuild import COMPILER
from hostdevice import HostDevice

from distgpt.gpu.api import STORAGE, WIDE, from_bfloat16, to_bfloat16
from distgpt.gpu.attention_tiles import (
    CACHED_BLOCK,
    DELTA_BLOCK,
    SHARED_LIMIT,
    TILES,
    attention_shape,
    cached_parts,
    delta_blocks,
)
from distgpt.kernels.reference import ReferenceKernels

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ to run the kernels on the processor")

TOLERANCE = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 1e-2}
REFERENCE = ReferenceKernels("float64")


@dataclass
class Bench:
    """Arrays of one storage type on a host device, in and out of float64."""

    storage: str
    device: HostDevice

    def put(self, numbers: Any) -> Any:
        """Numbers, rounded to the storage type, on the device; NaNs poison."""
        host = to_bfloat16(numbers) if self.storage == "bfloat16" else numbers.astype(STORAGE[self.storage])
        array = self.device.zeros(host.shape, host.dtype)
        self.device.upload(array, host)
        return array

    def poisoned(self, *shape: int) -> Any:
        return self.put(np.full(shape, np.nan))

    def statistics(self, *shape: int) -> Any:
        array = self.device.zeros(shape, WIDE[self.storage])
        self.device.upload(array, np.full(shape, np.nan, array.dtype))
        return array

    def get(self, array: Any) -> Any:
        host = self.device.download(array)
        return (from_bfloat16(host) if host.dtype == np.uint16 else host).astype(np.float64)

    def defines(self, *others: str) -> tuple[str, ...]:
        return f"STORAGE_{self.storage.upper()}", *others

    def random(self, *shape: int, seed: int = 0) -> tuple[Any, Any]:
        """An array on the device and its very numbers in float64."""
        array = self.put(np.random.default_rng(seed).standard_normal(shape))
        return array, self.get(array)


def bench(storage: str, backwards: bool = False) -> Bench:
    return Bench(storage, HostDevice(backwards=backwards))


def distance(got: Any, wanted: Any) -> float:
    """The norm of the difference, relative; infinite if anything is not finite."""
    if not np.isfinite(got).all():
        return math.inf
    return float(np.linalg.norm(got - wanted) / max(np.linalg.norm(wanted), 1e-300))


def forward_and_backward(
    b: Bench, n_seq: int, seq_len: int, n_head: int, head: int, steep: float = 1.0
) -> Any:
    """(name, what the kernels give, what the reference gives) of y, lse, dq, dk and dv."""
    n, c = n_seq * seq_len, n_head * head
    qkv = b.put(np.random.default_rng(1).standard_normal((n, 3 * c)) * steep)
    dy, dy64 = b.random(n, c, seed=2)
    y, dqkv = b.poisoned(n, c), b.poisoned(n, 3 * c)
    lse, delta = b.statistics(n_seq, n_head, seq_len), b.statistics(n_seq, n_head, seq_len)

    shape = attention_shape(head, WIDE[b.storage].itemsize)
    defines, sizes = b.defines(*shape.defines), (seq_len, n_head)

    def launch(kernel: str, grid: Any, block: Any, shared: int, *args: Any) -> None:
        b.device.launch("attention", kernel, defines, grid, block, (*args, *sizes), shared)

    ahead, back = shape.forward, shape.backward
    grid = ahead.grid(n_seq, seq_len, n_head)
    launch("attention_forward", grid, ahead.block, shape.forward_shared, y, lse, qkv)
    count = n * n_head
    launch("attention_delta", (delta_blocks(count),), (DELTA_BLOCK,), 0, delta, dy, y, count)
    for kernel in ("attention_backward_queries", "attention_backward_keys"):
        grid = back.grid(n_seq, seq_len, n_head)
        launch(kernel, grid, back.block, shape.backward_shared, dqkv, dy, lse, delta, qkv)

    qkv64, y64, lse64 = b.get(qkv), np.empty((n, c)), np.empty((n, n_head))
    dqkv64 = np.empty((n, 3 * c))
    REFERENCE.attention(y64, lse64, qkv64, seq_len)
    REFERENCE.attention_backward(dqkv64, dy64, y64, lse64, qkv64, seq_len)
    yield "y", b.get(y), y64
    yield "lse", b.get(lse), lse64.reshape(n_seq, seq_len, n_head).swapaxes(1, 2)
    parts = zip(np.split(b.get(dqkv), 3, axis=1), np.split(dqkv64, 3, axis=1), strict=True)
    for name, (got, wanted) in zip(("dq", "dk", "dv"), parts, strict=True):
        yield name, got, wanted


@pytest.mark.parametrize(
    ("storage", "n_seq", "seq_len", "n_head", "head"),
    [
        ("float64", 3, 7, 5, 5),
        ("float64", 1, 130, 3, 16),
        ("float64", 3, 33, 1, 64),
        ("float64", 1, 65, 1, 80),
        ("float64", 1, 5, 1, 256),
        ("float32", 3, 65, 3, 1),
        ("float32", 1, 33, 3, 5),
        ("float32", 1, 130, 1, 64),
        ("float32", 1, 65, 1, 128),
        ("bfloat16", 3, 33, 1, 5),
        ("bfloat16", 1, 130, 1, 64),
        ("bfloat16", 1, 65, 3, 80),
        ("bfloat16", 1, 33, 1, 128),
    ],
)
def test_attention_and_its_gradient_are_the_reference_s(
    storage: str, n_seq: int, seq_len: int, n_head: int, head: int
) -> None:
    for name, got, wanted in forward_and_backward(bench(storage), n_seq, seq_len, n_head, head):
        assert distance(got, wanted) < TOLERANCE[storage], name


def test_one_position_attends_to_itself_and_gives_no_gradient_to_scores() -> None:
    results = {name: got for name, got, _ in forward_and_backward(bench("float64"), 3, 1, 3, 16)}
    assert np.abs(results["dq"]).max() < 1e-14
    assert np.abs(results["dk"]).max() < 1e-14
    values = np.random.default_rng(1).standard_normal((3, 3 * 48))[:, 96:]
    assert np.array_equal(results["y"], values)


def test_scores_far_from_zero_neither_overflow_nor_vanish() -> None:
    for name, got, wanted in forward_and_backward(bench("float32"), 1, 65, 1, 16, steep=30.0):
        assert distance(got, wanted) < 1e-3, name


def test_the_order_of_blocks_and_threads_changes_no_bit() -> None:
    ahead = forward_and_backward(bench("float32"), 1, 65, 3, 16)
    reverse = forward_and_backward(bench("float32", backwards=True), 1, 65, 3, 16)
    for (name, got, _), (_, again, _) in zip(ahead, reverse, strict=True):
        assert np.array_equal(got, again), name


@pytest.mark.parametrize("real_bytes", [4, 8])
def test_every_head_size_has_tiles_that_fit_the_shared_memory(real_bytes: int) -> None:
    for head in range(1, 257):
        shape = attention_shape(head, real_bytes)
        assert 0 < shape.forward_shared <= SHARED_LIMIT
        assert 0 < shape.backward_shared <= SHARED_LIMIT
        assert {shape.forward, shape.backward} <= set(TILES)


def decode(b: Bench, prompt: int, steps: int, n_seq: int, n_head: int, head: int, n_parts: int) -> Any:
    """(what the kernel gives, what the reference gives): y of a prompt and of each step, then the cache."""
    t_max, c = prompt + steps + 2, n_head * head
    cache, cache64 = (
        b.poisoned(2, n_seq, n_head, t_max, head),
        np.full((2, n_seq, n_head, t_max, head), np.nan),
    )
    start = b.device.zeros((1,), np.int32)
    position = 0
    for new in (prompt, *[1] * steps):
        qkv, qkv64 = b.random(n_seq * new, 3 * c, seed=position)
        y, y64 = b.poisoned(n_seq * new, c), np.empty((n_seq * new, c))
        parts = b.statistics(n_seq * n_head, new, n_parts, head + 2) if n_parts > 1 else None
        b.device.upload(start, np.array([position], np.int32))
        defines = b.defines(f"HEAD={head}")
        grid = (n_seq * n_head, new)
        args = (y, cache, parts, qkv, start, n_head, t_max)
        b.device.launch("attention_cached", "attention_cached", defines, (*grid, n_parts), CACHED_BLOCK, args)
        if parts is not None:
            args = (y, parts, n_head, n_parts)
            b.device.launch("attention_cached", "attention_cached_join", defines, grid, (32,), args)
        REFERENCE.attention_cached(y64, cache64, qkv64, np.array([position], np.int32))
        yield b.get(y), y64
        position += new
    yield b.get(cache)[:, :, :, :position], cache64[:, :, :, :position]
    assert np.isnan(b.get(cache)[:, :, :, position:]).all()


@pytest.mark.parametrize(
    ("storage", "prompt", "n_seq", "n_head", "head", "n_parts"),
    [
        ("float64", 7, 3, 1, 5, 1),
        ("float64", 33, 1, 3, 64, 1),
        ("float64", 1, 1, 1, 130, 3),
        ("float64", 17, 1, 1, 256, 2),
        ("float32", 65, 1, 1, 1, 2),
        ("float32", 33, 1, 3, 80, 5),
        ("bfloat16", 40, 3, 1, 16, 1),
        ("bfloat16", 33, 1, 1, 64, 3),
        ("bfloat16", 7, 1, 3, 128, 1),
    ],
)
def test_attention_with_a_cache_is_the_reference_s(
    storage: str, prompt: int, n_seq: int, n_head: int, head: int, n_parts: int
) -> None:
    for got, wanted in decode(bench(storage), prompt, 3, n_seq, n_head, head, n_parts):
        assert distance(got, wanted) < TOLERANCE[storage]


def test_decoding_is_cut_into_parts_only_where_the_device_would_be_idle() -> None:
    assert cached_parts(12, 1024, 132) == 4  # 256 keys each
    assert cached_parts(12, 100_000, 132) == 22  # two blocks for each multiprocessor
    assert cached_parts(12 * 500, 1024, 132) == 1  # a prompt
    assert cached_parts(1, 1, 132) == 1
