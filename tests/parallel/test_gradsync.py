"""All ways to sum gradients give the weights of one Allreduce."""

import time
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from types import SimpleNamespace

import numpy as np
import pytest
from distgpt.core.base.errors import UsageError
from distgpt.core.config import GRAD_SYNCS, ModelConfig, RunConfig, TrainConfig
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.model.memory import ALIGNED, MATRIX, VECTOR, FlatBuffer, Layout, Spec
from distgpt.core.model.model import Architecture
from distgpt.core.model.optim import AdamW
from distgpt.core.ops.low_precision import from_bfloat16
from distgpt.core.train.gathering import EachRank
from distgpt.core.train.memory import fitting
from distgpt.core.train.parallel_strategy import Allreduce
from distgpt.parallel import overlapped
from distgpt.parallel import reductions as ways
from distgpt.parallel.choose import Chosen
from distgpt.parallel.loops import sums
from distgpt.parallel.loops.sums import dither
from distgpt.parallel.node_memory import SharedSum, bounds_of, gradients_in_node, one_by_one
from distgpt.parallel.overlapped import Overlapped
from distgpt.parallel.reductions import HostWire, ReduceScatterGather, hierarchical, tree_sum
from distgpt.parallel.reproducible import Tree, usual_parts
from distgpt.parallel.sharded import Shards, shards
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import CONFIG, MODEL, model_of, trained
from threadranks import on_all_ranks

from conftest import SMALL, inside, succeeded

SHARDED = replace(CONFIG, grad_sync="sharded")
ALONE = HostWire(one_by_one, 1)


@pytest.fixture(autouse=True, scope="module")
def small_pieces():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ways, "PIECE", 1000)
        patched.setattr(Overlapped, "least", 5000)
        patched.setattr(overlapped, "CACHED_BYTES", 8000)
        yield


def dithered(x, key=1):
    out = np.empty(len(x), np.uint16)
    dither(0, len(x), out, x, 0, key)
    return from_bfloat16(out)


def test_dither_is_unbiased():
    low, high = np.float32(1.0), np.float32(1.0078125)  # neighbours
    for share in (0.0, 0.1, 0.5, 0.9):
        x = np.full(40000, low + share * (high - low), np.float32)
        found = dithered(x)
        assert set(np.unique(found)) <= {low, high}
        assert abs((found == high).mean() - share) < 0.01, share
        assert (dithered(-x) == -found).all()
    values = np.random.default_rng(1).standard_normal(10000).astype(np.float32) * 1e-3
    assert abs(dithered(values) / values - 1).max() < 2**-7


def test_ranks_dither_differently():
    """With equal rounding, half of a sum of two would be a bfloat16."""

    def half(comm):
        flat = values(0, 2000)
        ReduceScatterGather(comm, flat, "bfloat16", 0, ALONE).reduce([0, 1008, 2000], step=1)
        return (flat[:1008] if comm.rank == 0 else flat[1008:]) / 2

    for found in on_all_ranks(2, half):
        assert (found.view(np.uint32) & 0xFFFF != 0).mean() > 0.1


def test_dither_keeps_infinities_and_nans():
    bits = np.array([0x7F800000, 0xFF800000, 0x7FFFFFFF, 0x7F800001, 0xFFC00000, 0x7F7FFFFF], np.uint32)
    for key in range(20):
        found = dithered(bits.view(np.float32), key)
        assert found[0] == np.inf and found[1] == -np.inf and np.isnan(found[2:5]).all()
        assert found[5] >= 3.38e38  # the largest float32 rounds to a neighbor or inf


def values(rank, size):
    return (np.random.default_rng(rank).standard_normal(size) * 10.0 ** (rank % 4)).astype(np.float32)


def in_order(parts):
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


def by_twos(parts):
    parts = list(parts)
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def of_nodes(rows, per_node):
    return in_order([in_order(rows[first : first + per_node]) for first in range(0, len(rows), per_node)])


def in_memory(comm, grads, threads=1, twos=False):
    k = CpuKernels(threads=threads)
    return SharedSum(comm, grads.rows, k.each, k.threads, twos)


def in_parts(wire, twos, comm, grads):
    return ReduceScatterGather(comm, grads.flat, wire, 0, ALONE, twos)


