"""`distgpt profile`: what operations cost, and how the time of every worker is accounted for."""

from functools import partial
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.model.counts import BACKWARD, operations
from distgpt.core.ops.api import Affine, AttentionMask, Head
from distgpt.core.ops.kernels import Kernels
from distgpt.measure.profile import operations as ops
from distgpt.measure.profile.recorder import Event, Recorder, Region, Taken, Timer, account
from profiling import job, profiled, times
from threadranks import on_all_ranks

WAYS = ("forward", "backward into input", "backward into weights")
# Of the vocabulary, what makes arrays, reads them, or organises the work.
NO_OPERATIONS = {"zeros", "accum_zeros", "scalars", "integers", "to_host", "later", "free_memory", "record", "between"}
NO_OPERATIONS |= {"agree", "orthogonalise_bytes", "each", "run_together", "join"}


# What is counted


def test_every_operation_has_a_cost_and_a_row():
    calls = {name for name, value in vars(Kernels).items() if callable(value) and not name.startswith("_")}
    assert set(ops.OPERATIONS) == calls - NO_OPERATIONS
    made = {*ops.ROW_OF.values(), *ops.WITHOUT_MATMULS.values(), ops.WORKERS}
    assert made == set(ops.ORDER)


def test_matmuls_are_counted_as_estimates_count_them():
    modern = {"positions": "rope", "norm": "rmsnorm", "mlp": "swiglu", "tied": True}
    for changes, (threads, batch_size) in product(({}, modern), ((1, 8), (2, 8), (2, 3))):  # 3: without slices
        step, batches = job(threads, batch_size=batch_size, **changes)
        profiler, _ = profiled(step, batches, steps=2)
        expected, tokens = operations(step.model), 2 * batch_size * step.model.config.seq_len
        flops = times(profiler, "flops")
        whole = tokens * (1 + BACKWARD) * expected.forward
        assert sum(flops.values()) == pytest.approx(whole, rel=1e-9), (changes, threads, batch_size)
        for row, each in (
            *((f"Matmul {way}", expected.layers + expected.head) for way in WAYS),
            ("Attention forward", expected.attention),
        ):
            assert flops[row] == pytest.approx(tokens * each), (row, changes, threads, batch_size)


def test_flops_are_those_of_the_arguments():
    k = CpuKernels()
    x, y, w, b = k.zeros(6, 4), k.zeros(6, 10), k.zeros(10, 4), k.zeros(10)
    ids, head = np.zeros(6, np.int32), Head(w, k.zeros(6, 10), 8)
    for name, expected, *args in (
        ("linear", 480, y, x, Affine(w, b)),
        ("linear_backward_weights", 480, Affine(w, b), y, x, False),
        ("embed", 0, x, ids, w, w, 3, None),
        ("attention", 2 * 24 * 4, x, k.zeros(6, 2), k.zeros(6, 12), AttentionMask(3)),
        ("attention", 160, x, k.zeros(6, 2), k.zeros(6, 12), AttentionMask(3, None, 2)),
        ("orthogonalise", 20 * 1000 + 145 * 25, [k.zeros(10, 10), k.zeros(5, 20)]),
        ("transfer", 0),
    ):
        assert ops.flops_of(name, False, args, {}) == expected, name
    whole = (ids, None, None, x, head, ids, 1.0, False)
    assert ops.flops_of("linear_cross_entropy", False, whole, {}) == 384
    assert ops.flops_of("linear_cross_entropy", True, whole, {}) == 0


# How time is accounted for, by a clock that tells what it is told

SQUARE = [np.zeros((2, 2), np.float32) for _ in range(4)]
LINEAR = [*SQUARE[:2], Affine(SQUARE[2], None)]  # 16 FLOPs
ACT = [*SQUARE[:3], Affine(SQUARE[3], None), "gelu"]


def event(name, worker, begin, end, *args, parent=None, region=None):
    return Event(name, worker, parent, region, args, {}, begin, end)


def test_every_second_of_every_worker_is_accounted_for_once():
    zero = partial(event, "zero", 0)
    act, apart, shared = (event("linear_act", 0, 0.0, 5.0, *ACT), Region(False, 0.5, 8.0), Region(True, 0.0, 3.0))
    lead = [zero(1.0, 2.0, SQUARE[0], region=apart), event("linear", 0, 2.0, 4.0, *LINEAR, region=apart)]
    lead.append(zero(8.0, 9.0, SQUARE[0]))
    for what, events, regions, workers, end, flops, expected in (
        (
            "what the leading worker does alone occupies all",
            [event("linear", 0, 1.0, 3.0, *LINEAR), zero(4.0, 4.5, SQUARE[0])],
            *([], 3, 5.0, 16),
            {"Matmul forward": 6.0, "Embedding backward": 1.5},
        ),
        (
            "what an operation calls is not its own",
            [act, event("linear", 0, 1.0, 4.0, *LINEAR, parent=act)],
            *([], 1, 5.0, 16),
            {"Matmul forward": 3.0, "Activation forward": 2.0},
        ),
        ("one that calls none is whole", [act], [], 1, 5.0, 16, {"Matmul with activation forward": 5.0}),
        (
            "workers side by side are accounted for one by one",
            [*lead, event("linear", 1, 1.0, 7.0, *LINEAR, region=apart)],
            *([apart], 2, 10.0, 32),
            {
                "Embedding backward": 1.0 + 2 * 1.0,
                "Matmul forward": 2.0 + 6.0,
                "Waiting for other workers": (8.0 - 4.0) + (1.0 - 0.5) + (8.0 - 7.0),
            },
        ),
        (
            "an idle worker waits all along",
            lead,
            *([apart], 2, 10.0, 16),
            {"Embedding backward": 3.0, "Matmul forward": 2.0, "Waiting for other workers": 4.0 + 7.5},
        ),
        (
            "an operation that all share is one",
            [
                event("linear", 0, 0.0, 2.0, *LINEAR, region=shared),
                event("linear", 1, 0.0, 3.0, *LINEAR, region=shared),
            ],
            *([shared], 2, 3.0, 16),
            {"Matmul forward": 5.0, "Waiting for other workers": 1.0},
        ),
    ):
        seconds, found = account(Timer(), workers, Taken(0.0, end, events, regions))
        assert seconds_of(found) == expected and seconds == end, what
        assert found[2].sum() == flops, what
    assert found[1].sum() == 1  # calls of what all share


def seconds_of(found):
    return {name: value for name, value in zip(ops.ORDER, found[0], strict=True) if value}


def test_the_recorder_tells_waiting_for_ranks_from_the_sum():
    def act(comm):
        at, kernels = [0.0], CpuKernels()
        clock = Timer(lambda: at[0])
        batches = SimpleNamespace(fill=lambda *args: None)
        plain = comm.sum

        def sum(array):
            at[0] += 2.0
            plain(array)

        def barrier():
            at[0] += 5.0

        comm.sum, comm.barrier = sum, barrier
        array = np.ones(1000, np.float32)
        recorder = Recorder(clock, kernels, comm, batches, [(comm, "sum")])
        with recorder.attached(), recorder.step() as taken:
            comm.sum(array)
        assert comm.sum is sum and (array == 2).all()
        return seconds_of(account(clock, 1, taken)[1])

    expected = {ops.WAIT: 5.0, ops.TRANSFER: 2.0}
    assert on_all_ranks(2, act) == [expected, expected]
