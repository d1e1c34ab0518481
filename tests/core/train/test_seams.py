"""Setup and interfaces of a run: plans, memory, and optional components that do not change its results."""

import pickle
import shutil
import time
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import distgpt
import numpy as np
import pytest
from distgpt import api
from distgpt.assembly import AllComponents
from distgpt.callbacks.bad_steps import BadSteps
from distgpt.core.base.errors import DataError, NonFiniteError, StorageError, UsageError
from distgpt.core.base.interrupts import PendingSignals
from distgpt.core.comm.agree import on_root
from distgpt.core.comm.api import SerialComm
from distgpt.core.components import Components, components
from distgpt.core.config import ModelConfig, RunConfig, TrainConfig
from distgpt.core.config.presets import PRESETS, preset
from distgpt.core.config.run_request import RunRequest, asked_for
from distgpt.core.cpu.fused.muon import bytes_of
from distgpt.core.cpu.kernels import Bfloat16Kernels, CpuKernels
from distgpt.core.cpu.stages import open_stage
from distgpt.core.data.batches import ArrayTokens, Batches
from distgpt.core.model.model import FLAG_COUNT, Architecture, Model
from distgpt.core.model.muon import Muon
from distgpt.core.model.optim import AdamW
from distgpt.core.ops.kernels import Kernels
from distgpt.core.saved.checkpoint import State
from distgpt.core.saved.modelfile import Description, save_model
from distgpt.core.train import memory
from distgpt.core.train.assessment import Scorer, Span
from distgpt.core.train.interfaces import Budget, Disk, StepFlags, StepPolicy
from distgpt.core.train.loop import train
from distgpt.core.train.memory import FRACTION, LIBRARIES, PROGRAM, needed
from distgpt.core.train.parallel_strategy import GradientSync, OptimizerState, Strategy, allreduce
from distgpt.core.train.plan import make_plan, new_run
from distgpt.core.train.progress import Finished, Progress
from distgpt.core.train.setup import micro_batches_so_far, open_run, set_up
from distgpt.core.train.step import Step
from distgpt.measure.profile.session import open_steps
from distgpt.recipes.derived import derived
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


RUN = RunConfig(
    ModelConfig(vocab_size=61, seq_len=32, n_layer=6, n_head=2, n_embd=32),
    TrainConfig(batch_size=16, grad_accum=2, recompute="mlp"),
)
RECOMPUTE = ("none", "mlp", "block")


def with_train(run=RUN, **changes):
    return replace(run, train=replace(run.train, **changes))


def sized(run, kernels, **more):
    return needed(run, kernels, Strategy(run.train, 1), **more)


def fitting(run, kernels, free, where="GPU 0", ranks=1, **more):
    return memory.fitting(run, kernels, Strategy(run.train, ranks), free, where, **more)[0]


class Weighing(CpuKernels):
    taken = 0

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        if name not in ("zeros", "accum_zeros", "scalars", "integers"):
            return found

        def weighed(*about, **more):
            self.taken += (array := found(*about, **more)).nbytes
            return array

        return weighed


def test_needed_memory_matches_allocations():
    for dtype, recompute in product(("float32", "float64"), RECOMPUTE):
        run = with_train(recompute=recompute, dtype=dtype)
        kernels = Weighing(dtype)
        model = Model(Architecture(run.model), kernels)
        model.allocate_master_weights()
        assert sized(run, CpuKernels(dtype)).weights == kernels.taken, (dtype, recompute)
        Step(AdamW(model, run.train), SerialComm(), run.train, GradientSync())
        assert sized(run, CpuKernels(dtype)).total == kernels.taken, (dtype, recompute)


def test_needed_memory_includes_muon_updates():
    muon = with_train(optimizer="muon")
    for dtype, threads in product(("float32", "bfloat16"), (1, 2)):
        kernels = CpuKernels(dtype, threads) if dtype == "float32" else Bfloat16Kernels(threads)
        need, model = sized(muon, kernels), Model(Architecture(RUN.model), kernels)
        (loop, make), kept = kernels.polar, []
        noted = lambda *sizes, make=make, kept=kept: kept.append(make(*sizes)) or kept[-1]  # noqa: E731
        kernels.polar = loop, noted
        model.allocate_master_weights()
        Muon(model, muon.train).step(0, 1.0)
        kernels.polar = loop, make
        assert need.update == sum(map(bytes_of, kept)) > 0
        assert need.total - need.update == need.weights + need.optimizer + need.activations
        assert sized(RUN, kernels).update == 0
    with pytest.raises(UsageError, match="Muon's updates"):
        fitting(muon, kernels, 100_000)