def levels_in(wire, comm, grads):
    def parts(comm, wire):
        return in_parts(wire, False, comm, grads)

    return hierarchical(comm, grads.flat, wire, parts) or parts(comm, wire)


def levels_in_memory(comm, grads):
    return hierarchical(comm, grads.flat, "float32", None, lambda node: in_memory(node, grads))


ONE_NODE = [(ranks, ranks) for ranks in (1, 2, 3, 4, 8)]
POWERS, SPREAD = [(1, 1), (2, 2), (4, 4), (8, 8)], [(4, 2), (6, 3), (6, 2)]
ANY = [*ONE_NODE, (2, 1), *SPREAD]
# The way to sum, jobs (ranks, ranks per node), and the exact result; None: up to rounding.
WAYS = {
    "allreduce": (lambda comm, grads: Allreduce(comm, grads.flat, piece=2000), ANY, None),
    "parts": (partial(in_parts, "float32", False), ANY, lambda rows, _: in_order(rows)),
    "parts by twos": (partial(in_parts, "float32", True), POWERS, lambda rows, _: by_twos(rows)),
    "parts in bfloat16": (partial(in_parts, "bfloat16", False), ANY, None),
    "levels": (partial(levels_in, "float32"), ANY, None),
    "levels in bfloat16": (partial(levels_in, "bfloat16"), ANY, None),
    "memory": (in_memory, ONE_NODE, lambda rows, _: in_order(rows)),
    "memory by twos": (partial(in_memory, threads=3, twos=True), POWERS, lambda rows, _: by_twos(rows)),
    "memory of nodes": (levels_in_memory, SPREAD, of_nodes),
}


def summed(comm, make, size, start, stop, steps=1):
    grads = gradients_in_node(comm, CpuKernels(), print, Layout([Spec("w", (size,))]), 0)
    way, found = make(comm, grads), []
    for step in range(steps):
        grads.flat[:size] = values(comm.rank, size)
        time.sleep(np.random.default_rng([comm.rank, step]).random() * 0.001)  # ranks come in any order
        way.sum(start, stop, step)
        found.append(grads.flat[:size].copy())
    return found


@pytest.mark.parametrize("name", WAYS)
@given(data=st.data())
@settings(max_examples=20)
def test_every_way_sums_only_its_stretch(name, data):
    make, jobs, reference = WAYS[name]
    ranks, per_node = data.draw(st.sampled_from(jobs))
    size = data.draw(st.sampled_from((1, 10, 100, 5003, 30000)))
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    rows = np.stack([values(rank, size) for rank in range(ranks)])
    found = on_all_ranks(ranks, lambda comm: summed(comm, make, size, start, stop)[0], per_node)
    inner = slice(start, stop)
    wanted = reference(rows, per_node) if reference else rows.astype(np.float64).sum(axis=0)
    near = 0 if reference else (2**-6 if "bfloat16" in name else 1e-6) * abs(rows).sum(axis=0)[inner] + 1e-12
    for rank, flat in enumerate(found):
        assert (flat[inner] == found[0][inner]).all() and (abs(flat[inner] - wanted[inner]) <= near).all()
        assert (flat[:start] == rows[rank, :start]).all() and (flat[stop:] == rows[rank, stop:]).all()


def test_step_does_not_overwrite_pending_sums():
    wanted = in_order([values(rank, 40) for rank in range(3)])
    for each in on_all_ranks(3, lambda comm: summed(comm, in_memory, 40, 0, 40, steps=200)):
        assert all((flat == wanted).all() for flat in each)


@given(start=st.integers(0, 20), size=st.integers(0, 2000), parts=st.integers(1, 9))
def test_parts_are_even_and_aligned(start, size, parts):
    bounds = bounds_of(start, start + size, parts)
    assert bounds[0] == start and bounds[-1] == start + size and len(bounds) == parts + 1
    assert all((bound - start) % 16 == 0 for bound in bounds[:-1])
    *sizes, last = [b - a for a, b in pairwise(bounds)]
    assert len({*sizes}) <= 1 and all(0 <= each <= last for each in sizes)  # required by NCCL
    assert last <= size / parts + 16 * parts


def overlapping(sum, between=lambda act: act()):
    return Overlapped(30000, SimpleNamespace(sum=sum), between, lambda: sum("flags", None, None), 0.5)


