"""Training from Python: what the command does, with functions that are called on the way."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor

import distgpt
import numpy as np
import pytest
from distgpt.core.base.errors import UsageError
from distgpt.corpora import shards

from conftest import inside

SMALL = {
    "data": "story", "tokenizer": "word", "n_layer": 1, "n_head": 2, "n_embd": 16, "seq_len": 16,
    "batch_size": 4, "steps": 6, "eval_every": 3, "val_fraction": 0.1, "sample_every": 3, "threads": 1,
}  # fmt: skip


def lines(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_a_run_calls_back_and_gives_its_model(tmp_path):
    steps, evaluations, notes = [], [], []
    done = distgpt.train(
        **SMALL, out=tmp_path / "run", on_step=steps.append, on_evaluation=evaluations.append, on_note=notes.append
    )
    assert done.directory == tmp_path / "run"
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert [found["step"] for found in evaluations] == [0, 3, 6]
    assert done.metrics == lines(done.directory)
    loaded = distgpt.load(done.directory / "weights.safetensors")
    tokens = loaded.tokenizer.encode("the lamp")
    np.testing.assert_array_equal(done.model.logits(tokens), loaded.logits(tokens))
    assert done.model.generate("the lamp", 3) == loaded.generate("the lamp", 3)
    assert done.model.trace(tokens).attention[0].shape == (2, len(tokens), len(tokens))


def test_it_is_the_run_of_the_command(tmp_path, trained):
    """The run of the fixture, from its own configuration."""
    again = distgpt.train(config=trained / "config.toml", out=str(tmp_path / "run"), threads=1)
    for name in ("weights.safetensors", "config.toml", "tokenizer.json"):
        assert (again.directory / name).read_bytes() == (trained / name).read_bytes(), name
    resumed = distgpt.train(config=trained / "config.toml", out=again.directory, resume="auto", steps=31, threads=1)
    assert [line["step"] for line in resumed.metrics if "loss" in line] == [31]
    assert str(again.directory) in repr(resumed) and "loss" not in repr(resumed)
    done = distgpt.train(out=again.directory, resume="auto", threads=1)
    assert not done.metrics and done.directory == again.directory


def test_of_two_threads_that_train_in_one_directory_one_is_refused(tmp_path):
    def run(number):
        try:
            return distgpt.train(**SMALL, out=tmp_path / "run", on_step=lambda metrics: time.sleep(0.02))
        except UsageError as error:
            return error

    with ThreadPoolExecutor(2) as threads:
        refused, done = sorted(threads.map(run, range(2)), key=lambda found: hasattr(found, "model"))
    assert "run" in str(refused)
    assert [line["step"] for line in lines(done.directory) if "loss" in line] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("data", ["text.txt", "shards"])
def test_a_run_stays_in_its_directory_when_the_working_directory_changes(tmp_path, monkeypatch, data):
    elsewhere, text = tmp_path / "elsewhere", tmp_path / "text.txt"
    elsewhere.mkdir()
    text.write_text("a lamp and a tree and a sea\n" * 99)
    monkeypatch.setattr(shards, "MOST_OPEN", 1)
    monkeypatch.chdir(tmp_path)
    words = ["--tokenizer", "byte", "--out", "shards", "--shard-tokens", "99"]
    assert inside("data", "prepare", text.name, *words).returncode == 0
    relative = {**SMALL, "data": data, "tokenizer": "byte", "save_every": 2}
    done = distgpt.train(**relative, on_step=lambda metrics: os.chdir(elsewhere))
    assert done.directory.parent == tmp_path / "runs" and len(done.metrics) == len(lines(done.directory))
    assert not [*elsewhere.iterdir()]
    monkeypatch.chdir(tmp_path)
    relative |= {"steps": 8, "out": done.directory.relative_to(tmp_path), "resume": "auto"}
    resumed = distgpt.train(**relative, on_step=lambda metrics: os.chdir(elsewhere))
    assert [line["step"] for line in resumed.metrics if "loss" in line] == [7, 8]
    assert not [*elsewhere.iterdir()]


def test_an_exception_of_a_function_ends_the_run(tmp_path):
    def refuse(metrics):
        raise ValueError(f"enough at {metrics['step']}")

    with pytest.raises(ValueError, match="enough at 1"):
        distgpt.train(**SMALL, out=tmp_path / "run", on_step=refuse)
    assert not (tmp_path / "run" / "weights.safetensors").exists()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stop"] == "failed"


def test_what_makes_no_sense_is_refused_before_anything_is_written(tmp_path):
    for wrong, words in (
        ({"n_layers": 3}, "unknown setting 'n_layers'; did you mean 'n_layer'"),
        ({"steps": "6"}, "steps is '6'"),
        ({"stage": "gpu"}, "unknown stage"),
        ({"preset": "tiney"}, "did you mean 'tiny'"),
    ):
        with pytest.raises(UsageError, match=words):
            distgpt.train(**{**SMALL, **wrong}, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
