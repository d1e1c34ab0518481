"""Configuration: precedence, refusals that help, the TOML round trip, schedules."""

import math
from dataclasses import replace

import pytest

from distgpt.config import ModelConfig, RunConfig, TrainConfig, parse_toml
from distgpt.config.presets import PRESETS, preset, resolve
from distgpt.errors import UsageError
from distgpt.model.optim import learning_rate


def nowhere(path):
    raise AssertionError(f"{path} was read")


def test_defaults_then_preset_then_file_then_flags(tmp_path):
    toml = tmp_path / "mine.toml"
    toml.write_text('preset = "gpt-mini"\nsteps = 7\n[train]\nlr = 0.5\n[model]\nn_layer = 3\n')
    name, run = resolve(None, toml, {"steps": 9}, nowhere)
    assert name == "mine"
    assert (run.train.steps, run.train.lr, run.model.n_layer) == (9, 0.5, 3)
    assert run.train.data == "story"  # from the preset
    assert run.train.beta2 == TrainConfig().beta2  # from the defaults
    assert resolve("microgpt", toml, {}, nowhere)[1].train.data == "names"  # the flag's preset goes first
    assert resolve(None, None, {}, nowhere) == ("tiny", preset("tiny"))


def test_a_batch_in_tokens_and_one_in_sequences_replace_each_other(tmp_path):
    toml = tmp_path / "mine.toml"
    toml.write_text("[train]\nbatch_tokens = 4096\n[model]\nseq_len = 256\n")
    assert preset("gpt2").train.batch_size == 512
    assert preset("gpt2", {"seq_len": 256}).train.batch_size == 2048  # the recipe's 2¹⁹ tokens
    assert preset("gpt2", {"batch_size": 3}).train.batch_size == 3
    assert resolve("gpt2", toml, {}, nowhere)[1].train.batch_size == 16
    assert resolve("gpt2", toml, {"seq_len": 128}, nowhere)[1].train.batch_size == 32
    assert resolve("gpt2", toml, {"batch_size": 5}, nowhere)[1].train.batch_size == 5
    for values, words in (
        ({"batch_tokens": 1000, "seq_len": 256}, "multiple of seq_len 256"),
        ({"batch_tokens": 1024, "batch_size": 4}, "give one of them"),
        ({"batch_tokens": 1.5}, "multiple"),
    ):
        with pytest.raises(UsageError, match=words):
            preset("tiny", values)


def test_a_run_that_begins_with_weights_has_their_model():
    held = ModelConfig(vocab_size=99, n_layer=2, seq_len=64, positions="learned")
    _, run = resolve("gpt2", None, {"init": "w", "steps": 5}, {"w": held}.get)
    assert run.model == held
    assert run.train.batch_size == (1 << 19) // 64 and run.train.steps == 5
    with pytest.raises(UsageError, match="w holds a model whose n_layer is 2; 3 is asked for"):
        resolve("gpt2", None, {"init": "w", "n_layer": 3}, {"w": held}.get)
    with pytest.raises(UsageError, match="seq_len"):
        resolve("gpt2", None, {"init": "w", "seq_len": 128}, {"w": held}.get)
    turned = replace(held, positions="rope")
    assert resolve("tiny", None, {"init": "w", "seq_len": 128}, {"w": turned}.get)[1].model.seq_len == 128


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
        ({"lr": float("nan")}, "finite"),
        ({"lr": float("inf")}, "finite"),
        ({"min_lr": 1.0}, "above lr"),
        ({"n_layer": 1001}, "at most"),
        ({"seq_len": 1 << 40}, "at most"),
        ({"n_head": 5}, "divided"),
        ({"positions": "rope", "n_head": 128}, "odd"),
        ({"batch_size": 6, "grad_accum": 4}, "grad_accum"),
        ({"val_fraction": 1.0}, "val_fraction"),
        ({"eval_every": -1}, "at least 0"),
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
