"""The seams of a run: what is optional hangs on it, and a run without any of it has the same bits."""

import json
import time
from dataclasses import replace

import numpy as np
import pytest
from distgpt.assembly import AllComponents
from distgpt.callbacks.bad_steps import BadSteps
from distgpt.core.base.errors import NonFiniteError, StorageError
from distgpt.core.base.interrupts import PendingSignals
from distgpt.core.components import Components
from distgpt.core.config import ModelConfig, TrainConfig
from distgpt.core.config.asked import asked_for
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.cpu.stages import open_stage
from distgpt.core.data.batches import ArrayTokens, Batches
from distgpt.core.model.model import FLAG_COUNT, Architecture, Model
from distgpt.core.model.optim import AdamW
from distgpt.core.train.loop import train
from distgpt.core.train.plan import make_plan
from distgpt.core.train.progress import Finished, Progress
from distgpt.core.train.seams import Clock, Disk, Judge, Votes
from distgpt.core.train.setup import open_run
from distgpt.core.train.sharing import OptimizerState, allreduce
from distgpt.core.train.step import Step
from threadranks import on_all_ranks

from conftest import losses

SIZE = {"n_layer": 1, "n_embd": 16, "seq_len": 16, "batch_size": 4, "steps": 4, "eval_every": 2}


class Listener:
    def __init__(self):
        self.metrics = []

    def stepped(self, metrics):
        self.metrics.append(metrics)

    def __getattr__(self, name):
        return lambda *_: None


class Counting:
    """A guard of a test's own."""

    def __init__(self):
        self.calls = []

    def __enter__(self):
        self.calls.append("entered")

    def __exit__(self, *ended):
        self.calls.append("left")

    def after_step(self, done):
        self.calls.append(done.loss)
        return {"settled": len(self.calls)}


def trained(out, parts, **settings):
    """Train a small model with these components; its directory, the judge of its run, and its metrics."""
    stage, listener = open_stage("serial", 1), Listener()
    plan = make_plan(stage, asked_for(SIZE | settings, out=out), lambda text: None)
    try:
        run = open_run(plan, stage, listener, parts=parts)
        train(run)
    finally:
        plan.directory.lock.release()
    return run, listener.metrics


def test_without_guards_and_in_any_order_of_them_a_run_has_the_same_bits(tmp_path):
    """What one of them adds to the metrics is written."""
    own = Counting()

    class Turned(AllComponents):
        def callbacks(self, run, limits):
            return [own, *reversed(super().callbacks(run, limits))]

    found = []
    for name, parts in (("plain", Components()), ("whole", AllComponents()), ("turned", Turned())):
        run, metrics = trained(tmp_path / name, parts)
        out = tmp_path / name
        files = {path.relative_to(out) for path in out.rglob("*") if path.is_file()}
        found.append((losses(out), (out / "weights.safetensors").read_bytes(), files))
        assert bool(run.guards) is (name != "plain")
    assert found[0] == found[1] == found[2]
    steps = [line["loss"] for line in metrics]
    assert own.calls == ["entered", *steps, "left"] and [line["settled"] for line in metrics] == [2, 3, 4, 5]
    lines = [json.loads(line) for line in (tmp_path / "turned" / "metrics.jsonl").read_text().splitlines()]
    assert [line["settled"] for line in lines if "loss" in line] == [2, 3, 4, 5]


def test_a_run_has_only_what_its_settings_ask_for(tmp_path):
    run, _ = trained(tmp_path / "default", AllComponents())
    assert isinstance(run.judge, Judge) and type(run.clock) is Clock
    more = {"on_bad_step": "skip", "train_minutes": 0.01}
    run, _ = trained(tmp_path / "more", AllComponents(), **more)
    assert isinstance(run.judge, BadSteps) and run.clock.elapsed is not None


def test_a_vote_of_one_rank_counts_once_in_each_step():
    """The sum of the last step lies in every rank's buffer. Kernels with a queue write no seconds over it."""
    t = TrainConfig(batch_size=2, recompute="none")
    config = ModelConfig(vocab_size=16, seq_len=8, n_layer=1, n_head=1, n_embd=16)

    def heard(comm):
        model = Model(Architecture(config), CpuKernels(threads=1))
        model.kernels.capabilities = replace(model.kernels.capabilities, is_async=True)
        model.allocate_master_weights(ranks=2)
        model.initialise(1)
        optimizer = AdamW(model, t)
        exchange = allreduce(comm, OptimizerState(optimizer), t, print)
        step = Step(optimizer, comm, t, exchange)
        batches = Batches(ArrayTokens(np.arange(200, dtype=np.uint16) % 16), 8, 2, 1)
        mine = [0.0] * (FLAG_COUNT - 2) + [0.25 if comm.rank == 0 else 0.0]
        results = [step.launch(number, batches, lambda: mine) for number in range(4)]
        return results[-1].wait().votes[-1]

    assert on_all_ranks(2, heard) == [0.25, 0.25]


def test_what_a_rank_does_between_two_steps_is_not_its_time_in_the_next():
    t = TrainConfig(batch_size=2, recompute="none")
    config = ModelConfig(vocab_size=16, seq_len=8, n_layer=1, n_head=1, n_embd=16)

    def seconds(comm):
        model = Model(Architecture(config), CpuKernels(threads=1))
        model.allocate_master_weights(ranks=2)
        model.initialise(1)
        optimizer = AdamW(model, t)
        step = Step(optimizer, comm, t, allreduce(comm, OptimizerState(optimizer), t, print))
        batches, found = Batches(ArrayTokens(np.arange(200, dtype=np.uint16) % 16), 8, 2, 1), []
        for number in range(3):
            found.append(step.launch(number, batches).wait().rank_seconds[0])
            if comm.rank == 0:
                time.sleep(0.5)  # as if it wrote a sample
            if number == 1:
                step.restart_clock()
        return found

    _, slept, restarted = on_all_ranks(2, seconds)[0]
    assert slept > 0.5 > restarted


def test_by_default_a_step_that_is_not_finite_ends_the_run():
    judge = Judge(TrainConfig(), Progress(step=3))
    done = Finished(2.0, 1.0, lr=0.1, rejected=None, votes=[], rank_seconds=[], seconds=1.0)
    assert judge.judge_step(done) == judge.objection(2.0, 1.0) == ""
    done = done._replace(norm=float("inf"))
    with pytest.raises(NonFiniteError, match=r"the gradient is not finite at step 4 .*--on-bad-step skip"):
        judge.judge_step(done)


def test_the_number_of_votes_is_that_of_the_gradient_buffer():
    disk = Disk()
    disk.lost = StorageError("full")
    votes = Votes(type("Comm", (), {"rank": 0}), PendingSignals(), disk, Clock(1))
    mine = votes.own_votes()
    assert len(mine) == FLAG_COUNT - 1 and mine == [0] * 5 + [1, 0.0]
    assert Votes.read_votes([0, 2, 0, 0, 0, 0, 0.5], "allreduce").stop.name == "SIGINT"
