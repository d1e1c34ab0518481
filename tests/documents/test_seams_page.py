"""The page about extensions: a run trains with each file."""

import contextlib
import importlib
import json
import os
import re
import shutil
import sys
import zipfile

import distgpt as package
import numpy as np
import pytest
from distgpt.assembly import AllComponents
from distgpt.core import components
from distgpt.core.base.errors import DataError, UsageError
from distgpt.core.config import RunConfig
from distgpt.core.data.tokenizers import load_tokenizer
from distgpt.core.saved.tensors import read_header, read_into
from run import ROOT

from conftest import ci_ranks, distgpt, losses, needs_mpi, succeeded

PAGE = (ROOT / "docs" / "explanation" / "seams.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
FILES = {text.splitlines()[0].removeprefix("# "): text for text in BLOCKS}
SIZE = {"preset": "tiny-adamw", "n_layer": 1, "n_head": 2, "n_embd": 16, "seq_len": 16, "batch_size": 4}
SIZE |= {"data": "story", "steps": 6, "threads": 1}


@pytest.fixture
def extensions(tmp_path, monkeypatch):
    monkeypatch.setattr(components, "_installed", components.components())  # undone at the end
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    return lambda name: importlib.import_module(name).MyComponents()


def bytes_of(trained):
    return (trained.directory / "weights.safetensors").read_bytes()


def test_memory_callback_adds_metric_and_ends_run(tmp_path, extensions):
    plain = package.train(**SIZE, out=tmp_path / "plain")
    guarded = extensions("memory_guard")
    watched = package.train(**SIZE, out=tmp_path / "watched", components=guarded)
    assert bytes_of(plain) == bytes_of(watched)
    assert "memory_mb" not in plain.metrics[0] and watched.metrics[0]["memory_mb"] > 1
    sys.modules["memory_guard"].MOST = 0
    with pytest.raises(BaseException, match="memory is running out"):
        package.train(**SIZE, out=tmp_path / "ended", components=guarded)
    assert 1 <= len(losses(tmp_path / "ended")) < SIZE["steps"]
    assert list((tmp_path / "ended" / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    builder = pytest.importorskip("hatchling.builders.wheel").WheelBuilder(str(ROOT))
    [path] = builder.build(directory=str(tmp_path_factory.mktemp("wheel")), versions=["standard"])
    with zipfile.ZipFile(path) as file:
        file.extractall(folder := tmp_path_factory.mktemp("site"))
    return folder


def command(tmp_path, out, *more, ranks=1, wheel=None):
    words = [f"--{name.replace('_', '-')}={value}" for name, value in SIZE.items()]
    stage = ("--stage", "mpi") if ranks > 1 else ()
    how = {"env": {"PYTHONPATH": os.pathsep.join(map(str, filter(None, (wheel, tmp_path))))}, "cold": bool(wheel)}
    return distgpt("train", *words, *stage, "--out", tmp_path / out, *more, ranks=ranks, timeout=300, **how)


@pytest.mark.ci
@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=needs_mpi)])
@pytest.mark.parametrize("name", [name for name in FILES if name not in ("orthogonal.py", "loop.py")])
def test_component_files_train_by_command(tmp_path, extensions, wheel, name, ranks):
    more = {"quick_gelu.py": ["--set", "mlp=quick_gelu"], "digraphs.py": ["--tokenizer", "digraphs:thheinan"]}
    own = ["--components", f"{name.removesuffix('.py')}:MyComponents"]
    result = command(tmp_path, "run", *own, *more.get(name, []), ranks=ranks, wheel=wheel)
    assert result.returncode == 0, result.stderr
    assert f"components: {own[1]}" in result.stdout + result.stderr
    assert len(losses(tmp_path / "run")) == SIZE["steps"]


@ci_ranks
def test_topk_exchange_saves_residual(tmp_path, extensions):
    own = ("--components", "topk:MyComponents", "--schedule", "constant", "--save-every", "3")
    how = {"ranks": 2}
    assert command(tmp_path, "whole", *own, "--set", "extra.fraction=0.05", **how).returncode == 0
    assert command(tmp_path, "half", *own, "--set", "extra.fraction=0.05", "--steps", "3", **how).returncode == 0
    shutil.copytree(tmp_path / "half", tmp_path / "alone")
    assert command(tmp_path, "half", *own, "--resume", "auto", **how).returncode == 0
    assert losses(tmp_path / "half") == losses(tmp_path / "whole")
    other = command(tmp_path, "alone", *own, "--resume", "auto")
    assert other.returncode == 0 and "has no state of TopK for these ranks" in other.stdout + other.stderr
    text = FILES["topk.py"]
    (tmp_path / "double.py").write_text(text.replace("self.mean_factor = 1 /", "self.mean_factor = 2 /"))
    for complaint, out, more in (
        ("extra.fraction must be at most 1, not 2.0", "no", [*own, "--set", "extra.fraction=2"]),
        ("did you mean 'extra.fraction'", "no", [*own, "--set", "extra.fractoin=1"]),
        ("extra.fraction", "half", ["--resume", "auto", "--steps", "9"]),
        ("--grad-sync sharded", "no", [*own, "--grad-sync", "sharded"]),
        ("it must be 1.5", "no", ["--components", "double:MyComponents"]),  # the mean of a gradient over the ranks
    ):
        result = command(tmp_path, out, *more, **how)
        assert result.returncode == 2 and complaint in result.stderr, result.stderr
        assert "extra" not in complaint or not (tmp_path / "no").exists()


