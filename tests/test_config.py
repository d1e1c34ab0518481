"""Configuration: precedence, refusals that help, the TOML round trip, schedules."""

import math
from dataclasses import replace

import pytest

from distgpt.config import ModelConfig, RunConfig, TrainConfig, parse_toml
from distgpt.errors import UsageError
from distgpt.optim import learning_rate
from distgpt.presets import PRESETS, preset
from distgpt.settings import resolve


def test_defaults_then_preset_then_file_then_flags(tmp_path):
    toml = tmp_path / "mine.toml"
    toml.write_text('preset = "gpt-mini"\nsteps = 7\n[train]\nlr = 0.5\n[model]\nn_layer = 3\n')
    name, run = resolve(None, toml, {"steps": 9})
    assert name == "mine"
    assert (run.train.steps, run.train.lr, run.model.n_layer) == (9, 0.5, 3)
    assert run.train.data == "story"  # from the preset
    assert run.train.beta2 == TrainConfig().beta2  # from the defaults
    assert resolve("microgpt", toml, {})[1].train.data == "names"  # the flag's preset goes first
    assert resolve(None, None, {}) == ("tiny", preset("tiny"))


@pytest.mark.parametrize("name", PRESETS)
def test_toml_round_trip(name):
    run = preset(name).with_values({"data": 'a "b"\\\n\tč'})
    assert RunConfig().with_values(parse_toml(run.to_toml(), "x")) == run


@pytest.mark.parametrize(
    "values,hint",
    [
        ({"n_layers": 3}, "n_layer"),
        ({"norm": "layer"}, "layernorm"),
        ({"steps": 1.5}, "int"),
        ({"steps": True}, "int"),
        ({"bias": 1}, "bool"),
        ({"steps": 0}, "at least 1"),
        ({"lr": 0.0}, "above 0"),
        ({"lr": float("nan")}, "above 0"),
        ({"lr": float("inf")}, "above 0"),
        ({"min_lr": 1.0}, "above lr"),
        ({"n_layer": 1001}, "at most"),
        ({"seq_len": 1 << 40}, "at most"),
        ({"n_head": 5}, "divided"),
        ({"positions": "rope", "n_head": 128}, "odd"),
        ({"batch_size": 6, "grad_accum": 4}, "grad_accum"),
        ({"beta1": 1.0}, "beta1"),
        ({"dtype": "float16"}, "float32"),
    ],
)
def test_impossible_values_are_refused_with_a_hint(values, hint):
    with pytest.raises(UsageError, match=hint) as caught:
        RunConfig().with_values(values)
    assert next(iter(values)) in str(caught.value)


@pytest.mark.parametrize(
    "text,hint",
    [
        ("steps = ", "not valid TOML"),
        ("[train]\nn_layer = 2", "n_layer"),
        ("[modell]\nn_layer = 2", "modell"),
        ("[model]\nn_layr = 2", "n_layer"),
    ],
)
def test_bad_files_are_refused_by_name(text, hint):
    with pytest.raises(UsageError, match=hint) as caught:
        RunConfig().with_values(parse_toml(text, "mine.toml"))
    assert "mine.toml" in str(caught.value)


def test_unknown_preset_names_the_nearest():
    with pytest.raises(UsageError, match="'gpt2-medium'"):
        preset("gpt2-medum")


def test_sizes_that_follow_from_others():
    config = ModelConfig(vocab_size=50257, n_embd=768, n_head=12)
    assert (config.padded_vocab, config.hidden, config.head_size) == (50304, 3072, 64)
    assert replace(config, mlp="swiglu").hidden == 2048
    assert replace(config, mlp_width=100).hidden == 100


def test_schedules():
    t = TrainConfig(steps=110, lr=1.0, min_lr=0.1, warmup=10, schedule="linear")
    assert learning_rate(t, 0) == pytest.approx(0.1)
    assert learning_rate(t, 9) == learning_rate(t, 10) == 1.0
    assert learning_rate(t, 60) == pytest.approx(0.55)
    assert learning_rate(t, 110) == pytest.approx(0.1)
    cosine = replace(t, schedule="cosine")
    assert learning_rate(cosine, 60) == pytest.approx(0.55)
    assert learning_rate(cosine, 35) == pytest.approx(0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2)
    assert learning_rate(replace(t, schedule="constant"), 100) == 1.0
