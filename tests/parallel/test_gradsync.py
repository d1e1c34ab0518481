"""Gradients are summed in many ways, and the weights are those of one Allreduce."""

import json
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from types import SimpleNamespace

import numpy as np
import pytest
from distgpt.core.base.errors import UsageError
from distgpt.core.config import GRAD_SYNCS, ModelConfig, TrainConfig
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.data.batches import ArrayTokens, Batches
from distgpt.core.model.memory import ALIGNED, MATRIX, VECTOR, Layout, Spec
from distgpt.core.model.model import Architecture, Model
from distgpt.core.model.optim import AdamW
from distgpt.core.ops.low_precision import from_bfloat16
from distgpt.core.train.plan import refuse_unsuited
from distgpt.core.train.sharing import Allreduce
from distgpt.parallel import overlapped
from distgpt.parallel import reductions as ways
from distgpt.parallel.choose import Chosen
from distgpt.parallel.loops.sums import dither
from distgpt.parallel.node_memory import bounds_of, one_by_one
from distgpt.parallel.overlapped import Overlapped
from distgpt.parallel.reductions import HostWire, ReduceScatterGather, hierarchical
from distgpt.parallel.sharded import Shards, shards
from steps import build_step, state_for
from threadranks import on_all_ranks

from conftest import SMALL, inside, losses, needs_mpi, train

MODEL = ModelConfig(vocab_size=64, seq_len=8, n_layer=3, n_head=2, n_embd=32)
CONFIG = TrainConfig(batch_size=24, grad_accum=2, seed=3, recompute="mlp", matmul="own", clip=0.5)
SHARDED = replace(CONFIG, grad_sync="sharded")
STEPS = 5
ALONE = HostWire(one_by_one, 1)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(ways, "PIECE", 1000)
    monkeypatch.setattr(Overlapped, "least", 5000)
    monkeypatch.setattr(overlapped, "CACHED_BYTES", 8000)


# -- what travels


def dithered(x, key=1, index=0):
    out = np.empty(len(x), np.uint16)
    dither(0, len(x), out, x, index, key)
    return from_bfloat16(out)


def test_bfloat16_is_rounded_to_either_side_and_right_on_average():
    low, high = np.float32(1.0), np.float32(1.0078125)  # neighbours
    for share in (0.0, 0.1, 0.5, 0.9):
        x = np.full(40000, low + share * (high - low), np.float32)
        found = dithered(x)
        assert set(np.unique(found)) <= {low, high}
        assert abs((found == high).mean() - share) < 0.01, share
        assert (dithered(-x) == -found).all()
    values = np.random.default_rng(1).standard_normal(10000).astype(np.float32) * 1e-3
    assert abs(dithered(values) / values - 1).max() < 2**-7


def test_ranks_round_the_same_numbers_differently():
    """Else their roundings would add up, and half of a sum of two would be a bfloat16 again."""

    def half(comm):
        flat = values(0, 2000)
        ReduceScatterGather(comm, flat, "bfloat16", 0, ALONE).reduce([0, 1008, 2000], step=1)
        return (flat[:1008] if comm.rank == 0 else flat[1008:]) / 2

    for found in on_all_ranks(2, half):
        assert (found.view(np.uint32) & 0xFFFF != 0).mean() > 0.1


def test_what_is_not_finite_stays_so():
    bits = np.array([0x7F800000, 0xFF800000, 0x7FFFFFFF, 0x7F800001, 0xFFC00000, 0x7F7FFFFF], np.uint32)
    for key in range(20):
        found = dithered(bits.view(np.float32), key)
        assert found[0] == np.inf and found[1] == -np.inf and np.isnan(found[2:5]).all()
        assert found[5] >= 3.38e38  # the largest float32 becomes a neighbour, of which one is inf


# -- ways to sum


def values(rank, size):
    return np.random.default_rng(rank).standard_normal(size).astype(np.float32)


def summed(comm, size, make):
    flat = values(comm.rank, size)
    make(comm, flat).sum(7, size - 3, step=2)
    return flat