def test_run_that_does_not_fit_names_options():
    kernels = CpuKernels("float32")
    fits = sized(RUN, kernels).total
    assert fitting(RUN, kernels, int(fits / (1 - FRACTION)) + 1).recompute == "mlp"
    with pytest.raises(UsageError, match=r"requires .* on GPU 0, .*omit --recompute and --grad-accum"):
        fitting(RUN, kernels, int(fits * 0.9))
    with pytest.raises(UsageError, match="a smaller model"):
        fitting(with_train(recompute="auto", grad_accum=0), kernels, 100_000)


@pytest.fixture
def queued():
    kernels = CpuKernels("float32")
    kernels.capabilities = replace(kernels.capabilities, is_async=True)
    return kernels


@pytest.mark.parametrize("is_async", [False, True], ids=["program", "libraries"])
def test_fixed_memory_is_reserved(is_async, queued):
    """Large models reserve a fixed amount for the program, and GPUs for libraries."""
    kernels, layers, left = (queued, 48, LIBRARIES) if is_async else (CpuKernels("float32"), 12, PROGRAM)
    large = replace(RUN, model=replace(RUN.model, n_embd=1024, n_layer=layers))
    total = sized(large, kernels).total
    assert total > 5 * LIBRARIES if is_async else FRACTION * total > PROGRAM > 0.06 * total
    assert fitting(large, kernels, total + left + 1).recompute == "mlp"
    with pytest.raises(UsageError, match=" free" if is_async else r"256 MiB"):
        fitting(large, kernels, total + left - 1)
    assert not is_async or fitting(RUN, queued, LIBRARIES // 2).recompute == "mlp"  # a small share still runs


def test_auto_recompute_keeps_fitting_activations(queued):
    auto = with_train(recompute="auto")
    for how in RECOMPUTE:
        enough = int(sized(with_train(recompute=how), queued).total / (1 - FRACTION)) + 1
        assert fitting(auto, queued, enough).recompute == how
    with pytest.raises(UsageError, match="GPU 0"):
        fitting(auto, queued, enough // 2)


def test_micro_batches_are_few_and_fit(monkeypatch):
    kernels = CpuKernels("float32")
    auto = with_train(recompute="auto", grad_accum=0, batch_size=48)
    chosen = {n: with_train(auto, grad_accum=n, recompute="mlp") for n in (1, 3, 48)}
    size = {n: sized(run, kernels).total for n, run in chosen.items()}
    assert size[1] > size[3] > size[48]

    def found(free, run=auto, ranks=1):
        t = fitting(run, kernels, int(free / (1 - FRACTION)) + 1, ranks=ranks)
        return t.grad_accum, t.recompute

    assert found(1 << 40) == (1, "mlp") and found(size[3]) == (3, "mlp")
    assert found(size[48]) == (48, "mlp")  # rather than computing again: fewer sequences
    assert found(1 << 40, chosen[3]) == (3, "mlp")  # set explicitly
    with pytest.raises(UsageError, match="activations of 1 sequence of"):
        found(size[48] // 2)
    assert fitting(auto, kernels, 1 << 40, preferred=48).grad_accum == 48  # the earlier value
    monkeypatch.setattr("distgpt.core.train.memory.TOKENS", 32 * 16)
    assert found(1 << 40) == (3, "mlp") and found(1 << 40, ranks=2) == (2, "mlp")
    odd = with_train(auto, batch_size=67)
    assert found(1 << 40, odd) == (1, "mlp")  # rather one too large than 67 of one sequence


def test_needed_memory_includes_evaluation():
    kernels = Weighing("float32")
    model, span = Model(Architecture(RUN.model), kernels), Span(np.zeros(RUN.model.seq_len + 1, np.uint16))
    Scorer(model, SerialComm()).sums([span])  # allocates the kernels' caches
    before = kernels.taken
    Scorer(model, SerialComm()).sums([span] * 1000)
    need = sized(RUN, CpuKernels("float32"), evaluated=True)
    assert need.evaluation == kernels.taken - before
    assert sized(RUN, CpuKernels("float32")).total == need.total - need.evaluation
