"""`distgpt profile` and `train --profile`: what is counted, how time is accounted for."""

import json
import signal
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from conftest import SMALL
from threadranks import on_all_ranks

from distgpt.comm.serial import SerialComm
from distgpt.commands.profile import profile
from distgpt.commands.train import train
from distgpt.config.presets import preset
from distgpt.errors import StorageError
from distgpt.kernels.api import AdamState, Affine, Head, Kernels, Stats
from distgpt.kernels.cpu import CpuKernels
from distgpt.measure import peaks
from distgpt.measure.peaks import Peaks
from distgpt.measure.profile import operations as ops
from distgpt.measure.profile.accounting import Accountant
from distgpt.measure.profile.recorder import Clock, Recorder, Taken
from distgpt.measure.profile.report import as_text, result
from distgpt.measure.profile.session import TRACED, Profiler, Session, of_rank, prepare
from distgpt.measure.step_timing import Trial
from distgpt.model.counts import BACKWARD, operations
from distgpt.model.optim import AdamW
from distgpt.training.step import Step

WAYS = ("forward", "backward into input", "backward into weights")
# Of the vocabulary, what makes arrays, reads them, or organises the work.
NO_OPERATIONS = {"zeros", "wide_zeros", "scalars", "integers", "to_host", "later", "record", "each", "share"}


@pytest.fixture(autouse=True)
def short_peaks(monkeypatch):
    """Peaks are measured, but not for long."""
    monkeypatch.setattr(peaks, "SECONDS", 0.01)


def job(threads=1, batch_size=8, **changes):
    """A step of some model on random tokens, and its batches."""
    size = {"n_layer": 3, "n_head": 4, "n_embd": 64, "seq_len": 32, "vocab_size": 50, "grad_accum": 1}
    run = preset("gpt-mini", {**size, "batch_size": batch_size, "recompute": "mlp", **changes})
    trial = Trial(run, CpuKernels("float32", threads))
    return trial.trained, trial.batches


def profiled(step, batches, steps=3, warm_up=2):
    """The profiler of so many steps, and how long they took by a clock of our own."""
    profiler, seconds = Profiler(warm_up=warm_up), []
    profiler.watch(step)
    for number in range(warm_up + steps):
        begun = time.perf_counter()
        step.launch(number, batches).read()
        seconds.append(time.perf_counter() - begun)
    return profiler, seconds[warm_up:]


def times(profiler, name):
    row = ("seconds", "calls", "flops", "bytes").index(name)
    return dict(zip(ops.ORDER, profiler.times[row], strict=True))


# What is counted


def test_every_operation_has_a_cost_and_a_row():
    calls = {name for name, value in vars(Kernels).items() if callable(value) and not name.startswith("_")}
    assert set(ops.OPERATIONS) == calls - NO_OPERATIONS
    entries = (*ops.OPERATIONS.values(), *ops.OTHERS.values(), *ops.WITHOUT_MATMULS.values())
    assert {*(entry.row for entry in entries), *ops.HEAD.values(), ops.WORKERS} == set(ops.ORDER)


def test_matmuls_are_counted_as_estimates_count_them():
    modern = {"positions": "rope", "norm": "rmsnorm", "mlp": "swiglu", "tied": True}
    for changes, (threads, batch_size) in product(({}, modern), ((1, 8), (2, 8), (2, 3))):  # 3: without slabs
        step, batches = job(threads, batch_size=batch_size, **changes)
        profiler, _ = profiled(step, batches, steps=2)
        expected, tokens = operations(step.model), 2 * batch_size * step.model.config.seq_len
        flops = times(profiler, "flops")
        whole = tokens * (1 + BACKWARD) * expected.forward
        assert sum(flops.values()) == pytest.approx(whole, rel=1e-9), (changes, threads, batch_size)
        for row, each in (
            *((f"Matmul {way}", expected.layers) for way in WAYS),
            *((f"Head: matmul {way}", expected.head) for way in WAYS),
            ("Attention forward", expected.attention),
        ):
            assert flops[row] == pytest.approx(tokens * each), (row, changes, threads, batch_size)