def parts_in(wire):
    return lambda comm, flat: ReduceScatterGather(comm, flat, wire, 0, ALONE)


def levels_in(wire):
    def make(comm, flat):
        parts = parts_in(wire)(comm, flat)
        return hierarchical(comm, flat, wire, lambda comm, wire: parts_in(wire)(comm, flat)) or parts

    return make


WAYS = [
    (partial(Allreduce, piece=2000), "float32"),
    *((make(wire), wire) for make in (parts_in, levels_in) for wire in ("float32", "bfloat16")),
]


@pytest.mark.parametrize("number", range(len(WAYS)))
def test_every_way_adds_up_the_stretch_and_nothing_else(number):
    make, wire = WAYS[number]
    for (ranks, per_node), size in product(((1, 1), (2, 1), (2, 2), (3, 1), (4, 2), (6, 3)), (10, 40, 5003)):
        found = on_all_ranks(ranks, lambda comm, size=size: summed(comm, size, make), per_node)
        expected = sum(values(rank, size).astype(np.float64) for rank in range(ranks))
        scale = sum(abs(values(rank, size)) for rank in range(ranks))
        tolerance = (1e-6 if wire == "float32" else 2**-6) * scale + 1e-12
        for rank, flat in enumerate(found):
            assert (flat[7:-3] == found[0][7:-3]).all(), (ranks, size)  # to the bit
            assert (abs(flat[7:-3] - expected[7:-3]) <= tolerance[7:-3]).all(), (ranks, size)
            assert (flat[:7] == values(rank, size)[:7]).all() and (flat[-3:] == values(rank, size)[-3:]).all()


def test_parts_are_even_and_begin_at_lines():
    for start, stop, parts in product((0, 7), (7, 8, 100, 1000), (1, 2, 3, 7)):
        bounds = bounds_of(start, stop, parts)
        assert bounds[0] == start and bounds[-1] == stop and len(bounds) == parts + 1
        assert all(a <= b for a, b in pairwise(bounds))
        assert all((bound - start) % 16 == 0 for bound in bounds[:-1] if bound != stop)
        *sizes, last = [b - a for a, b in pairwise(bounds)]
        assert len({*sizes}) <= 1 and all(size <= last for size in sizes), "as NCCL wants them"
        assert last <= (stop - start) / parts + 16 * parts


def test_buckets_leave_when_a_recorded_pass_is_repeated_not_while_it_is_written_down():
    seen, recorded = [], []
    sums = SimpleNamespace(sum=lambda start, stop, step: seen.append((start, stop, step)))
    sync = Overlapped(30000, sums, recorded.append, lambda: seen.append("rest"), 0.5)
    for version in range(2):  # of the pass: rows without a target need another one
        recorded.clear()
        for final in (1000, 6000, 6500, 12000):
            sync.ready(final)
        for step in (4, 5):
            assert not seen, version
            sync.before_backward(step)
            for act in recorded:
                act()
            sync.sum_gradients(step)
            assert seen == [(0, 6000, step), (6000, 12000, step), (12000, 30000, step), "rest"]
            seen.clear()


def test_a_failure_of_a_bucket_reaches_the_caller():
    seen = []

    def fail(start, stop, step):
        seen.append(start)
        raise OSError("the network is gone")

    sums = SimpleNamespace(sum=fail)
    sync = Overlapped(30000, sums, lambda act: act(), lambda: seen.append("rest"), 0.5)
    sync.before_backward(0)
    sync.ready(10000)
    with pytest.raises(OSError, match="gone"):
        sync.sum_gradients(0)
    assert seen == [0]


# -- steps of training


