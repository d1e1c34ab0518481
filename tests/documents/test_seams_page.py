"""The page about seams: each of its files, attached by its line of a table, is one that a run trains with."""

import ast
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
from distgpt.components import TABLES
from distgpt.core.base import tables
from distgpt.core.base.errors import UsageError
from distgpt.core.data.tokenizers import load_tokenizer
from distgpt.core.saved.tensors import read_header

PAGE = (ROOT / "docs" / "explanation" / "seams.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
FILES = {text.splitlines()[0].removeprefix("# "): text for text in BLOCKS if text.startswith("# ")}
ROWS = [
    {table: ast.literal_eval(f"{{{line}}}")}
    for table, line in re.findall(
        r"^In the table `(.*?)` of `components.py`:\n\n```python\n(.*?)\n```", PAGE, re.MULTILINE
    )
]
SIZE = {"preset": "tiny-adamw", "n_layer": 1, "n_head": 2, "n_embd": 16, "seq_len": 16, "batch_size": 4}
SIZE |= {"data": "story", "steps": 6, "threads": 1}
# What a user has done who has written the files and the lines of the page.
ATTACHED = f"""import sys
from distgpt.components import TABLES
for row in {ROWS!r}:
    for table, rows in row.items():
        TABLES[table] |= rows
from distgpt.commands.cli import main
main()"""


@pytest.fixture
def attached(tmp_path, monkeypatch):
    """Write the page's files, and hand in its lines."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    for row in ROWS:
        for table, rows in row.items():
            monkeypatch.setitem(tables._paths, table, {**TABLES[table], **rows})
    return tmp_path


def bytes_of(trained):
    return (trained.directory / "weights.safetensors").read_bytes()


def test_each_is_one_file_of_at_most_forty_lines_and_one_line():
    assert [list(row) for row in ROWS] == [["guards"], ["exchanges"], ["models"], ["tokenizers"]]
    assert len(FILES) == 4
    assert all(len(text.splitlines()) <= 42 for text in FILES.values())


def test_a_guard_adds_to_the_metrics_and_can_end_the_run(tmp_path, request):
    plain = package.train(**SIZE, out=tmp_path / "plain")
    folder = request.getfixturevalue("attached")
    watched = package.train(**SIZE, out=folder / "watched")
    assert bytes_of(plain) == bytes_of(watched)
    assert "memory_mb" not in plain.metrics[0] and watched.metrics[0]["memory_mb"] > 1
    sys.modules["memory_guard"].MOST = 0
    with pytest.raises(BaseException, match="memory is running out"):
        package.train(**SIZE, out=folder / "ended")
    assert 1 <= len(losses(folder / "ended")) < SIZE["steps"]
    assert list((folder / "ended" / "checkpoints").iterdir())


@needs_mpi
def test_an_exchange_sums_as_another_one_does(attached):
    """In float64, on two ranks: a + b rounds to float32 once, as it does there."""
    (attached / "attach.py").write_text(ATTACHED)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in SIZE.items()]
    program = [sys.executable, str(attached / "attach.py")]
    how = {"ranks": 2, "program": program, "env": {"PYTHONPATH": str(attached)}, "timeout": 300}
    for sync in ("doubles", "allreduce"):
        result = distgpt(
            "train", *words, "--stage", "mpi", "--grad-sync", sync, "--out", attached / sync, **how
        )
        assert result.returncode == 0, result.stderr
    assert losses(attached / "doubles") == losses(attached / "allreduce")
    one, other = ((attached / sync / "weights.safetensors").read_bytes() for sync in ("doubles", "allreduce"))
    assert one[-4096:] == other[-4096:]
    # That it is this file which sums: with half of its mean factor other gradients come out.
    text = (attached / "doubles.py").read_text()
    (attached / "doubles.py").write_text(text.replace("mean_factor=1.0", "mean_factor=0.5"))
    halved = distgpt(
        "train", *words, "--stage", "mpi", "--grad-sync", "doubles", "--out", attached / "half", **how
    )
    (attached / "doubles.py").write_text(text)
    assert halved.returncode == 0 and losses(attached / "half") != losses(attached / "doubles")
    unknown = distgpt("train", *words, "--grad-sync", "triples", program=program, env=how["env"])
    assert unknown.returncode == 2 and "doubles" in unknown.stderr


def test_a_kind_of_adapter_is_trained_beside_a_model_and_read_as_lora(attached):
    base = package.train(**SIZE, out=attached / "base")
    init = str(base.directory / "weights.safetensors")
    how = {**SIZE, "init": init, "lora_rank": 4, "lora_matrices": "q,v", "steps": 20}
    own = package.train(**how, adapter_kind="orthogonal", out=attached / "own")
    lora = package.train(**how, out=attached / "lora")
    assert bytes_of(own) != bytes_of(lora) and losses(own.directory) != losses(lora.directory)
    assert min(losses(own.directory)[-3:]) < losses(own.directory)[0]
    assert read_header(own.directory / "weights.safetensors").tensors.keys() == {
        *read_header(lora.directory / "weights.safetensors").tensors
    }
    first = package.train(**{**how, "steps": 1, "lr": 1e-9}, adapter_kind="orthogonal", out=attached / "one")
    a = tensor(first.directory / "weights.safetensors", "blocks.0.attn.q.lora_a")
    np.testing.assert_allclose(a @ a.T, np.eye(4), atol=1e-4)
    assert package.load(init, adapter=own.directory).generate("The", max_new_tokens=3, seed=1)


def tensor(path, name):
    from distgpt.core.saved.tensors import read_into

    host = {key: np.empty(entry.shape, np.float32) for key, entry in read_header(path).tensors.items()}
    read_into(path, host)
    return host[name]


def test_a_tokenizer_is_asked_for_saved_and_read_again(attached):
    trained = package.train(**SIZE, tokenizer="digraphs:thheinan", out=attached / "run")
    saved = load_tokenizer(str(trained.directory))
    assert saved.kind == "digraphs" and saved.size == 260 and saved.describe()
    text = "the thing that he heard in a"
    ids = saved.encode(text)
    assert saved.decode(ids) == text and len(ids) < len(text) and (ids >= 256).any()
    assert json.loads(saved.to_json())["pairs"] == "thheinan"
    more = SIZE | {"steps": 8, "tokenizer": "digraphs:thheinan"}
    again = package.train(**more, out=attached / "run", resume="auto")
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
