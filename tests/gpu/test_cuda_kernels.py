import itertools
from dataclasses import replace

import numpy as np
import operations
import pytest
from devices import ON_GPU, cuda_kernels, needs_the_processor  # noqa: F401
from distgpt.core.base.errors import UsageError
from distgpt.core.config import TrainConfig
from distgpt.core.config.presets import preset
from distgpt.core.model.model import Architecture, Model
from distgpt.core.model.muon import Muon
from distgpt.core.model.passes import Pass
from distgpt.core.ops.api import AdamConstants, AdamState, MuonMatrix, NesterovState
from distgpt.core.ops.kernels import Kernels
from distgpt.gpu import muon
from distgpt.gpu.device import BLOCK
from distgpt.parallel.loops.sums import dither
from hostgpu import BACKWARDS, FORWARDS, host_kernels
from operations import *  # noqa: F403
from operations import Case, Wide

from models import batch


# test_cuda_model.py compares whole models in float32.
@pytest.fixture(params=["float64", pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def both(request, cuda_kernels):
    return Kernels("float64"), cuda_kernels(request.param)


@pytest.fixture(autouse=True)
def few_shapes(monkeypatch):
    """Use only the smallest and an odd shape on emulated GPUs."""
    if not ON_GPU:
        monkeypatch.setattr(operations, "SHAPES", operations.SHAPES[1:3])


@pytest.mark.ci
@pytest.mark.parametrize("dtype, channels", [("float64", 1032), ("float32", 1101), ("bfloat16", 8200)])
def test_wide_norms_match_reference(dtype, channels, cuda_kernels):
    both = Kernels("float64"), cuda_kernels(dtype)
    operations.check_norms(Case(both, (1, 5, channels, 1, 5)), (True, True, True), residual=True)


def test_long_cross_entropy_matches_reference(both):
    operations.check_cross_entropy(Case(both, (1, 3, 8, 1, 20_005)), 2, False)


def test_orthogonalise_memory_matches_prediction(cuda_kernels):
    k, kept = cuda_kernels.__wrapped__("float32"), {}  # new kernels, without scratch memory
    scratch = k.launcher.scratch
    k.launcher.scratch = lambda *args: kept.setdefault(args[:2], scratch(*args))
    operations.check_memory_to_orthogonalise(
        k, lambda: [array.nbytes for (name, _), array in kept.items() if name == "orthogonalise"]
    )


def test_tokens_are_sorted_stably(cuda_kernels):
    for rows, vocab in itertools.product((1, 257, 20_000), (2, 65_537)):
        kernels, random = cuda_kernels("float32"), np.random.default_rng(rows)
        drawn = np.minimum(random.zipf(1.2, rows) - 1, vocab - 1).astype(np.int32)
        order = kernels.to_host(kernels.sort_tokens(kernels.integers(drawn), vocab).order)
        np.testing.assert_array_equal(order, np.argsort(drawn, kind="stable"), err_msg=f"{rows} of {vocab}")


@pytest.mark.parametrize("vocab", [3, 70_001])
def test_frequent_tokens_gradients_match_reference(both, vocab):
    case = Case(both, (3, 1000, 8, 1, vocab))
    drawn = np.minimum(case.rng.zipf(1.3, case.n) - 1, vocab - 1).astype(np.int32)
    dwte, dx = np.zeros((vocab, case.c)), case.random(case.n, case.c)
    case.check(operations.embed_backward, [Wide(dwte), None], dx, drawn, case.t)


def test_textbook_matmuls_match_numpy(both):
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


# Launches for more than 2^31 elements are checked without allocating the memory.
MANY = (3 << 30) + 5


@pytest.fixture
def started(monkeypatch):
    """Return kernels that compute nothing, and the list of their launches."""
    k, found = host_kernels("bfloat16"), []

    def started(function, grid, block, args, shared):
        found.append((function.name, grid, block, args))
        return lambda: None

    monkeypatch.setattr(k.device.xp, "started", started)
    return k, found


def large(k, dtype=np.float32):
    """Return an array of MANY elements that needs memory for one."""
    one = k.accum_zeros(1)
    one.memory = np.broadcast_to(np.zeros((), dtype), (MANY,))
    one.dtype, one.shape, one.size = one.memory.dtype, (MANY,), MANY
    return one


@needs_the_processor
def test_flat_operations_count_beyond_int32(started):
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
def test_muon_momentum_counts_beyond_int32(started):
    k, found = started
    k.muon_momentum([large(k)], [large(k)], k.scalars(1), k.scalars(5))
    grid, args = next((grid, args) for kernel, grid, _, args in found if kernel == "muon_momentum")
    assert 4096 * grid[0] >= MANY and grid[1] == 1
    tables = [k.to_host(each).tolist() for each in args if getattr(each, "dtype", None) == np.int64]
    assert [[0, 0, MANY]] in tables


@needs_the_processor
def test_dither_beyond_4_billion_elements_matches_host():
    k = host_kernels("bfloat16")
    values = np.random.default_rng(1).standard_normal(3 * BLOCK).astype(np.float32)
    x = k.accum_zeros(values.size)
    k.put(x, values)
    for index, key in ((5, 7), ((1 << 31) + 3, (1 << 31) + 1), ((1 << 32) + 9, (1 << 32) - 1), (3 << 33, 0)):
        expected, found = np.zeros(values.size, np.uint16), k.zeros(values.size)
        dither(0, values.size, expected, values, index, key)
        k.wire.dither(found, x, index, key)
        np.testing.assert_array_equal(k.device.download(found), expected, err_msg=f"{index} {key}")


def test_oversized_activations_are_rejected(cuda_kernels):
    with pytest.raises(UsageError, match=r"2,147,483,648 elements.*smaller micro-batches"):
        cuda_kernels("bfloat16").launcher.each("elementwise", "add", 8, 1 << 31)


# Odd sizes, multiple tiles, equal shapes in both orientations, and a single shape.
SIDES = [(70, 40), (40, 70), (24, 24), (50, 33), (40, 70), (24, 24), (70, 130), (24, 24), (70, 40)]


def launches_of_muon(layers, **how):
    """Count the launches of Muon in a step of gpt2-fast. The width does not matter."""
    config = replace(preset("gpt2-fast").model, n_layer=layers, n_embd=24, n_head=3, vocab_size=13, seq_len=8, **how)
    k = host_kernels("bfloat16", graphs=False)
    model = Model(Architecture(config), k)
    model.allocate_master_weights()
    model.initialise(1)
    optimizer = Muon(model, TrainConfig(optimizer="muon", lr=0.02))
    tokens, targets = map(k.integers, batch(config, 2, 8))
    Pass(model, 2, 8, training=True).loss_and_gradients(tokens, targets, 1.0, accumulate=False)
    optimizer.compute_norm()
    k.device.synchronize()
    lt = k.matmuls.lt.library
    k.device.xp.launches.clear()
    before = lt.started
    optimizer.prepare(0, 0.02, 1.0, 1.0)
    optimizer.apply()
    k.device.synchronize()
    own = [each for each in k.device.xp.launches if each.source != "optimizer"]  # without AdamW
    return len(own) + lt.started - before


@pytest.mark.ci
@needs_the_processor
@pytest.mark.parametrize("how", [{}, {"norm_gain": True}], ids=["gpt2-fast", "gains between the matrices"])
def test_muon_launches_do_not_grow_with_layers(how):
    assert launches_of_muon(5, **how) == launches_of_muon(3, **how) <= 63


def test_muon_batches_fit_the_memory_limit(monkeypatch, cuda_kernels):
    k, shapes = cuda_kernels("float32"), [(24, 40)] * 7
    whole = k.orthogonalise_bytes(shapes)
    monkeypatch.setattr(muon, "MOST_BYTES", whole // 2)
    rooms = [k.orthogonalise_bytes(shapes[:n]) for n in range(1, 8)]
    assert rooms == sorted(rooms) and rooms[-1] == rooms[2] <= whole // 2
    monkeypatch.setattr(muon, "MOST_BYTES", 1)
    assert k.orthogonalise_bytes(shapes) == rooms[0]


def updates_of(k):
    rng, made = np.random.default_rng(0), [k.accum_zeros(*shape) for shape in SIDES]
    for u in made:
        k.put(u, rng.standard_normal(u.shape))
    return made


def on_host(k, arrays):
    return [np.array(k.to_host(x), np.float64) for x in arrays]


@pytest.mark.parametrize("most", [muon.MOST_BYTES, 40_000])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_batched_orthogonalise_matches_reference(dtype, most, monkeypatch, cuda_kernels):
    monkeypatch.setattr(muon, "MOST_BYTES", most)
    k, plain = cuda_kernels(dtype), Kernels("float64")
    together, alone, expected = updates_of(k), updates_of(k), updates_of(plain)
    plain.orthogonalise(expected)
    k.orthogonalise(together)
    for u in alone:
        k.orthogonalise([u])
    for some, one, right in zip(on_host(k, together), on_host(k, alone), expected, strict=True):
        assert np.linalg.norm(some - right) < 3 * operations.tolerance(k) * np.linalg.norm(right), right.shape
        if not ON_GPU:  # the library may use another algorithm per batch
            np.testing.assert_array_equal(some, one)


def stepped(k, low):
    """Return p, its copy and v after a step."""
    rng, matrices = np.random.default_rng(0), []
    for shape in SIDES:
        p, u, v = k.accum_zeros(*shape), k.accum_zeros(*shape), k.accum_zeros(max(shape))
        for array in (p, u):
            k.put(array, rng.standard_normal(shape))
        k.put(v, rng.standard_normal(max(shape)) ** 2)
        matrices.append(MuonMatrix(p, k.zeros(*shape) if low else None, v, u))
    norm, scalars = k.scalars(1), k.scalars(5)
    k.put(norm, np.array([3.0]).view(operations.Scalars))
    k.put(scalars, np.array([0.5, 0.7, 0.9, 1e-2, 0.3]).view(operations.Scalars))
    k.muon(matrices, norm, scalars, 0.95)
    return on_host(k, [x for each in matrices for x in (each.p, each.v, each.low) if x is not None])


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_muon_step_matches_reference(dtype, cuda_kernels):
    k, low = cuda_kernels(dtype), dtype == "bfloat16"
    for found, right in zip(stepped(k, low), stepped(Kernels("float64"), low), strict=True):
        np.testing.assert_allclose(found, right, rtol=0, atol=operations.tolerance(k) * np.abs(right).max())


@needs_the_processor
def test_thread_order_changes_no_bit_of_muon():
    found = []
    for order in (FORWARDS, BACKWARDS, 2):
        k = host_kernels("float32", order=order)
        updates = updates_of(k)
        k.orthogonalise(updates)
        found.append([*on_host(k, updates), *stepped(k, False)])
    for other in found[1:]:
        for some, first in zip(other, found[0], strict=True):
            np.testing.assert_array_equal(some, first)
