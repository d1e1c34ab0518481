"""Setup and interfaces of a run; optional components do not change its results."""

import time
from contextlib import contextmanager
from dataclasses import replace

import distgpt
import numpy as np
import pytest
from distgpt.assembly import AllComponents
from distgpt.callbacks.bad_steps import BadSteps
from distgpt.core.base.errors import DataError, NonFiniteError, StorageError, UsageError
from distgpt.core.base.interrupts import PendingSignals
from distgpt.core.comm.api import SerialComm
from distgpt.core.components import Components, components
from distgpt.core.config import ModelConfig, RunConfig, TrainConfig
from distgpt.core.config.presets import preset
from distgpt.core.config.run_request import asked_for
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.cpu.stages import open_stage
from distgpt.core.data.batches import ArrayTokens, Batches
from distgpt.core.model.model import FLAG_COUNT, Architecture, Model
from distgpt.core.model.optim import AdamW
from distgpt.core.ops.kernels import Kernels
from distgpt.core.saved.checkpoint import State
from distgpt.core.saved.modelfile import Description, save_model
from distgpt.core.train.interfaces import Budget, Disk, StepFlags, StepPolicy
from distgpt.core.train.loop import train
from distgpt.core.train.parallel_strategy import OptimizerState, allreduce
from distgpt.core.train.plan import make_plan
from distgpt.core.train.progress import Finished, Progress
from distgpt.core.train.setup import micro_batches_so_far, open_run, set_up
from distgpt.core.train.step import Step
from distgpt.measure.profile.session import open_steps
from threadranks import on_all_ranks

from conftest import logged, losses
from models import BASE

SIZE = {"n_layer": 1, "n_embd": 16, "seq_len": 16, "batch_size": 4, "steps": 4, "eval_every": 2}


class Listener:
    def __init__(self):
        self.metrics = []

    def stepped(self, metrics):
        self.metrics.append(metrics)

    def __getattr__(self, name):
        return lambda *_: None


class Counting:
    def __init__(self):
        self.calls = []

    def __enter__(self):
        self.calls.append("entered")

    def __exit__(self, *ended):
        self.calls.append("left")

    def after_step(self, done):
        self.calls.append(done.loss)
        return {"settled": len(self.calls)}


@contextmanager
def opened(out, parts=None, listener=None, **request):
    stage = open_stage("serial", 1)
    plan = make_plan(stage, asked_for(request, out=out), lambda text: None)
    try:
        yield plan, open_run(plan, stage, listener or Listener(), parts=parts)
    finally:
        plan.directory.lock.release()


def trained(out, parts=None, **settings):
    with opened(out, parts, listener := Listener(), **SIZE, **settings) as (_, run):
        train(run)
    return run, listener.metrics


def test_callbacks_do_not_change_results(tmp_path):
    own = Counting()

    class Turned(AllComponents):
        def callbacks(self, run, limits):
            return [own, *reversed(super().callbacks(run, limits))]

    found = []
    for name, parts in (("plain", Components()), ("whole", AllComponents()), ("turned", Turned())):
        run, metrics = trained(out := tmp_path / name, parts)
        files = {path.relative_to(out) for path in out.rglob("*") if path.is_file()}
        found.append((losses(out), (out / "weights.safetensors").read_bytes(), files))
        assert bool(run.callbacks) is (name != "plain")
    assert found[0] == found[1] == found[2]
    assert own.calls == ["entered", *losses(out), "left"] and [line["settled"] for line in metrics] == [2, 3, 4, 5]
    assert [line["settled"] for line in logged(tmp_path / "turned") if "loss" in line] == [2, 3, 4, 5]
    step, batches = open_steps(run.config, open_stage("serial", 1), lambda text: None)
    assert [step.launch(number, batches).wait().loss for number in range(SIZE["steps"])] == losses(out)


def test_run_has_only_requested_components(tmp_path):
    run, _ = trained(tmp_path / "default", AllComponents())
    assert isinstance(run.step_policy, StepPolicy) and type(run.budget) is Budget
    more = {"on_bad_step": "skip", "train_minutes": 0.01}
    run, _ = trained(tmp_path / "more", AllComponents(), **more)
    assert isinstance(run.step_policy, BadSteps) and run.budget.elapsed is not None


def steps_of(comm, is_async=False):
    t = TrainConfig(batch_size=2, recompute="none")
    model = Model(
        Architecture(ModelConfig(vocab_size=16, seq_len=8, n_layer=1, n_head=1, n_embd=16)), CpuKernels(threads=1)
    )
    model.kernels.capabilities = replace(model.kernels.capabilities, is_async=is_async)
    model.allocate_master_weights(ranks=2)
    model.initialise(1)
    optimizer = AdamW(model, t)
    step = Step(optimizer, comm, t, allreduce(comm, OptimizerState(optimizer), t, print))
    return step, Batches(ArrayTokens(np.arange(200, dtype=np.uint16) % 16), 8, 2, 1)


