"""The setup of a run: what follows from a plan, step by step, and what no later step gets to see."""

from dataclasses import replace

import distgpt
import pytest
from distgpt.core.base.errors import DataError
from distgpt.core.config.asked import asked_for
from distgpt.core.config.presets import preset
from distgpt.core.cpu.stages import open_stage
from distgpt.core.saved.checkpoint import State
from distgpt.core.train.loop import train
from distgpt.core.train.plan import make_plan
from distgpt.core.train.setup import micro_batches_so_far, open_run, set_up
from distgpt.measure.profile.session import open_steps
from test_seams import SIZE, Listener


def test_a_configuration_keeps_what_was_asked_for_beside_what_memory_has_decided(tmp_path):
    stage = open_stage("serial", 1)
    asked = preset("tiny", SIZE, {"epochs": 0.01, "vocab_size": 256, "dtype": "float32"})
    words = {name: value for name, value in SIZE.items() if name != "steps"}
    plan = make_plan(stage, asked_for({**words, "epochs": 0.01}, out=tmp_path / "run"), lambda text: None)
    try:
        run = open_run(plan, stage, Listener())
    finally:
        plan.directory.lock.release()
    assert plan.config.model.vocab_size == 0 and run.config.model.vocab_size == 256
    assert run.config.train.steps > 1 and plan.config.train.steps != run.config.train.steps
    assert (run.config.train.grad_accum, run.config.train.recompute) == (0, "auto")
    assert run.settings == replace(run.config.train, grad_accum=1, recompute="mlp", save="async")
    setup = set_up(asked, stage)
    assert setup.settings == replace(asked.train, grad_accum=1, recompute="mlp", save="async")
    assert setup.config is asked


def test_steps_alone_are_those_of_a_run(tmp_path):
    stage, words = open_stage("serial", 1), {**SIZE, "eval_every": 0}
    plan = make_plan(stage, asked_for(words, out=tmp_path / "run"), lambda text: None)
    try:
        run = open_run(plan, stage, listener := Listener())
        train(run)
    finally:
        plan.directory.lock.release()
    step, batches = open_steps(plan.config, stage, lambda text: None)
    alone = [step.launch(number, batches).wait().loss for number in range(SIZE["steps"])]
    assert alone == [line["loss"] for line in listener.metrics]


def test_a_run_that_cannot_begin_leaves_nothing(tmp_path):
    """Weights are the last that can be wrong; the directory comes after them."""
    stage, weights = open_stage("serial", 1), tmp_path / "w.safetensors"
    config = preset("tiny", SIZE, {"vocab_size": 256}).model
    distgpt.init(config).save(weights)
    plan = make_plan(stage, asked_for({**SIZE, "init": str(weights)}, out=tmp_path / "run"), lambda text: None)
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-8] + bytes([255] * 8))
    with pytest.raises(DataError):
        open_run(plan, stage, Listener())
    assert not (tmp_path / "run").exists()


def test_micro_batches_stay_unless_settings_or_ranks_decide_them_anew():
    before = preset("tiny", SIZE)
    state = State(3, ranks=2, micro_batches=4)
    assert micro_batches_so_far(state, before, 2) == 4
    assert micro_batches_so_far(state, before, 1) == 0  # other ranks
    fixed = preset("tiny", SIZE, {"reproducible_parts": 4})  # which then are no longer
    assert micro_batches_so_far(state, fixed, 2) == 0