def test_buckets_are_sent_when_captured_pass_repeats():
    seen, recorded = [], []
    sync = overlapping(lambda *args: seen.append(args), recorded.append)
    for _ in range(2):  # versions of the pass
        recorded.clear()
        for final in (1000, 6000, 6500, 12000):
            sync.ready(final)
        for step in (4, 5):
            assert not seen
            sync.before_backward(step)
            for act in recorded:
                act()
            sync.sum_gradients(step)
            stretches = [(0, 6000, step), (6000, 12000, step), (12000, 30000, step)]
            assert seen == [*stretches, ("flags", None, None)]
            seen.clear()


def test_failed_bucket_raises_and_stops_sums():
    seen = []

    def fail(start, stop, step):
        seen.append(start)
        raise OSError("the network is gone")

    sync = overlapping(fail)
    sync.before_backward(0)
    sync.ready(10000)
    with pytest.raises(OSError, match="gone"):
        sync.sum_gradients(0)
    assert seen == [0]


@pytest.mark.parametrize("how", [{}, {"grad_sync": "sharded"}, {"gradient_dtype": "bfloat16"}, {"outer_every": 2}])
def test_gaps_between_tensors_stay_zero(how):
    odd = ModelConfig(vocab_size=63, seq_len=7, n_layer=1, n_head=1, n_embd=18, vocab_multiple=1)
    layout = Architecture(odd).layout
    assert all(start % ALIGNED == 0 for start in layout.offsets.values())
    used = np.zeros(layout.size, bool)
    for view in layout.views(used).values():
        assert not view.any()
        view[...] = True
    assert used.sum() == layout.elements < layout.size
    for work, (*_, weights), _ in on_all_ranks(2, lambda comm: trained(comm, replace(CONFIG, **how), kind=odd)):
        assert not weights[~used].any() and weights[used].any()
        optimizer = work.optimizer
        assert not any(moment.flat[~used[optimizer.own]].any() for moment in (optimizer.m, optimizer.v))


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
@pytest.mark.parametrize("ranks, per_node", [(1, 1), (2, 2), (3, 3), (4, 2)])
def test_modes_match_one_allreduce(ranks, per_node, wire, monkeypatch):
    """Results are bitwise identical on two ranks and in memory of a node, which sum in rank order."""
    with monkeypatch.context() as patched:
        patched.setattr(Chosen, "make_gradients", lambda self, comm, model, say: model.make_gradients())
        packed = on_all_ranks(ranks, trained, per_node)
    for mode in GRAD_SYNCS:
        config = replace(CONFIG, grad_sync=mode, gradient_dtype=wire)
        found = on_all_ranks(ranks, lambda comm, c=config: trained(comm, c), per_node)
        if mode == "allreduce" and wire == "float32" and per_node == ranks > 1:
            assert found[0][0].gradient_sync.name == "shared memory"
        for (work, (*_, weights), read), (known, (*_, wanted), known_read) in zip(found, packed, strict=True):
            assert (weights == found[0][1][-1]).all()
            in_order = ranks <= 2 or (mode == "allreduce" and per_node == ranks)
            if ranks == 1 or (wire == "float32" and in_order):
                own, moments = work.optimizer.own, (work.optimizer.m, work.optimizer.v)
                others = (known.optimizer.m, known.optimizer.v)
                assert (weights == wanted).all() and read == known_read, mode
                assert all((a.flat == b.flat[own]).all() for a, b in zip(moments, others, strict=True)), mode
            elif wire == "float32":
                assert abs(weights - wanted).max() <= 1e-5 * abs(wanted).max(), mode
                assert np.allclose(read, known_read, rtol=1e-5), mode
            else:
                assert (weights != wanted).any(), mode
                assert abs(np.array(read)[:, 0] / np.array(known_read)[:, 0] - 1).max() < 1e-3, mode
        if wire == "bfloat16" and per_node == ranks == 2:
            again = on_all_ranks(ranks, lambda comm, c=config: trained(comm, c))
            assert (again[0][1][-1] == found[0][1][-1]).all(), mode


