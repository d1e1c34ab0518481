"""The GPU's kernels against the reference, in all types; without a GPU, on this machine's processor."""

import itertools

import numpy as np
import operations
import pytest
from devices import ON_GPU, cuda_kernels, needs_the_processor  # noqa: F401
from distgpt.core.base.errors import UsageError
from distgpt.core.ops.api import AdamConstants, AdamState, NesterovState
from distgpt.core.ops.kernels import Kernels
from distgpt.gpu.device import BLOCK
from distgpt.parallel.loops.sums import dither
from hostgpu import host_kernels
from operations import *  # noqa: F403
from operations import Case, Wide


# Whole models of every architecture are compared in float32: test_cuda_model.py.
@pytest.fixture(params=["float64", pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def both(request, cuda_kernels):
    return Kernels("float64"), cuda_kernels(request.param)


@pytest.fixture(autouse=True)
def few_shapes(monkeypatch):
    """Take the smallest and an odd shape where a processor runs the kernels."""
    if not ON_GPU:
        monkeypatch.setattr(operations, "SHAPES", operations.SHAPES[1:3])


@pytest.mark.ci
@pytest.mark.parametrize("dtype, channels", [("float64", 1032), ("float32", 1101), ("bfloat16", 8200)])
def test_norms_of_rows_that_a_whole_block_holds(dtype, channels, cuda_kernels):
    both = Kernels("float64"), cuda_kernels(dtype)
    operations.check_norms(Case(both, (1, 5, channels, 1, 5)), (True, True, True), residual=True)


def test_cross_entropy_over_more_tokens_than_a_block_reads_at_once(both):
    operations.check_cross_entropy(Case(both, (1, 3, 8, 1, 20_005)), 2, False)


def test_the_memory_to_orthogonalise_is_that_of_every_shape(cuda_kernels):
    k, kept = cuda_kernels.__wrapped__("float32"), {}  # new ones: those of other tests have kept some
    scratch = k.launcher.scratch
    k.launcher.scratch = lambda *args: kept.setdefault(args[:2], scratch(*args))
    operations.check_memory_to_orthogonalise(
        k, lambda: [array.nbytes for (name, _), array in kept.items() if name == "orthogonalise"]
    )


def test_rows_are_sorted_by_token_and_equal_tokens_by_row(cuda_kernels):
    for rows, vocab in itertools.product((1, 257, 20_000), (2, 65_537)):
        kernels, random = cuda_kernels("float32"), np.random.default_rng(rows)
        drawn = np.minimum(random.zipf(1.2, rows) - 1, vocab - 1).astype(np.int32)
        order = kernels.to_host(kernels.sort_tokens(kernels.integers(drawn), vocab).order)
        np.testing.assert_array_equal(order, np.argsort(drawn, kind="stable"), err_msg=f"{rows} of {vocab}")


@pytest.mark.parametrize("vocab", [3, 70_001])
def test_embedding_gradients_of_tokens_that_reach_over_many_chunks(both, vocab):
    case = Case(both, (3, 1000, 8, 1, vocab))
    drawn = np.minimum(case.rng.zipf(1.3, case.n) - 1, vocab - 1).astype(np.int32)
    dwte, dx = np.zeros((vocab, case.c)), case.random(case.n, case.c)
    case.check(operations.embed_backward, [Wide(dwte), None], dx, drawn, case.t)


def test_the_textbooks_matmuls(both):
    shapes = [(1, 1, 1, 1), (1, 16, 16, 16), (3, 17, 33, 5), (2, 5, 40, 35)]
    for kernel, (pairs, m, n, k) in itertools.product(("matmul_naive", "matmul_tiled"), shapes):
        case = Case(both)
        case.name = f"{kernel} {pairs, m, n, k}"

        def work(on, out, a, b, kernel=kernel, grid=(-(-n // 16), -(-m // 16), pairs), sizes=(m, n, k)):
            if on is both[0]:
                np.matmul(a, b, out)
            else:
                on.device.launch("matmul", kernel, on.launcher.defines, grid, (16, 16), (out, a, b, *sizes))

        case.check(work, [(pairs, m, n)], case.random(pairs, m, k), case.random(pairs, k, n), strict=0.5)


# -- flat buffers of more than 2³¹ elements: what kernels are given, without the memory that it would take

MANY = (3 << 30) + 5


@pytest.fixture
def started(monkeypatch):
    """Kernels, and what they start: name, blocks, threads, and arguments in the types of C. Nothing is computed."""
    k, found = host_kernels("bfloat16"), []

    def started(function, grid, block, args, shared):
        found.append((function.name, grid, block, args))
        return lambda: None

    monkeypatch.setattr(k.device.xp, "started", started)
    return k, found


def large(k, dtype=np.float32):
    """An array of one element in memory."""
    one = k.wide_zeros(1)
    one.memory = np.broadcast_to(np.zeros((), dtype), (MANY,))
    one.dtype, one.shape, one.size = one.memory.dtype, (MANY,), MANY
    return one


@needs_the_processor
def test_every_operation_on_flat_buffers_takes_more_elements_than_an_int_counts(started):
    k, found = started
    wide, low, one, runs = large(k), large(k, np.uint16), k.scalars(8), k.integers([[0, MANY, 0, 0]], "int64")
    k.cast_down(low, wide)
    k.subtract(wide, wide, wide)
    k.nesterov(NesterovState(wide, low, wide, wide, wide), 0.5, 0.7, 0.9)
    k.adamw(AdamState(wide, low, wide, wide, wide, runs), one, one, AdamConstants(0.9, 0.95, 1e-8))
    fours = [each for each in found if each[0] != "adamw_common"]
    assert [each[0] for each in fours] == ["round_to_stored", "subtract", "nesterov", "adamw"]
    for kernel, grid, block, args in fours:
        assert args[-1] == MANY and type(args[-1]) is np.int64, kernel
        assert 4 * grid[0] * block[0] >= MANY > 4 * (grid[0] - 1) * block[0], kernel
    found.clear()
    k.sum_squares(one, wide)
    k.sum_squares(one, low)
    for kernel, grid, _, args in found:
        if kernel != "add_up":
            assert args[-1] == MANY and 4096 * grid[0] >= MANY > 4096 * (grid[0] - 1), kernel


@needs_the_processor
def test_muon_s_momentum_has_its_sizes_in_a_table(started):
    k, found = started
    k.muon_momentum([large(k)], [large(k)], k.scalars(1), k.scalars(5))
    grid, args = next((grid, args) for kernel, grid, _, args in found if kernel == "muon_momentum")
    assert 4096 * grid[0] >= MANY and grid[1] == 1
    tables = [k.to_host(each).tolist() for each in args if getattr(each, "dtype", None) == np.int64]
    assert [[0, 0, MANY]] in tables


@needs_the_processor
def test_rounding_at_random_behind_the_first_4_billion_elements_is_that_of_the_host():
    k = host_kernels("bfloat16")
    values = np.random.default_rng(1).standard_normal(3 * BLOCK).astype(np.float32)
    x = k.wide_zeros(values.size)
    k.put(x, values)
    for index, key in ((5, 7), ((1 << 31) + 3, (1 << 31) + 1), ((1 << 32) + 9, (1 << 32) - 1), (3 << 33, 0)):
        expected, found = np.zeros(values.size, np.uint16), k.zeros(values.size)
        dither(0, values.size, expected, values, index, key)
        k.wire.dither(found, x, index, key)
        np.testing.assert_array_equal(k.device.download(found), expected, err_msg=f"{index} {key}")


def test_activations_that_kernels_cannot_count_are_refused_with_what_helps(cuda_kernels):
    with pytest.raises(UsageError, match=r"2,147,483,648 elements.*smaller micro-batches"):
        cuda_kernels("bfloat16").launcher.each("elementwise", "add", 8, 1 << 31)