def test_rounds_and_chunks_of_logits_are_counted_once_each(monkeypatch):
    monkeypatch.setattr(CpuKernels, "logits_bytes", 4096)
    step, batches = job(batch_size=16, grad_accum=2)
    profiler, _ = profiled(step, batches, steps=1)
    tokens = 16 * step.model.config.seq_len
    flops, calls = times(profiler, "flops"), times(profiler, "calls")
    assert flops["Head: matmul forward"] == tokens * operations(step.model).head
    assert calls["Head: matmul forward"] == 2 * 2
    assert calls["Attention forward"] == 2 * 3
    assert calls["AdamW and gradient norm"] == 2
    assert calls["Data"] == 2 * 3 + 1  # batch, tokens, targets of each round; the optimizer's numbers


def test_bytes_are_those_of_the_arrays():
    k = CpuKernels()
    x, y, w, b = k.zeros(6, 4), k.zeros(6, 10), k.zeros(10, 4), k.zeros(10)
    p, low = k.zeros(100), np.zeros(100, np.uint16)
    wb, none, stats = Affine(w, b), Affine(None, None), Stats(None, k.zeros(6))
    ids, head = np.zeros(6, np.int32), Head(w, k.zeros(6, 10), 8)
    for name, expected, *args in (
        ("linear", (480, 4 * (24 + 60 + 40 + 10)), y, x, wb),
        ("linear_backward", (480, 4 * (24 + 60 + 40)), x, y, w),
        ("linear_backward_weights", (480, 4 * (60 + 24 + 50)), wb, y, x, False),
        ("linear_backward_weights", (480, 4 * (60 + 24 + 2 * 50)), wb, y, x, True),
        ("linear_act", (480, 4 * (24 + 50 + 3 * 60)), y, y, x, wb, "gelu"),
        ("linear_backward_act", (480, 4 * (24 + 40 + 5 * 60)), y, y, x, w.T, y, "gelu", True),
        ("add_norm", (0, 4 * (24 + 24 + 6)), x, x, stats, x, None, none, 1e-5),
        ("add_norm", (0, 4 * (4 * 24 + 6)), x, x, stats, x, x, none, 1e-5),
        ("norm_backward", (0, 4 * (3 * 24 + 6)), x, None, None, x, None, x, stats, none),
        ("norm_backward_weights", (0, 4 * (24 + 24 + 6 + 10)), Affine(b, None), None, x, x, stats, False),
        ("embed", (0, 96 + 24 + 2 * 96), x, ids, w, w, 3, None),
        ("embed_backward", (0, 96 + 24 + 2 * 96 + 2 * 48), w, w, x, ids, 3),
        ("attention", (2 * 24 * 4, 4 * (24 + 12 + 72)), x, k.zeros(6, 2), k.zeros(6, 12), 3),
        ("attention_backward", (4 * 24 * 4, 4 * (3 * 24 + 72)), x, x, x, None, k.zeros(6, 12), 3),
        ("linear_cross_entropy", (384, 48 + 4 * 48 + 416), ids, None, None, x, head, ids, 1.0, False),
        ("rope", (0, 2 * 4 * 48), k.zeros(6, 12), None, 2, 3, None, False),
        ("adamw", (0, 4 * 700 + 200), AdamState(p, low, p, p, p, None), None, None, None),
        ("sum", (0, 400), b, p, 1.0, False),
        ("transfer", (0, 400), p),
        ("wait", (0, 0), p),
    ):
        assert ops.cost_of(name, False, args, {}) == expected, name
    assert ops.cost_of("linear_act", True, (y, y, x, wb, "gelu"), {}) == (0, 4 * 2 * 60)
    assert ops.cost_of("linear_backward_act", True, (y, y, x, w, y, "gelu", False), {}) == (0, 4 * 3 * 60)


# How time is accounted for, by a clock that tells what it is told


def event(name, before, begin, end, *args, **named):
    return name, before, begin, end, args, named


SQUARE = [np.zeros((2, 2), np.float32) for _ in range(4)]
LINEAR = [*SQUARE[:2], Affine(SQUARE[2], None)]  # 16 FLOPs


