"""`distgpt profile`: profiled steps, costs of operations, and accounting of each worker's time."""

import json
import sys
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from distgpt.core.config.presets import preset
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.model.counts import BACKWARD, operations
from distgpt.core.ops.api import Affine, AttentionMask, Head
from distgpt.core.ops.kernels import Kernels
from distgpt.measure.estimate import Trial
from distgpt.measure.profile import operations as ops
from distgpt.measure.profile import session
from distgpt.measure.profile.recorder import Event, Recorder, Region, Taken, Timer, account
from distgpt.measure.profile.session import Profiler, as_text, of_rank, result
from threadranks import on_all_ranks

from conftest import SMALL, ci_ranks, distgpt, inside, refused, succeeded


def job(threads=1, batch_size=8, **changes):
    size = {"n_layer": 3, "n_head": 4, "n_embd": 64, "seq_len": 32, "vocab_size": 50, "grad_accum": 1}
    run = preset("gpt-mini", {**size, "batch_size": batch_size, "recompute": "mlp", **changes})
    trial = Trial(run, CpuKernels("float32", threads))
    return trial.trained, trial.batches


def profiled(step, batches, steps=3, warm_up=2):
    profiler = Profiler(step)
    return profiler, list(profiler.steps(batches, steps, warm_up))[warm_up:]


def times(profiler, name):
    return dict(zip(ops.ORDER, profiler.times[("seconds", "calls", "flops").index(name)], strict=True))


def test_profiling_keeps_results_and_removes_hooks():
    weights = []
    for watched in (True, False):
        step, batches = job(2)
        if watched:
            assert len(list(Profiler(step).steps(batches, 3))) == 5
        else:
            for number in range(5):
                step.launch(number, batches).wait()
        assert not set(vars(step.model.kernels)) & {*ops.OPERATIONS, "each", "run_together"}
        weights.append(step.model.weights.flat.copy())
    np.testing.assert_array_equal(*weights)
    step.optimizer.apply = lambda: 1 / 0  # a failed step also removes its hooks
    with pytest.raises(ZeroDivisionError):
        profiled(step, batches, warm_up=0)
    assert "linear" not in vars(step.model.kernels) and "fill" not in vars(batches)


ABOUT = {"stage": "mpi", "ranks": 2, "threads": 2, "gpu": False, "dtype": "float32", "parameters": 7}
ABOUT |= {"tokens_per_step": 100, "matmul": ""}


def test_profile_averages_ranks():
    profiler, _ = profiled(*job())
    one = of_rank(profiler, 0, 100.0)
    seconds, *others = one["times"]
    slow = {**one, "rank": 1, "step_s": 3 * one["step_s"], "times": [[3 * s for s in seconds], *others]}
    found = result([one, slow], ABOUT)
    own, other = found["per_rank"]
    assert found["step_s"] == pytest.approx(2 * one["step_s"])
    for mean, first, second in zip(found["rows"], own["rows"], other["rows"], strict=True):
        assert mean["row"] == first["row"] == second["row"]
        assert mean["ms"] == pytest.approx(2 * first["ms"]) and first["ms"] == pytest.approx(second["ms"] / 3)
        assert mean["share"] == pytest.approx(first["share"])
    assert own["rows"][0]["of_peak"] == pytest.approx(own["rows"][0]["gflops"] / 100)
    text = as_text(found)
    assert max(map(len, text.splitlines())) <= 100 and "2 ranks" in text and "2 threads" in text
    # More workers with the same work each do not change the mean.
    wide = {**one, "rank": 1, "workers": 3}
    for ranks in ([one, wide], [wide, one]):
        found = result(ranks, ABOUT)
        for mean, alone in zip(found["rows"], own["rows"], strict=True):
            assert mean["ms"] == pytest.approx(alone["ms"])


class Counted(CpuKernels):
    """Count matmuls by an artificial clock."""

    def __init__(self, seconds):
        super().__init__("float32", 2)
        self.seconds, self.sizes, self.at = seconds, [], 0.0

    def linear(self, y, x, wb):
        assert np.isfinite(x).all() and x.any()
        self.sizes.append(len(x))
        self.at += self.seconds * (len(x) / 512) ** 3


@pytest.mark.parametrize("product", [5e-5, 3e-3])
def test_peak_gflops_is_exact_and_bounded_in_time(product, monkeypatch):
    kernels = Counted(product)
    monkeypatch.setattr(session, "SIDES", (512, 1024, 2048))
    monkeypatch.setattr(session.time, "perf_counter", lambda: kernels.at)
    assert session.peak_gflops(kernels) == pytest.approx(2 * 512**3 / product / 1e9, rel=1e-3)
    assert tuple(dict.fromkeys(kernels.sizes)) == session.SIDES and kernels.at < 2 * session.SECONDS


# The command

SHORT = """import distgpt.measure.profile.session as session
session.SECONDS = 0.05
from distgpt.commands.cli import main
main()"""
PROGRAM = {"program": [sys.executable, "-c", SHORT], "cold": False}


def read_profile(folder, ranks, steps):
    found = json.loads((folder / "profile.json").read_text())
    assert (found["ranks"], found["steps"], len(found["per_rank"])) == (ranks, steps, ranks)
    for profile in (found, *found["per_rank"]):
        assert profile["rows"][-1]["row"] == ops.BETWEEN
        assert profile["rows"][-1]["share"] >= -0.03  # other rows claim at most the step
        assert profile["peak_gflops"] > 0
    assert "versions" in found["environment"]
    return found