@given(size=st.integers(1, 50000), ranks=st.integers(1, 6))
def test_shards_cover_the_layout(size, ranks):
    layout = Layout([Spec("w", (size,))])
    assert Chosen(CONFIG, ranks).placement.own(layout, 0) is None
    owned = [Chosen(SHARDED, ranks).placement.own(layout, rank) for rank in range(ranks)]
    if ranks == 1:
        assert owned == [None]
    else:
        assert owned == [slice(a, b) for a, b in pairwise(shards(SHARDED, layout, ranks))]
        assert owned[0].start == 0 and owned[-1].stop == layout.size
        assert all(part.start % 4096 == 0 for part in owned)


@given(start=st.integers(0, 60), stop=st.integers(0, 60))
def test_part_stretches_match_the_whole(start, stop):
    sizes = (("a", 10, MATRIX), ("b", 3, MATRIX), ("c", 5, VECTOR), ("d", 20, MATRIX))
    layout = Layout(Spec(name, (size,), group) for name, size, group in sizes)
    decayed = np.zeros((2, layout.size), int)
    for row, more in ((0, ()), (1, (slice(start, stop),))):
        for a, b, decay in layout.ranges(lambda spec: spec.is_matrix, *more):
            a, b = (a, b) if row == 0 else (a + start, b + start)
            decayed[row, a:b] = 1 + decay
    inside_part = slice(start, max(start, stop))
    assert (decayed[1, inside_part] == decayed[0, inside_part]).all()
    assert not decayed[1, :start].any() and not decayed[1, max(start, stop) :].any()


def test_moments_are_gathered_by_tensor():
    def gathered(comm, act):
        model = model_of()
        optimizer = AdamW(model, CONFIG, Chosen(SHARDED, comm.size).placement.own(model.layout, comm.rank))
        places = np.arange(model.layout.size, dtype=np.float32)
        optimizer.m.flat[...], optimizer.v.flat[...] = places[optimizer.own], -places[optimizer.own]
        gathering, found = Shards(comm, optimizer), {}
        tensors = gathering.groups(weights_alone=False)["optimizer"]
        gathering.on_root(lambda: act(tensors, found))
        return found, {name: view.copy() for name, view in model.layout.views(places).items()}

    def all_of_them(tensors, found):
        found.update({name: array.copy() for name, array in tensors.items()})

    (found, wanted), *others = on_all_ranks(3, lambda comm: gathered(comm, all_of_them))
    assert found.keys() == {prefix + name for prefix in ("m/", "v/") for name in wanted}
    for name, array in wanted.items():
        assert (found[f"m/{name}"] == array).all() and (found[f"v/{name}"] == -array).all()
    assert all(not other for other, _ in others)

    def fail(tensors, found):
        assert tensors["m/wte"].size
        raise UsageError("the disk is full")

    assert [str(error) for error in on_all_ranks(3, lambda comm: gathered(comm, fail))] == ["the disk is full"] * 3


def test_rank_0_saves_the_exchange_state_of_each_rank():
    def saved(comm):
        sync = SimpleNamespace(saved={"rest": np.full(3, comm.rank + 1, np.float32)})
        state = EachRank(comm, sync, SimpleNamespace(kernels=CpuKernels("float32", 1)))
        return [state.gathered(f"{rank}/rest").tolist() for rank in range(comm.size)]

    assert on_all_ranks(3, saved)[0] == [[1.0] * 3, [2.0] * 3, [3.0] * 3]


PARTS = replace(CONFIG, batch_size=16, reproducible_parts=8, grad_accum=0, matmul="auto")


def units_of(count, size):
    scales = np.float32(10.0) ** np.random.default_rng(1).integers(-4, 4, (count, 1))
    return (np.random.default_rng(2).standard_normal((count, size)) * scales).astype(np.float32)