def test_every_second_of_every_worker_is_accounted_for_once():
    act = event("linear_act", 0, 0.0, 5.0, *SQUARE[:3], Affine(SQUARE[3], None), "gelu")
    lead = [event("zero", 0, 1.0, 2.0, SQUARE[0]), event("linear", 1, 2.0, 4.0, *LINEAR)]
    apart = [*lead, event("each", 0, 0.5, 8.0, None, 2), event("zero", 3, 8.0, 9.0, SQUARE[0])]
    alone = [event("linear", 0, 1.0, 4.0, *LINEAR), event("each", 0, 0.5, 8.0, None, count=1)]
    shared = [event("linear", 0, 0.0, 2.0, *LINEAR), event("share", 0, 0.0, 3.0, None)]
    for what, lanes, workers, end, flops, expected in (
        (
            "what the leading worker does alone occupies all",
            [[event("linear", 0, 1.0, 3.0, *LINEAR), event("zero", 1, 4.0, 4.5, SQUARE[0])]],
            *(3, 5.0, 16),
            {"Matmul forward": 6.0, "Embedding backward": 1.5},
        ),
        (
            "what an operation calls is not its own",
            [[event("linear", 0, 1.0, 4.0, *LINEAR), act]],
            *(1, 5.0, 16),
            {"Matmul forward": 3.0, "Activation forward": 2.0},
        ),
        ("one that calls none is whole", [[act]], 1, 5.0, 16, {"Matmul with activation forward": 5.0}),
        (
            "workers side by side are accounted for one by one",
            [apart, [event("linear", 0, 1.0, 7.0, *LINEAR)]],
            *(2, 10.0, 32),
            {
                "Embedding backward": 1.0 + 2 * 1.0,
                "Matmul forward": 2.0 + 6.0,
                "Waiting for other workers": (8.0 - 4.0) + (1.0 - 0.5) + (8.0 - 7.0),
            },
        ),
        (
            "an idle worker waits all along; one that has not been seen yet is idle",
            [apart],
            *(2, 10.0, 16),
            {"Embedding backward": 3.0, "Matmul forward": 2.0, "Waiting for other workers": 4.0 + 7.5},
        ),
        ("one part is no work side by side", [alone], 2, 8.0, 16, {"Matmul forward": 6.0}),
        (
            "an operation that all share is one",
            [shared, [event("linear", 0, 0.0, 3.0, *LINEAR)]],
            *(2, 3.0, 16),
            {"Matmul forward": 5.0, "Waiting for other workers": 1.0},
        ),
    ):
        found = Accountant(Clock(), workers).account(Taken(0.0, end, lanes))
        assert seconds_of(found) == expected and found.seconds == end, what
        assert found.times[2].sum() == flops, what
    assert found.times[1].sum() == 1  # calls of what all share


def seconds_of(found):
    return {name: value for name, value in zip(ops.ORDER, found.times[0], strict=True) if value}


def test_the_recorder_tells_waiting_for_ranks_from_the_sum():
    def act(comm):
        at, kernels = [0.0], CpuKernels()
        clock = Clock(lambda: at[0])
        batches = SimpleNamespace(fill=lambda *args: None)
        plain = comm.sum

        def sum(array):
            at[0] += 2.0
            plain(array)

        def barrier():
            at[0] += 5.0

        comm.sum, comm.barrier = sum, barrier
        recorder = Recorder(clock, kernels, comm, batches)
        array = np.ones(1000, np.float32)
        with recorder.step() as taken:
            comm.sum(array)
        found = Accountant(clock, 1).account(taken)
        assert comm.sum is sum and (array == 2).all()
        return seconds_of(found), found.times[3].sum()

    expected = {ops.WAIT: 5.0, ops.TRANSFER: 2.0}, 4000
    assert on_all_ranks(2, act) == [expected, expected]


# Real steps


