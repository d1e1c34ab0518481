"""The page about extensions: a run trains with each of its files."""

import importlib
import json
import re
import sys
import tomllib

import numpy as np
import pytest
from conftest import distgpt, losses, needs_mpi
from run import ROOT

import distgpt as package
from distgpt.core import components
from distgpt.core.base.errors import UsageError
from distgpt.core.data.tokenizers import load_tokenizer
from distgpt.core.saved.tensors import read_header

PAGE = (ROOT / "docs" / "explanation" / "seams.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
FILES = {text.splitlines()[0].removeprefix("# "): text for text in BLOCKS}
SIZE = {"preset": "tiny-adamw", "n_layer": 1, "n_head": 2, "n_embd": 16, "seq_len": 16, "batch_size": 4}
SIZE |= {"data": "story", "steps": 6, "threads": 1}


@pytest.fixture
def extensions(tmp_path, monkeypatch):
    """Write the page's files; give a function that makes the components of one."""
    monkeypatch.setattr(components, "_installed", components.components())  # so that it is undone
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    return lambda name: importlib.import_module(name).MyComponents()


def bytes_of(trained):
    return (trained.directory / "weights.safetensors").read_bytes()


def test_each_is_one_file_of_at_most_sixty_lines():
    assert [*FILES] == ["memory_guard.py", "doubles.py", "orthogonal.py", "restarts.py", "digraphs.py"]
    assert all(len(text.splitlines()) <= 60 for text in FILES.values())


def test_a_guard_adds_to_the_metrics_and_can_end_the_run(tmp_path, extensions):
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


@needs_mpi
def test_an_exchange_sums_as_another_one_does(tmp_path, extensions):
    """In float64, on two ranks: a + b rounds to float32 once, as it does there."""
    words = [f"--{name.replace('_', '-')}={value}" for name, value in SIZE.items()]
    how = {"ranks": 2, "env": {"PYTHONPATH": str(tmp_path)}, "timeout": 300}

    def train(out, *more):
        result = distgpt("train", *words, "--stage", "mpi", "--out", tmp_path / out, *more, **how)
        assert result.returncode == 0, result.stderr
        return losses(tmp_path / out)

    own = ("--components", "doubles:MyComponents")
    assert train("doubles", *own) == train("allreduce")
    one, other = ((tmp_path / sync / "weights.safetensors").read_bytes() for sync in ("doubles", "allreduce"))
    assert one[-4096:] == other[-4096:]
    sharded = [*words, "--stage", "mpi", "--grad-sync", "sharded", "--out", tmp_path / "no"]
    result = distgpt("train", *sharded, *own, **how)
    assert result.returncode == 2 and not (tmp_path / "no").exists()
    assert "MyComponents.exchange does not go with --grad-sync sharded" in result.stderr
    # That it is this file which sums: with half of its mean factor other gradients come out.
    (tmp_path / "doubles.py").write_text(FILES["doubles.py"].replace("mean_factor=1.0", "mean_factor=0.5"))
    assert train("half", *own) != losses(tmp_path / "doubles")


def test_a_kind_of_adapter_is_trained_beside_a_model_and_read_as_lora(tmp_path, extensions):
    base = package.train(**SIZE, out=tmp_path / "base")
    init = str(base.directory / "weights.safetensors")
    how = {**SIZE, "init": init, "lora_rank": 4, "lora_matrices": "q,v", "steps": 20}
    lora = package.train(**how, out=tmp_path / "lora")
    own = package.train(**how, out=tmp_path / "own", components=extensions("orthogonal"))
    assert bytes_of(own) != bytes_of(lora) and losses(own.directory) != losses(lora.directory)
    assert min(losses(own.directory)[-3:]) < losses(own.directory)[0]
    assert read_header(own.directory / "weights.safetensors").tensors.keys() == {
        *read_header(lora.directory / "weights.safetensors").tensors
    }
    first = package.train(**{**how, "steps": 1, "lr": 1e-9}, out=tmp_path / "one")
    a = tensor(first.directory / "weights.safetensors", "blocks.0.attn.q.lora_a")
    np.testing.assert_allclose(a @ a.T, np.eye(4), atol=1e-4)
    assert package.load(own.directory).generate("The", max_new_tokens=3, seed=1)


def tensor(path, name):
    from distgpt.core.saved.tensors import read_into

    host = {key: np.empty(entry.shape, np.float32) for key, entry in read_header(path).tensors.items()}
    read_into(path, host)
    return host[name]


def test_a_schedule_gives_the_rates_also_after_a_resume(tmp_path, extensions):
    restarting = extensions("restarts")
    sys.modules["restarts"].PERIOD = 4
    how = {**SIZE, "warmup": 0, "lr": 0.008, "save_every": 3}
    trained = package.train(**how, out=tmp_path / "run", components=restarting)
    again = package.train(**how | {"steps": 10}, out=tmp_path / "run", resume="auto")
    rates = [line["lr"] for line in (*trained.metrics, *again.metrics) if "lr" in line]
    wanted = [0.004 * (1 + np.cos(np.pi * (step % 4) / 4)) for step in range(10)]
    np.testing.assert_allclose(rates, wanted, rtol=1e-6)


def test_a_tokenizer_is_asked_for_saved_and_read_again(tmp_path, extensions):
    own = extensions("digraphs")
    trained = package.train(**SIZE, tokenizer="digraphs:thheinan", out=tmp_path / "run", components=own)
    saved = load_tokenizer(str(trained.directory))
    assert saved.kind == "digraphs" and saved.size == 260 and saved.describe()
    text = "the thing that he heard in a"
    ids = saved.encode(text)
    assert saved.decode(ids) == text and len(ids) < len(text) and (ids >= 256).any()
    assert json.loads(saved.to_json())["pairs"] == "thheinan"
    more = SIZE | {"steps": 8, "tokenizer": "digraphs:thheinan"}
    again = package.train(**more, out=tmp_path / "run", resume="auto")
    assert len(losses(again.directory)) == 8
    with pytest.raises(UsageError, match="no kind and no file"):
        load_tokenizer("digraphs:odd")


@pytest.mark.parametrize("name", ["rounded_base", "token_pairs"])
def test_a_sketch_names_what_is_there_and_is_type_checked(name):
    """mypy compares it with the contracts in `make lint`; nothing runs it."""
    assert importlib.import_module(f"sketches.{name}").__doc__
    assert f"`{name}.py`" in PAGE
    checked = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert "tests/sketches" in checked["files"] and checked["strict"]
