"""Plans from run requests, equal on all ranks; and recipes."""

import pickle
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
from distgpt import api
from distgpt.core.base.errors import UsageError
from distgpt.core.comm.agree import on_root
from distgpt.core.comm.api import SerialComm
from distgpt.core.config.presets import PRESETS, preset
from distgpt.core.config.run_request import RunRequest, asked_for
from distgpt.core.train.plan import make_plan, new_run
from distgpt.recipes.derived import derived
from threadranks import on_all_ranks

silent = [].append  # discards messages


def alone(comm=None):
    return SimpleNamespace(comm=comm or SerialComm(), on_gpu=False)


@pytest.mark.parametrize("name", PRESETS)
def test_ranks_have_equal_plans(name, tmp_path):
    request = asked_for({}, name, out=tmp_path / "run")
    plan = make_plan(alone(), request, silent)
    assert plan.config == new_run(RunRequest(name)) and plan != replace(plan, until=3)
    assert on_all_ranks(2, lambda comm: make_plan(alone(comm), request, silent)) == [plan, plan]


def test_resumed_plan_survives_pickling(trained):
    request = asked_for({"lr": 1e-4, "steps": 40}, out=trained, resume="auto")
    plan = make_plan(alone(), replace(request, uncounted=1.5), silent)
    plan = replace(plan, state=replace(plan.state, recent=((5.5, 0.25),), shares=[3, 5]))
    assert plan.checkpoint and plan.changes["steps"] == (30, 40) and plan.uncounted
    back = pickle.loads(pickle.dumps(plan))
    own, same = plan.origin.tokenizer, back.origin.tokenizer
    assert own.to_json() == same.to_json() and own is not same
    assert back == replace(plan, origin=replace(plan.origin, tokenizer=same))


def test_derived_request_is_equal_on_all_ranks(tmp_path):
    toml = tmp_path / "c.toml"
    toml.write_text("lr = 0.005\n")
    request = asked_for({"data": "story", "depth": 2}, toml=toml, out=tmp_path)
    found = derived(request, 2)
    assert on_all_ranks(2, lambda comm: on_root(comm, lambda: derived(request, 2))) == [found, found]
    assert (found.depth, found.preset, found.name) == (None, "fast", "c")
    run = new_run(found)
    assert (run.model.n_layer, run.train.lr) == (2, 0.005) and run.train.steps != preset("fast").train.steps


def test_branch_has_parts_of_its_checkpoint(trained, tmp_path):
    """The run's settings may have changed since that checkpoint."""
    moved = tmp_path / "moved"
    shutil.copytree(trained, moved)
    settings = (moved / "config.toml").read_text()
    assert "reproducible_parts = 0" in settings and "batch_size = 8" in settings
    (moved / "config.toml").write_text(settings.replace("reproducible_parts = 0", "reproducible_parts = 2"))
    checkpoint = next(iter(sorted((moved / "checkpoints").iterdir())))
    branch = RunRequest(resume=str(checkpoint), out=tmp_path / "branch", deterministic=True)
    assert derived(branch, 1).given == {"reproducible_parts": 8}
    assert derived(replace(branch, out=None), 1).given == {}  # the run itself has two
    alone = tmp_path / "alone"
    shutil.copytree(checkpoint, alone)
    found = derived(replace(branch, resume=str(alone), given={"batch_size": 4}), 1)
    assert found.given == {"batch_size": 4, "reproducible_parts": 4}


def test_recipe_options_are_not_settings():
    request = asked_for({"within": "3m", "depth": 2, "lr": 0.1, "decay_from": "run"})
    assert (request.within, request.depth, request.decay_from, request.given) == ("3m", 2, "run", {"lr": 0.1})
    with pytest.raises(UsageError, match="unknown setting 'lrr'"):
        new_run(asked_for({"lrr": 0.1}))
    with pytest.raises(UsageError, match="--steps and --epochs cannot be combined"):
        new_run(asked_for({"steps": 3, "epochs": 1.0}))


def test_run_clock_excludes_uncounted_time(tmp_path, monkeypatch):
    def an_hour_ago(request, stage, say):
        return replace(request, deterministic=False, uncounted=-3600.0)

    monkeypatch.setattr(api, "followed", an_hour_ago)
    shape = {"n_layer": 1, "n_embd": 8, "seq_len": 8, "batch_size": 1, "vocab_size": 256}
    done = api.train(**shape, train_minutes=0.1, deterministic=True, threads=1, out=tmp_path / "run")
    assert len([line for line in done.metrics if "loss" in line]) <= 2