@pytest.mark.timing
@pytest.mark.parametrize("threads", [1, 2])
def test_the_rows_add_up_to_the_step(threads):
    """Measured beside it: of each step nearly all is in rows, without the one for what is left."""
    size = {"n_layer": 2, "n_head": 4, "n_embd": 256, "seq_len": 128, "batch_size": 16}
    step, batches = job(threads, **size)
    best = 0.0
    for _ in range(8):  # others use this machine too, between our operations as well: not in every step
        profiler, seconds = profiled(step, batches, steps=2, warm_up=1)
        for traced, beside in zip(profiler.traced, seconds, strict=True):
            covered = traced.times[0].sum() / (threads * beside)
            assert covered <= 1.1
            best = max(best, covered)
        if best >= 0.97:
            break
        del vars(step)["launch"]
    assert best >= 0.97


def test_profiling_changes_no_bit_and_leaves_nothing_behind():
    weights = []
    for watched in (True, False):
        step, batches = job(2)
        if watched:
            Profiler().watch(step)
        for number in range(5):
            step.launch(number, batches).read()
            assert not set(vars(step.model.kernels)) & {*ops.OPERATIONS, "each", "share"}
            assert "fill" not in vars(batches)
        weights.append(step.model.weights.flat.copy())
    np.testing.assert_array_equal(*weights)


def test_a_broken_step_leaves_nothing_behind():
    step, batches = job(2)
    profiler, _ = profiled(step, batches)
    plain = AdamW.step
    step.optimizer.step = lambda *args: 1 / 0
    with pytest.raises(ZeroDivisionError):
        step.launch(9, batches)
    assert "linear" not in vars(step.model.kernels) and "fill" not in vars(batches)
    step.optimizer.step = plain.__get__(step.optimizer)
    before = times(profiler, "calls")["Attention forward"]
    step.launch(10, batches).read()
    assert times(profiler, "calls")["Attention forward"] == before * 4 / 3


def test_memory_for_the_trace_is_bounded():
    profiler, seconds = profiled(*job(), steps=TRACED + 3)
    assert len(profiler.seconds) == len(seconds) == TRACED + 3
    assert [traced.number for traced in profiler.traced] == [*range(2, 2 + TRACED)]


ABOUT = {"stage": "mpi", "ranks": 2, "threads": 2, "gpu": False, "dtype": "float32", "parameters": 7}
ABOUT |= {"tokens_per_step": 100}


def test_ranks_are_summed_and_averaged():
    profiler, _ = profiled(*job())
    one = of_rank(profiler, 0, Peaks(100.0, 10.0, "float32"))
    slow = replace(one, rank=1, step_s=3 * one.step_s, times=[[3 * s for s in one.times[0]], *one.times[1:]])
    found = result([one, slow], ABOUT)
    own, other = found["per_rank"]
    assert found["step_s"] == pytest.approx(2 * one.step_s)
    for mean, first, second in zip(found["rows"], own["rows"], other["rows"], strict=True):
        assert mean["row"] == first["row"] == second["row"]
        assert mean["ms"] == pytest.approx(2 * first["ms"]) and first["ms"] == pytest.approx(second["ms"] / 3)
        assert mean["share"] == pytest.approx(first["share"])
    assert own["rows"][0]["of_peak"] == pytest.approx(own["rows"][0]["gflops"] / 100)
    text = as_text(found)
    assert max(map(len, text.splitlines())) <= 100 and "waiting for ranks" in text
    # One with as much work a worker, and more workers, changes the mean by nothing.
    wide = replace(one, rank=1, workers=3)
    for ranks in ([one, wide], [wide, one]):
        found = result(ranks, ABOUT)
        for mean, alone, summed in zip(found["rows"], own["rows"], [*found["job"], None], strict=True):
            assert mean["ms"] == pytest.approx(alone["ms"])
            if summed:
                assert summed["worker_s"] == pytest.approx(4 * alone["ms"] / 1000), summed["row"]
                assert summed["gflop"] == pytest.approx(2 * alone["gflop"]), summed["row"]


# From the first to the last step


