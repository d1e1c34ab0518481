"""The GPU's kernels against the reference, in all types; without a GPU, on this machine's processor."""

import itertools

import numpy as np
import operations
import pytest
from devices import ON_GPU, cuda_kernels  # noqa: F401
from distgpt.core.ops.kernels import Kernels
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
    k = cuda_kernels.__wrapped__("float32")  # new ones: those of other tests have kept some
    operations.check_memory_to_orthogonalise(
        k, lambda: [kept.nbytes for key, kept in k._launcher._scratch.items() if key[0] == "orthogonalise"]
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
                on._device.launch("matmul", kernel, on._launcher._defines, grid, (16, 16), (out, a, b, *sizes))

        case.check(work, [(pairs, m, n)], case.random(pairs, m, k), case.random(pairs, k, n), strict=0.5)
