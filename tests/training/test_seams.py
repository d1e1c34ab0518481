"""The seams of a run: what is optional hangs on it, and a run without any of it has the same bits."""

import json
from dataclasses import replace

import pytest
from conftest import losses

from distgpt.core.base.errors import NonFiniteError, StorageError
from distgpt.core.base.interrupts import PendingSignals
from distgpt.core.config import TrainConfig
from distgpt.core.config.asked import asked_for
from distgpt.core.cpu.stages import open_stage
from distgpt.core.model.model import FLAG_COUNT
from distgpt.core.train.loop import train
from distgpt.core.train.open import open_run
from distgpt.core.train.plan import make_plan
from distgpt.core.train.progress import Finished, Progress
from distgpt.core.train.run import Seams
from distgpt.core.train.seams import Clock, Disk, FiniteJudge, Votes
from distgpt.guards.attach import guarded
from distgpt.guards.bad_steps import BadSteps
from distgpt.parallel.choose import Chosen

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

    def settled(self, done):
        self.calls.append(done.loss)
        return {"settled": len(self.calls)}


def trained(out, seams, **settings):
    """Train a small model with these seams; its directory, the judge of its run, and its metrics."""
    stage, listener = open_stage("serial", 1), Listener()
    plan = make_plan(stage.comm, asked_for(SIZE | settings, out=out), lambda text: None)
    try:
        run = open_run(plan, stage, Chosen, listener, seams)
        train(run)
    finally:
        plan.directory.release()
    return run, listener.metrics


def test_without_guards_and_in_any_order_of_them_a_run_has_the_same_bits(tmp_path):
    """What one of them adds to the metrics is written."""
    own = Counting()
    whole = guarded(TrainConfig())
    turned = replace(whole, guards=lambda run: [own, *reversed(whole.guards(run))])
    found = []
    for name, seams in (("plain", Seams()), ("whole", whole), ("turned", turned)):
        run, metrics = trained(tmp_path / name, seams)
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
    run, _ = trained(tmp_path / "default", guarded(TrainConfig()))
    assert isinstance(run.judge, FiniteJudge) and type(run.clock) is Clock and run.step._inspector is None
    more = {"on_bad_step": "skip", "recheck_every": 2, "train_minutes": 0.01}
    run, _ = trained(tmp_path / "more", guarded(TrainConfig(**more)), **more)
    assert isinstance(run.judge, BadSteps) and run.clock.elapsed is not None and run.step._inspector


def test_by_default_a_step_that_is_not_finite_ends_the_run():
    judge = FiniteJudge(TrainConfig(), Progress(step=3))
    done = Finished(2.0, 1.0, lr=0.1, rejected=None, flags=[], rank_seconds=[], seconds=1.0)
    assert judge.judge(done) == judge.objection(2.0, 1.0) == ""
    done = replace(done, norm=float("inf"))
    with pytest.raises(NonFiniteError, match=r"the gradient is not finite at step 4 .*--on-bad-step skip"):
        judge.judge(done)


def test_the_number_of_votes_is_that_of_the_gradient_buffer():
    disk = Disk()
    disk.lost = StorageError("full")
    votes = Votes(type("Comm", (), {"rank": 0}), PendingSignals(), disk, Clock(1))
    mine = votes.mine()
    assert len(mine) == FLAG_COUNT - 1 and mine == [0] * 5 + [1, 0.0]
    assert votes.heard([0, 2, 0, 0, 0, 0, 0.5]).stop.name == "SIGINT"