@pytest.fixture
def interruptible():
    """What is broken off wants no second Ctrl-C; the tests after this one do."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.fixture
def session(monkeypatch, interruptible):
    """Of rank 0 of two, which trained alone: it has measured three steps, and no peaks."""
    monkeypatch.setattr("distgpt.measure.profile.session.environment", dict)
    comm, (step, batches) = SerialComm(), job()
    comm.size = 2
    stage = SimpleNamespace(comm=comm, device=None, name="mpi", threads=1)
    session = Session(stage, step.model, step.config)
    session.watch(step)
    for number in range(5):
        step.launch(number, batches).read()
    return session


def test_one_rank_alone_saves_the_table_first_then_the_profile_and_the_trace(session, tmp_path):
    told = []
    session.salvage(tmp_path, told.append)
    found = json.loads((tmp_path / "profile.json").read_text())
    assert found["interrupted"] and (found["ranks"], found["ranks_told"], found["steps"]) == (2, [0], 3)
    assert found["peaks"] is None and found["of_peak"] is None  # none of all ranks
    own = found["per_rank"][0]["rows"]
    assert found["gflops"] == pytest.approx(sum(row["gflop"] for row in own) / found["step_s"])
    assert "interrupted: rank 0 of 2 alone" in told[0] and "2 ranks" in told[0]
    assert "The part of rank 0:" in told[0] and "The whole step" not in told[0]
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["ranks"] == "2"
    (tmp_path / "torn" / "trace.json").mkdir(parents=True)
    for folder, lines in (("torn", 2), ("nowhere", 1)):  # the profile is there, or only the table
        told.clear()
        with pytest.raises(StorageError):
            session.salvage(tmp_path / folder, told.append)
        assert len(told) == lines and "Matmul forward" in told[0], folder
    assert json.loads((tmp_path / "torn" / "profile.json").read_text())["steps"] == 3


def test_without_steps_it_is_said_why_there_is_no_profile(tmp_path, capsys):
    for done, words in ((0, "no step was left"), (1, "3 steps to warm up come first")):
        step, batches = job()
        stage = SimpleNamespace(comm=step.comm, device=None, name="serial", threads=1)
        session = Session(stage, step.model, step.config, warm_up=3)
        session.watch(step)
        for number in range(done):
            step.launch(number, batches).read()
        session.finish(tmp_path, print)
        assert words in capsys.readouterr().out, done
        assert not list(tmp_path.iterdir()), done


def test_a_folder_that_takes_no_files_is_refused_beforehand(tmp_path):
    prepare(SerialComm(), tmp_path / "new" / "folder")
    assert not list((tmp_path / "new" / "folder").iterdir())
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", Path("/proc")):
        with pytest.raises(StorageError, match=folder.name):
            prepare(SerialComm(), folder)


@pytest.mark.parametrize("command,options", [(profile, []), (train, ["--profile"])])
def test_an_interrupt_at_the_very_end_loses_nothing(command, options, interruptible, tmp_path, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("distgpt.measure.profile.session.gather_bytes", interrupted)
    config, out = tmp_path / "my.toml", tmp_path / "out"
    config.write_text("steps = 5")
    words = [*SMALL, "--config", str(config), "--out", str(out), *options]
    done = CliRunner().invoke(command, words)
    assert done.exit_code == 1 and "interrupted; " in done.output
    assert json.loads((out / "profile.json").read_text())["steps"] == (3 if options else 10)
    assert ("--steps sets how many are measured" in done.output) is (command is profile)


@pytest.mark.parametrize("options", [[], ["--profile"]])
def test_without_profile_nothing_stands_before_an_operation(options, tmp_path, monkeypatch):
    """What objects have of their own hides what their classes have."""
    hidden = []
    launch = Step.launch

    def watched(step, number, batches):
        objects = (step, step.model.kernels, step.comm, batches)
        hidden.append([{name for name in vars(each) if hasattr(type(each), name)} for each in objects])
        return launch(step, number, batches)

    monkeypatch.setattr(Step, "launch", watched)
    words = [*SMALL, "--steps", "4", "--out", str(tmp_path / "run"), *options]
    done = CliRunner().invoke(train, words, catch_exceptions=False)
    assert done.exit_code == 0 and len(hidden) == 4
    plain = [set()] * 4
    measured = [{"launch"}, {*ops.OPERATIONS}, set(), {"fill"}]
    assert hidden == ([[{"launch"}, *plain[1:]]] * 2 + [measured] * 2 if options else [plain] * 4)
    assert (tmp_path / "run" / "profile.json").exists() == bool(options)
