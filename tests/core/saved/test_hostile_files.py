"""Hostile weights, prompts and results: one-line errors without terminal commands."""

import json
import re

import distgpt
import numpy as np
import pytest
from complaints import done
from distgpt.core.saved.tensors import read_header, write_tensors

from conftest import SMALL, inside, refused

ESCAPE = "\x1b]0;owned\x07\x1b[2J\u202e"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
LABELLED = {"ctx": "the lamp", "endings": ["was lit", "was old", "the sea", "the boat"]}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    out = tmp_path_factory.mktemp("hostile") / "run"
    done("train", *SMALL, "--tokenizer", "byte", "--steps", "1", "--out", out, "--progress", "plain")
    return out / "weights.safetensors"


def changed(weights, path, change=None, **metadata):
    model = distgpt.load(weights)
    tensors = {name: np.array(values) for name, values in model.parameters().items()}
    if change:
        for values in tensors.values():
            change(values)
    write_tensors(path, tensors, read_header(weights).metadata | metadata)
    return path


DOTTED = "a." * 100_000 + "a"


def test_hostile_settings_are_one_line_errors(weights, tmp_path):
    """The TOML parser would take gigabytes for a key of many parts."""
    config, path = read_header(weights).metadata["config"], tmp_path / "w.safetensors"
    for value in ("[" * 3000 + "]" * 3000, "9" * 5000, "1e400", "1979-99-99"):
        changed(weights, path, config=re.sub(r"(?m)^n_embd = .*$", f"n_embd = {value}", config))
        refused(result := inside("weights", "info", path), 65, "w.safetensors")
        assert len(result.stderr) < 2000 and "Traceback" not in result.stderr
    (tmp_path / "x.toml").write_text(f"[model]\n{DOTTED} = 1\n")
    refused(inside("train", "--config", tmp_path / "x.toml", "--out", tmp_path / "no"), 2, "dots")
    changed(weights, path, config=f"n_embd.{DOTTED} = 1")
    refused(inside("infer", "--weights", path), 65, "w.safetensors", "dots")


def test_overflowing_weights_exit_with_76(weights, tmp_path):
    path = changed(weights, tmp_path / "w.safetensors", lambda values: values.fill(1e15))
    (tmp_path / "h.jsonl").write_text(json.dumps({**LABELLED, "label": 1}))
    for words in (
        ["infer", "--prompt", "x", "--max-new-tokens", "3", "--json"],
        ["eval", "--val", "names", "--val-tokens", "64", "--json"],
        ["eval", "--hellaswag", tmp_path / "h.jsonl", "--json"],
    ):
        result = inside(*words, "--weights", path, "--threads", "1")
        assert result.returncode == 76 and "\0" not in result.stdout and "{" not in result.stdout
        assert [line for line in result.stderr.splitlines() if line.startswith("distgpt: ")], result.stderr


def test_output_has_no_terminal_commands(weights, tmp_path):
    evil = tmp_path / f"a{ESCAPE}"
    evil.mkdir()
    own = changed(weights, evil / "w.safetensors", origin=f"from {ESCAPE}\nforged")
    (evil / "h.jsonl").write_text(json.dumps({**LABELLED, "label": ESCAPE}))
    (evil / "c.toml").write_text('"\\u001b[2J" = 1')
    curves = evil / "run"
    curves.mkdir()
    (curves / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    nothing = evil / "nothing"
    for words in (
        ["weights", "info", own], ["weights", "export", own, "--out", evil / "hf"],
        ["weights", "import", evil / "hf", "--out", evil / "back"], ["weights", "info", evil / "hf"],
        ["eval", "--weights", own, "--val", "story", "--val-tokens", "64"],
        ["eval", "--weights", own, "--hellaswag", evil / "h.jsonl"], ["estimate", "--config", evil / "c.toml"],
        ["plot", curves, "--title", ESCAPE, "--out", evil / "p.svg"], ["tokenizer", "info", "byte", "--text", ESCAPE],
        ["infer", "--weights", nothing], ["infer", f"--{ESCAPE}"],
        ["infer", "--top-k", ESCAPE], ["infer", "--stage", ESCAPE],
        ["train", "--data", nothing, "--out", evil / "run2"], ["train", "--preset", ESCAPE],
        [ESCAPE], ["bench", ESCAPE],
        ["bench", "stages", "--stages", ESCAPE],
    ):  # fmt: skip
        result = inside(*words, env={"OPENBLAS_CORETYPE": ESCAPE})
        found = CONTROL.search(result.stdout + result.stderr)
        assert not found, (words, found, result.stdout + result.stderr)
        assert len(result.stderr) < 2500 and "Traceback" not in result.stderr, (words, result.stderr)
        assert not re.search("^forged", result.stdout, re.MULTILINE)