@pytest.mark.ci
def test_profile_prints_and_saves(tmp_path):
    words = [*SMALL, "--threads", "2", "--steps", "3", "--out", "found"]
    done = succeeded("profile", *words, cwd=tmp_path, **PROGRAM, by=distgpt)
    found = read_profile(tmp_path / "found", ranks=1, steps=3)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")] == ["found/profile.json"]
    for row in found["rows"]:
        assert row["row"] in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert "step 5 of 5" in done.stderr and "Allreduce" not in done.stdout


@ci_ranks
def test_profile_of_two_ranks(tmp_path):
    done = succeeded(
        *("profile", *SMALL, "--steps", "3", "--stage", "mpi", "--out", tmp_path), ranks=2, **PROGRAM, by=distgpt
    )
    found = read_profile(tmp_path, ranks=2, steps=3)
    for profile in (found, *found["per_rank"]):
        named = {row["row"]: row for row in profile["rows"]}
        assert named[ops.WAIT]["calls"] == named[ops.TRANSFER]["calls"] == 1
    assert "Allreduce: transfer" in done.stdout


def test_profile_rejects_unwritable_out_before_steps(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", Path("/proc")):
        result = inside("profile", *SMALL, "--out", folder)
        refused(result, 74, folder.name)
        assert "step 1" not in result.stderr


WAYS = ("forward", "backward into input", "backward into weights")
# Methods that allocate, read or organize work.
NO_OPERATIONS = {
    "zeros",
    "accum_zeros",
    "scalars",
    "integers",
    "to_host",
    "to_host_async",
    "free_memory",
    "record",
    "between",
}
NO_OPERATIONS |= {"agree", "orthogonalise_bytes", "each", "run_together", "join"}


def test_operations_have_costs_and_rows():
    calls = {name for name, value in vars(Kernels).items() if callable(value) and not name.startswith("_")}
    assert set(ops.OPERATIONS) == calls - NO_OPERATIONS
    assert {*ops.ROW_OF.values(), *ops.WITHOUT_MATMULS.values(), ops.WORKERS} == set(ops.ORDER)


def test_profile_counts_matmuls_like_estimate():
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


def test_flops_follow_from_arguments():
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


SQUARE = [np.zeros((2, 2), np.float32) for _ in range(4)]
LINEAR = [*SQUARE[:2], Affine(SQUARE[2], None)]  # 16 FLOPs
ACT = [*SQUARE[:3], Affine(SQUARE[3], None), "gelu"]


def event(name, worker, begin, end, *args, parent=None, region=None):
    return Event(name, worker, parent, region, args, {}, begin, end)


def test_account_covers_every_second_of_workers_once():
    zero = partial(event, "zero", 0)

    def linear(worker, begin, end, **of):
        return event("linear", worker, begin, end, *LINEAR, **of)

    act, apart, shared = (event("linear_act", 0, 0.0, 5.0, *ACT), Region(False, 0.5, 8.0), Region(True, 0.0, 3.0))
    lead = [zero(1.0, 2.0, SQUARE[0], region=apart), linear(0, 2.0, 4.0, region=apart), zero(8.0, 9.0, SQUARE[0])]
    matmul, waiting, zeroed = "Matmul forward", "Waiting for other workers", "Embedding backward"
    both = [linear(0, 0.0, 2.0, region=shared), linear(1, 0.0, 3.0, region=shared)]
    separate = {zeroed: 1.0 + 2 * 1.0, matmul: 2.0 + 6.0, waiting: (8.0 - 4.0) + (1.0 - 0.5) + (8.0 - 7.0)}
    for events, regions, workers, end, flops, expected in (
        # A call of only the leading worker occupies all.
        ([linear(0, 1.0, 3.0), zero(4.0, 4.5, SQUARE[0])], [], 3, 5.0, 16, {matmul: 6.0, zeroed: 1.5}),
        # A nested call is not part of its caller; without one, the call is whole.
        ([act, linear(0, 1.0, 4.0, parent=act)], [], 1, 5.0, 16, {matmul: 3.0, "Activation forward": 2.0}),
        ([act], [], 1, 5.0, 16, {"Matmul with activation forward": 5.0}),
        # Parallel workers are accounted for separately, and an idle one always waits.
        ([*lead, linear(1, 1.0, 7.0, region=apart)], [apart], 2, 10.0, 32, separate),
        (lead, [apart], 2, 10.0, 16, {zeroed: 3.0, matmul: 2.0, waiting: 4.0 + 7.5}),
        # A shared operation is one call.
        (both, [shared], 2, 3.0, 16, {matmul: 5.0, waiting: 1.0}),
    ):
        seconds, found = account(Timer(), workers, Taken(0.0, end, events, regions))
        assert seconds_of(found) == expected and seconds == end
        assert found[2].sum() == flops, expected
    assert found[1].sum() == 1  # a shared operation is one call


def seconds_of(found):
    return {name: value for name, value in zip(ops.ORDER, found[0], strict=True) if value}


def test_recorder_separates_waiting_from_summing():
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