def test_callback_state_survives_resume(tmp_path, extended):
    class Counting(contextlib.nullcontext):
        steps = 0

        def after_step(self, done):
            self.steps += 1
            return {"counted": self.steps}

        def state(self):
            return {"steps": self.steps}

        def load(self, state):
            self.steps = state["steps"]

    extended(callbacks=lambda self, run, limits: [*AllComponents.callbacks(self, run, limits), Counting()])
    first = package.train(**SIZE, out=tmp_path / "run")
    again = package.train(**SIZE | {"steps": 9}, out=tmp_path / "run", resume="auto")
    lines = [line["counted"] for line in (*first.metrics, *again.metrics) if "counted" in line]
    assert lines == [*range(1, 10)]


@ci_ranks
@pytest.mark.parametrize("sync", ["allreduce", "sharded"])
def test_lion_updates_whole_and_sharded_weights(tmp_path, extensions, sync):
    own = ("--components", "lion:MyComponents", "--dtype", "float32", "--lr", "1e-3")
    assert command(tmp_path, sync, *own, "--grad-sync", sync, ranks=2).returncode == 0
    alone = package.train(**SIZE, dtype="float32", lr=1e-3, out=tmp_path / "one", components=extensions("lion"))
    np.testing.assert_allclose(losses(tmp_path / sync), losses(alone.directory), rtol=1e-4)
    adamw = package.train(**SIZE, dtype="float32", lr=1e-3, out=tmp_path / "adamw", components=AllComponents())
    assert losses(adamw.directory)[-1] != losses(alone.directory)[-1]


def test_lion_follows_its_update_rule(tmp_path, extensions):
    components.install(extensions("lion"))
    model = package.init(package.ModelConfig(n_layer=1, n_head=1, n_embd=8, seq_len=4), tokenizer="byte")
    optimizer = model.optimizer(weight_decay=0.1, beta1=0.9, beta2=0.99, clip=0.0)
    name = "blocks.0.attn.proj.w"
    p, m = model.parameters()[name].astype(float).copy(), 0.0
    rng = np.random.default_rng(0)
    for _ in range(3):
        gradients = {key: np.zeros_like(value) for key, value in model.parameters().items()}
        g = gradients[name] = rng.standard_normal(p.shape).astype(np.float32)
        optimizer.step(gradients, lr=0.01)
        p = p * (1 - 0.01 * 0.1) - 0.01 * np.sign(0.9 * m + 0.1 * g)
        m = 0.99 * m + 0.01 * g
    np.testing.assert_allclose(model.parameters()[name], p, rtol=1e-5)


def test_activation_gradient_matches_differences(tmp_path, extensions):
    components.install(extensions("quick_gelu"))
    config = package.ModelConfig(n_layer=1, n_head=1, n_embd=8, seq_len=4, mlp="quick_gelu")
    model = package.init(config, tokenizer="byte", dtype="float64")
    tokens, targets = [[1, 2, 3, 4]], [[2, 3, 4, 5]]
    gradient = model.gradients(tokens, targets)["blocks.0.mlp.fc.w"]
    weight = model.parameters()["blocks.0.mlp.fc.w"]
    for place in ((0, 0), (5, 3)):
        before, around = weight[place], []
        for step in (1e-5, -1e-5):
            weight[place] = before + step
            around.append(model.loss(tokens, targets))
        weight[place] = before
        np.testing.assert_allclose(gradient[place], (around[0] - around[1]) / 2e-5, rtol=1e-5, atol=1e-9)
    with pytest.raises(DataError, match=r"mlp is 'quick_gelu'.*DISTGPT_COMPONENTS"):
        model.save(tmp_path / "own.safetensors")
        from distgpt.core.ops.activations import ACTIVATIONS

        del ACTIVATIONS["quick_gelu"]
        package.load(tmp_path / "own.safetensors")