def test_step_flag_of_one_rank_counts_once():
    """The previous sum is still in the buffer. Asynchronous kernels do not overwrite it."""

    def heard(comm):
        step, batches = steps_of(comm, is_async=True)
        mine = [0.0] * (FLAG_COUNT - 2) + [0.25 if comm.rank == 0 else 0.0]
        return [step.launch(number, batches, lambda: mine) for number in range(4)][-1].wait().flags[-1]

    assert on_all_ranks(2, heard) == [0.25, 0.25]


def test_time_between_steps_counts_unless_restarted():
    def seconds(comm):
        (step, batches), found = steps_of(comm), []
        for number in range(3):
            found.append(step.launch(number, batches).wait().rank_seconds[0])
            if comm.rank == 0:
                time.sleep(0.3)  # simulates a sample
            if number == 1:
                step.restart_clock()
        return found

    _, slept, restarted = on_all_ranks(2, seconds)[0]
    assert slept > 0.3 > restarted


def test_nonfinite_step_ends_the_run_by_default():
    step_policy = StepPolicy(TrainConfig(), Progress(step=3))
    done = [Finished(2.0, norm, 0.1, rejected=None, flags=[], rank_seconds=[]) for norm in (1.0, float("inf"))]
    assert step_policy.check_step(done[0]) == step_policy.rejection_reason(2.0, 1.0) == ""
    with pytest.raises(NonFiniteError, match=r"the gradient is not finite at step 4 .*--on-bad-step skip"):
        step_policy.check_step(done[1])


def test_step_flags_fit_the_gradient_buffer():
    disk = Disk()
    disk.lost = StorageError("full")
    mine = StepFlags(type("Comm", (), {"rank": 0}), PendingSignals(), disk, Budget(1)).local_flags()
    assert len(mine) == FLAG_COUNT - 1 and mine == [0] * 5 + [1, 0.0]
    assert StepFlags.parse_flags([0, 2, 0, 0, 0, 0, 0.5], "allreduce").stop.name == "SIGINT"


def test_config_keeps_request_and_settings_resolve_memory(tmp_path):
    words = {name: value for name, value in SIZE.items() if name != "steps"} | {"epochs": 0.01}
    with opened(tmp_path / "run", **words) as (plan, run):
        assert plan.config.model.vocab_size == 0 and run.config.model.vocab_size == 256
        assert run.config.train.steps > 1 and plan.config.train.steps != run.config.train.steps
        assert (run.config.train.grad_accum, run.config.train.recompute) == (0, "auto")
        assert run.settings == replace(run.config.train, grad_accum=1, recompute="mlp", save="async")
    request = preset("tiny", SIZE, {"epochs": 0.01, "vocab_size": 256, "dtype": "float32"})
    setup = set_up(request, open_stage("serial", 1))
    assert setup.settings == replace(request.train, grad_accum=1, recompute="mlp", save="async")
    assert setup.config is request


def test_run_with_corrupt_weights_leaves_nothing(tmp_path):
    weights = tmp_path / "w.safetensors"
    distgpt.init(preset("tiny", SIZE, {"vocab_size": 256}).model).save(weights)
    weights.write_bytes(weights.read_bytes()[:-8] + bytes([255] * 8))
    with pytest.raises(DataError), opened(tmp_path / "run", **SIZE, init=str(weights)):
        pass
    assert not (tmp_path / "run").exists()


def test_micro_batches_are_kept_for_equal_ranks():
    before, state = preset("tiny", SIZE), State(3, ranks=2, micro_batches=4)
    assert micro_batches_so_far(state, before, 2) == 4
    assert micro_batches_so_far(state, before, 1) == 0  # other ranks
    fixed = preset("tiny", SIZE, {"reproducible_parts": 4})  # no longer fixed
    assert micro_batches_so_far(state, fixed, 2) == 0


KINDS = {"whole": TrainConfig(), "adapters": TrainConfig(lora_rank=2)}


@pytest.mark.parametrize("t", KINDS.values(), ids=KINDS)
def test_model_kind_matches_its_model(t, tmp_path):
    file, k, whole = tmp_path / "weights.safetensors", Kernels("float32"), components().model(TrainConfig())
    given = whole.build(RunConfig(BASE), k)
    given.initialise(1)
    save_model(file, given, Description(RunConfig(BASE), None))
    run = RunConfig(BASE).with_values({"lora_rank": t.lora_rank, "init": str(file)})
    kind = components().model(run.train)
    model = kind.build(run, k)
    assert kind.trained(run).offsets == model.layout.offsets
    kind.load_frozen(SerialComm(), model, run.train)
    frozen = model.tensors.keys() - model.params.keys()
    assert bool(frozen) == bool(t.lora_rank) == (not kind.begins_with(run.train))
    for name, values in getattr(model, "frozen", {}).items():
        np.testing.assert_array_equal(values, given.params[name])
    assert kind.describe(SerialComm(), run, None).layout.offsets == model.layout.offsets


def test_only_adapters_accept_quantized_weights(tmp_path):
    rounded = Description(RunConfig(BASE), None, rounded="int8")
    components().model(KINDS["adapters"]).reject_origin(rounded, tmp_path, KINDS["adapters"], resumed=False)
    with pytest.raises(UsageError, match="cannot be trained further"):
        components().model(KINDS["whole"]).reject_origin(rounded, tmp_path, KINDS["whole"], resumed=False)