def trained(comm, steps=STEPS, kind=MODEL, **how):
    """Weights and moments after some steps."""
    config = replace(CONFIG, **how)
    model = Model(Architecture(kind), CpuKernels("float32"))
    model.allocate_master_weights(comm.size)
    model.initialise(1)
    batches = Batches(
        ArrayTokens(np.arange(700, dtype=np.uint16) * 7 % kind.vocab_size), kind.seq_len, config.batch_size, config.seed
    )
    state = state_for(model, config, comm)
    work, optimizer = build_step(state, comm, config), state.optimizer
    read = [work.launch(step, batches).wait()[:2] for step in range(steps)]
    moments = [optimizer.m.flat.copy(), optimizer.v.flat.copy()]
    return model.weights.flat.copy(), moments, read, optimizer.own


@pytest.mark.parametrize("how", [{}, {"grad_sync": "sharded"}, {"gradient_dtype": "bfloat16"}, {"outer_every": 2}])
def test_what_lies_between_tensors_of_odd_sizes_stays_zero(how):
    odd = ModelConfig(vocab_size=63, seq_len=7, n_layer=1, n_head=1, n_embd=18, vocab_multiple=1)
    layout = Architecture(odd).layout
    assert all(start % ALIGNED == 0 for start in layout.offsets.values())
    used = np.zeros(layout.size, bool)
    for view in layout.views(used).values():
        assert not view.any()
        view[...] = True
    assert used.sum() == layout.elements < layout.size
    for weights, moments, _, own in on_all_ranks(2, lambda comm: trained(comm, kind=odd, **how)):
        assert not weights[~used].any() and weights[used].any()
        assert not any(moment[~used[own]].any() for moment in moments)


@pytest.mark.parametrize("ranks, per_node", [(1, 1), (2, 2), (3, 1), (4, 2)])
def test_every_mode_gives_the_weights_of_packed(ranks, per_node):
    """To the bit on two ranks, where nothing can be added in another order."""
    packed = on_all_ranks(ranks, lambda comm: trained(comm), per_node)
    for mode in GRAD_SYNCS:
        found = on_all_ranks(ranks, lambda comm, mode=mode: trained(comm, grad_sync=mode), per_node)
        for (weights, moments, read, own), (wanted, others, known, _) in zip(found, packed, strict=True):
            assert (weights == found[0][0]).all()
            if ranks <= 2:
                assert (weights == wanted).all() and read == known, mode
                assert all((a == b[own]).all() for a, b in zip(moments, others, strict=True)), mode
            assert abs(weights - wanted).max() <= 1e-5 * abs(wanted).max(), mode
            assert np.allclose(read, known, rtol=1e-5), mode


@pytest.mark.parametrize("mode", GRAD_SYNCS)
def test_bfloat16_on_the_wire_is_near_and_the_same_every_time(mode):
    packed = on_all_ranks(2, lambda comm: trained(comm))
    found, again = (
        on_all_ranks(2, lambda comm: trained(comm, grad_sync=mode, gradient_dtype="bfloat16")) for _ in range(2)
    )
    assert (found[0][0] == found[1][0]).all() and (found[0][0] == again[0][0]).all()
    assert (found[0][0] != packed[0][0]).any()
    losses, known = (np.array(each[0][2])[:, 0] for each in (found, packed))
    assert abs(losses / known - 1).max() < 1e-3


def test_shards_cover_everything_and_only_sharded_has_them():
    for size, ranks in product((16, 4096, 50000), (1, 2, 5)):
        layout = Layout([Spec("w", (size,))])
        owned = [Chosen(SHARDED, ranks).placement.own(layout, rank) for rank in range(ranks)]
        if ranks == 1:
            assert owned == [None]
            continue
        assert owned == [slice(a, b) for a, b in pairwise(shards(SHARDED, layout, ranks))]
        assert owned[0].start == 0 and owned[-1].stop == size
        assert all(part.start % 4096 == 0 or part.start == size for part in owned)
    assert Chosen(CONFIG, 2).placement.own(layout, 0) is None