def test_token_ids_beyond_vocabulary_are_rejected(tmp_path, extensions):
    own = extensions("digraphs")
    sys.modules["digraphs"].Digraphs.size = property(lambda tokenizer: 256, lambda tokenizer, size: None)
    with pytest.raises(DataError, match=r"digraphs\b.*\b256 .*\b25\d$"):
        package.train(**SIZE, tokenizer="digraphs:thheinan", out=tmp_path / "run", components=own)


def test_weights_load_with_unknown_training_settings(tmp_path, monkeypatch):
    trained = package.train(**SIZE, out=tmp_path / "run")
    to_toml = RunConfig.to_toml
    monkeypatch.setattr(RunConfig, "to_toml", lambda run: to_toml(run).replace('"allreduce"', '"topk"'))
    trained.model.save(tmp_path / "other.safetensors")
    other = package.load(tmp_path / "other.safetensors")
    assert other.generate("The", 5) == trained.model.generate("The", 5)
    package.train(**SIZE, init=str(tmp_path / "other.safetensors"), out=tmp_path / "more")
    package.train(**SIZE, out=tmp_path / "saved")
    monkeypatch.undo()
    with pytest.raises(UsageError, match="grad_sync"):
        package.train(out=tmp_path / "saved", resume="auto", steps=9)


@pytest.mark.ci
@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=needs_mpi)])
def test_custom_loop_learns(tmp_path, extensions, ranks):
    result = succeeded(ranks=ranks, cwd=tmp_path, program=[sys.executable, "loop.py"], by=distgpt)
    rows = [line.split() for line in result.stdout.splitlines()]
    assert float(rows[-1][1]) < 0.6 * float(rows[0][1])
    assert package.load(tmp_path / "own.safetensors").generate("The", 5)


@pytest.mark.ci
def test_orthogonal_adapter_trains_and_loads_as_lora(tmp_path, extensions):
    init = str(package.train(**SIZE, out=tmp_path / "base").directory / "weights.safetensors")
    how = {**SIZE, "init": init, "lora_rank": 4, "lora_matrices": "q,v", "steps": 20}
    lora = package.train(**how, out=tmp_path / "lora")
    own = package.train(**how, out=tmp_path / "own", components=extensions("orthogonal"))
    assert bytes_of(own) != bytes_of(lora) and losses(own.directory) != losses(lora.directory)
    assert min(losses(own.directory)[-3:]) < losses(own.directory)[0]
    headers = [read_header(run.directory / "weights.safetensors") for run in (own, lora)]
    assert headers[0].tensors.keys() == headers[1].tensors.keys()
    first = package.train(**{**how, "steps": 1, "lr": 1e-9}, out=tmp_path / "one")
    path = first.directory / "weights.safetensors"
    host = {key: np.empty(entry.shape, np.float32) for key, entry in read_header(path).tensors.items()}
    read_into(path, host)
    a = host["blocks.0.attn.q.lora_a"]
    np.testing.assert_allclose(a @ a.T, np.eye(4), atol=1e-4)
    assert package.load(own.directory).generate("The", max_new_tokens=3, seed=1)


def test_custom_schedule_continues_after_resume(tmp_path, extensions):
    restarting = extensions("restarts")
    sys.modules["restarts"].PERIOD = 4
    how = {**SIZE, "warmup": 0, "lr": 0.008, "save_every": 3}
    trained = package.train(**how, out=tmp_path / "run", components=restarting)
    again = package.train(**how | {"steps": 10}, out=tmp_path / "run", resume="auto")
    rates = [line["lr"] for line in (*trained.metrics, *again.metrics) if "lr" in line]
    wanted = [0.004 * (1 + np.cos(np.pi * (step % 4) / 4)) for step in range(10)]
    np.testing.assert_allclose(rates, wanted, rtol=1e-6)


def test_custom_tokenizer_is_saved_and_loaded(tmp_path, extensions):
    own = extensions("digraphs")
    trained = package.train(**SIZE, tokenizer="digraphs:thheinan", out=tmp_path / "run", components=own)
    saved = load_tokenizer(str(trained.directory))
    assert saved.kind == "digraphs" and saved.size == 260 and saved.describe()
    text = "the thing that he heard in a"
    ids = saved.encode(text)
    assert saved.decode(ids) == text and len(ids) < len(text) and (ids >= 256).any()
    assert json.loads(saved.to_json())["pairs"] == "thheinan"
    more = SIZE | {"steps": 8, "tokenizer": "digraphs:thheinan"}
    assert len(losses(package.train(**more, out=tmp_path / "run", resume="auto").directory)) == 8
    with pytest.raises(UsageError, match="not a kind or a file"):
        load_tokenizer("digraphs:odd")