@pytest.mark.parametrize("count, threads", [(1, 1), (2, 1), (4, 2), (8, 1), (16, 2)])
def test_tree_of_units_on_one_rank(count, threads):
    layout = Layout([Spec("a", (9001,))])
    units, kernels = units_of(count, layout.size + 1), CpuKernels(threads=threads)
    grads = FlatBuffer(layout, kernels.accum_zeros, flags=3)
    tree = Tree(grads, kernels, count)
    for _ in range(2):  # its memory is used again
        grads.flags[1:] = 7
        for number, unit in enumerate(units):
            grads.with_flags[: layout.size + 1] = unit
            tree.add(number)
        assert (grads.with_flags[: layout.size + 1] == by_twos(units)).all() and (grads.flags[1:] == 7).all()
    assert count <= 2 or (by_twos(units) != units.sum(0)).any()  # another order gives other bits


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_tree_over_ranks(count):
    parts = units_of(count, 10007)
    total, taken = np.full(10007, np.nan, np.float32), parts.copy()
    sums.add_tree(0, 5000, total, taken)
    sums.add_tree(5000, 10007, total, taken)
    assert (total == by_twos(parts)).all()

    def summed(comm):
        value = parts[comm.rank, :1].copy()
        tree_sum(comm, value)
        return value[0]

    assert on_all_ranks(count, summed) == [by_twos(parts[:, :1])[0]] * count


def bits(ranks, threads=1, **how):
    config = replace(PARTS, **how)
    config = replace(config, grad_accum=config.reproducible_parts // ranks or 1)

    def act(comm):
        work, _, read = trained(comm, config, steps=4, threads=threads)
        model = work.model
        if work.optimizer.is_part:  # weights in full precision stay with their owner
            comm.all_gather(model.weights.flat, shards(config, model.layout, comm.size))
        return read, model.weights.flat.tobytes()

    return on_all_ranks(ranks, act)


@pytest.mark.ci
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_results_are_identical_for_any_ranks_and_threads(dtype, monkeypatch):
    monkeypatch.setattr(ways, "PIECE", 3000)
    (wanted,) = bits(1, dtype=dtype)
    for (ranks, threads), sync in product(((1, 2), (2, 1), (2, 2), (4, 1), (8, 1)), ("allreduce", "sharded")):
        assert bits(ranks, threads, dtype=dtype, grad_sync=sync) == [wanted] * ranks, (ranks, threads, sync)
    large = {"dtype": dtype, "batch_size": 128}  # enough sequences of a unit for all lanes of a vector
    (alone,) = bits(1, **large)
    assert bits(1, 2, **large) == [alone] and bits(2, 1, **large) == [alone] * 2
    (usual,) = bits(1, dtype=dtype, reproducible_parts=0)
    assert usual[1] != wanted[1] and np.allclose(usual[0], wanted[0], rtol=1e-5 if dtype == "float32" else 2e-2)


def test_units_decide_micro_batches_and_matmul():
    assert TrainConfig(reproducible_parts=4).matmul_backend == "own" and TrainConfig().matmul_backend == "auto"
    assert TrainConfig(reproducible_parts=4, matmul="blas").matmul_backend == "blas"
    assert [usual_parts(batch) for batch in (1, 6, 12, 16, 24)] == [1, 2, 4, 8, 8]
    run = RunConfig(model=MODEL, train=replace(PARTS, grad_accum=2))
    for ranks in (1, 2, 8):
        assert fitting(run, CpuKernels(), Chosen(run.train, ranks), 1 << 40, "here")[0].grad_accum == 8 // ranks


def test_deterministic_flag_becomes_a_setting(tmp_path):
    succeeded("train", *SMALL, "--steps", "3", "--deterministic", "--out", tmp_path / "run")
    saved = (tmp_path / "run" / "config.toml").read_text()
    assert "reproducible_parts = 8" in saved and 'matmul = "auto"' in saved
    (tmp_path / "my.toml").write_text("reproducible_parts = 2")
    words = [*SMALL, "--steps", "3", "--config", tmp_path / "my.toml", "--grad-accum", "4"]
    result = inside("train", *words, "--deterministic", "--out", tmp_path / "two")
    assert "--grad-accum 4" in result.stdout and result.returncode == 0  # has no effect
    assert "reproducible_parts = 2" in (tmp_path / "two" / "config.toml").read_text()
    again = [*SMALL, "--out", tmp_path / "two", "--resume", "auto", "--steps", "5", "--grad-accum", "0"]
    result = inside("train", *again, "--reproducible-parts", "0")
    assert result.returncode == 0 and "micro-batches" not in result.stdout
    result = inside("train", *SMALL, "--reproducible-parts", "3", "--out", tmp_path / "other")
    assert result.returncode == 2 and "--reproducible-parts" in result.stderr and not (tmp_path / "other").exists()