def test_stretches_of_a_part_are_those_of_the_whole():
    sizes = (("a", 10, MATRIX), ("b", 3, MATRIX), ("c", 5, VECTOR), ("d", 20, MATRIX))
    layout = Layout(Spec(name, (size,), group) for name, size, group in sizes)

    def decays(spec):
        return spec.is_matrix

    decayed = np.zeros(layout.size, int)
    for start, stop, decay in layout.ranges(decays):
        decayed[start:stop] = 1 + decay
    for start, stop in product(range(0, 38, 3), range(0, 39, 4)):
        found = np.zeros(max(0, stop - start), int)
        for a, b, decay in layout.ranges(decays, slice(start, stop)):
            found[a:b] = 1 + decay
        assert (found == decayed[start:stop]).all()


def test_moments_are_gathered_tensor_by_tensor_and_an_error_reaches_all():
    def gathered(comm, act):
        model = Model(Architecture(MODEL), CpuKernels("float32"))
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


def test_what_does_not_go_together_is_refused(tmp_path):
    wide = TrainConfig(gradient_dtype="bfloat16", dtype="float64")
    refuse_unsuited(wide, 1, on_gpu=True)
    with pytest.raises(UsageError, match="float64"):
        refuse_unsuited(wide, 2, on_gpu=False)
    for mode, kind in product(GRAD_SYNCS, ("float32", "bfloat16")):
        refuse_unsuited(TrainConfig(grad_sync=mode, gradient_dtype=kind), 2, on_gpu=True)
    assert inside("train", *SMALL, "--grad-sync", "all", "--out", tmp_path / "run").returncode == 2


def test_what_this_job_s_mpi_cannot_do_is_refused_before_the_first_step():
    def refused(ranks, words, on_gpu=True, **how):
        def act(comm):
            comm.is_threadsafe = comm.rank == 0
            Chosen(TrainConfig(**how), comm.size).refuse_unable(comm, on_gpu)

        return [words in str(found) for found in on_all_ranks(ranks, act)]

    assert refused(2, "MPI_THREAD_MULTIPLE", on_gpu=False, grad_sync="overlapped") == [True] * 2
    assert refused(1, "MPI_THREAD_MULTIPLE", on_gpu=False, grad_sync="overlapped") == [False]


# -- whole runs


@pytest.mark.ranks
@pytest.mark.slow
@needs_mpi
def test_sharded_runs_save_resume_and_move_to_other_modes_and_numbers_of_ranks(tmp_path):
    from test_mpi import trained_together

    words = ["--n-embd", "64", "--schedule", "constant", "--save-every", "3"]
    runs = [(tmp_path / "whole", ["--steps", "9", *words])]
    for first, then in (("sharded", "sharded"), ("allreduce", "sharded"), ("sharded", "overlapped")):
        out = tmp_path / f"{first}-{then}"
        runs.append((out, ["--steps", "5", "--grad-sync", first, *words]))
        runs.append((out, ["--steps", "9", "--resume", "auto", "--grad-sync", then, *words]))
    trained_together(2, runs)
    whole = losses(tmp_path / "whole")
    for out in {out for out, _ in runs}:
        assert losses(out) == whole, out
    run = train(tmp_path / "sharded-sharded", "--steps", "12", "--resume", "auto", *words)
    assert losses(run)[:9] == whole and len(losses(run)) == 12


@pytest.mark.ranks
@pytest.mark.slow
@needs_mpi
def test_four_ranks_that_mpi_takes_for_two_nodes(tmp_path, monkeypatch):
    from test_mpi import trained_together

    monkeypatch.setenv("MPIR_CVAR_NUM_CLIQUES", "2")  # MPICH's
    ways = {"alone": ["--grad-sync", "sharded"], "levels": [], "narrow": ["--gradient-dtype", "bfloat16"]}
    trained_together(4, [(tmp_path / name, ["--steps", "16", *words]) for name, words in ways.items()])
    alone, levels, narrow = (np.array(losses(tmp_path / name)) for name in ways)
    assert abs(levels / alone - 1).max() < 1e-5 and 0 < abs(narrow / alone - 1).max() < 1e-2
    names = [json.loads((tmp_path / name / "summary.json").read_text())["allreduce"] for name in ways]
    assert names == ["sharded", "hierarchical", "hierarchical, bfloat16"]
