"""Configuration: settings, options, precedence, invalid values, TOML and schedules."""

import contextlib
import math
import re
from dataclasses import fields, replace

import click
import pytest
from distgpt.commands.help import OPTIONS, spelled
from distgpt.commands.options import set_by_user, settings, settings_but, stage_options
from distgpt.core.base.errors import UsageError
from distgpt.core.config import (
    SETTINGS,
    GpuConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
    former_choices,
    parse_toml,
    settings_of,
)
from distgpt.core.config.presets import PRESETS, preset
from distgpt.core.config.run_request import PRETRAINED, asked_for, resolve, resumed
from distgpt.core.config.setting import LARGEST_INT
from distgpt.core.model.optim import SCHEDULES, learning_rate
from hypothesis import given
from hypothesis import strategies as st

DEFAULTS = {f.name: f.default for f in (*fields(ModelConfig), *fields(TrainConfig), *fields(GpuConfig))}


def other(name, about):
    default = DEFAULTS[name]
    if about.kind is bool:
        return not default
    if name == "lora_matrices":
        return "q,v"
    if about.kind is str:
        return next((choice for choice in about.choices if choice != default), "x")
    return 2 * default or 2 if about.kind is int else default / 2 or 0.001


def words(name, about, value):
    if name in SETTINGS and name not in OPTIONS:
        return ["--set", f"{name}={value}"]
    flags = spelled(name, about).split("/")
    if about.kind is bool:
        return [flags[not value]]
    return [flags[0], str(value)]


def test_options_and_set_reach_the_configuration():
    command = click.command()(settings(lambda **flags: set_by_user(flags)))
    for name in SETTINGS:
        about, value = SETTINGS[name], other(name, SETTINGS[name])
        flags = command.main(words(name, about, value), standalone_mode=False)
        assert flags == {name: value}
        run = resolve(asked_for(flags), preset("tiny-adamw").model if name == "init" else None)
        implied = PRETRAINED if name == "init" else {}
        base = preset("tiny-adamw" if name == "init" else "tiny")
        assert run == base.with_values({name: value, **implied}), name
        if about.kind is bool:
            assert command.main(words(name, about, not value), standalone_mode=False) == {name: not value}
        assert command.main(["--set", f"{name}={value}"], standalone_mode=False) == {name: value}
    assert command.main(["--batch-tokens", "256"], standalone_mode=False) == {"batch_tokens": 256}
    unused = click.command()(settings_but("--steps", "--bias/--no-bias")(lambda **_: None))
    assert set(OPTIONS) - {option.name for option in unused.params} == {"steps", "bias"}


@pytest.mark.parametrize("words, message", [
    ("rope_bas=3", "unknown setting 'rope_bas'; did you mean 'rope_base'"),
    ("rope_base=far", "rope_base must be of type float, not 'far'"),
    ("steps=1.5", "steps must be of type int, not '1.5'"),
    ("tied=1", "tied must be true or false, not '1'"),
    ("steps", "must be NAME=VALUE"),
    ("steps=3 --steps 4", "steps is set twice"),
])  # fmt: skip
def test_set_rejects_invalid_assignments(words, message):
    command = click.command()(settings(lambda **flags: set_by_user(flags)))
    with pytest.raises(UsageError, match=message):
        command.main(["--set", *words.split()], standalone_mode=False)


def test_last_set_wins_and_covers_gpu_settings():
    command = click.command()(stage_options(settings(lambda stage, threads, gpu, **flags: (gpu, flags))))
    gpu, flags = command.main(
        ["--set", "cuda_graph=false", "--set", "lr=1", "--set", "lr=2"], "x", standalone_mode=False
    )
    assert not gpu.graphs and set_by_user(flags) == {"lr": 2.0}


def test_gpu_options_reach_their_configuration():
    command = click.command()(stage_options(lambda stage, threads, gpu: gpu))
    assert command.main([], standalone_mode=False) == GpuConfig()
    for name, about in settings_of(GpuConfig).items():
        found = command.main(words(name, about, value := other(name, about)), standalone_mode=False)
        assert found == replace(GpuConfig(), **{name: value}), name


def test_precedence_is_defaults_preset_file_flags(tmp_path):
    toml = tmp_path / "mine.toml"
    toml.write_text('preset = "gpt-mini"\nsteps = 7\n[train]\nlr = 0.5\n[model]\nn_layer = 3\n')
    request = asked_for({"steps": 9}, toml=toml)
    run = resolve(request)
    assert request.name == "mine" and (run.train.steps, run.train.lr, run.model.n_layer) == (9, 0.5, 3)
    assert run.train.data == "story"  # preset
    assert run.train.beta2 == TrainConfig().beta2  # default
    request = asked_for({}, "microgpt", toml)  # the flag's preset overrides the file's
    assert (request.name, resolve(request).train.data) == ("microgpt", "names")
    assert (asked_for({}).name, resolve(asked_for({}))) == ("tiny", preset("tiny"))


def test_renamed_choices_are_read_from_files():
    for former in ("auto", "chunked", "hierarchical", "packed"):
        text = f'[train]\ngrad_sync = "{former}"\ndata = "auto"\n'
        assert parse_toml(text, "a file") == {"grad_sync": "allreduce", "data": "auto"}
        assert former_choices(text, "a file") == [f"grad_sync = '{former}' is 'allreduce' now"]
    assert former_choices('[train]\ngrad_sync = "sharded"\nunknown = 1\n', "a file") == []


def test_batch_tokens_and_batch_size_replace_each_other(tmp_path):
    toml = tmp_path / "mine.toml"
    toml.write_text("[train]\nbatch_tokens = 4096\n[model]\nseq_len = 256\n")
    for changes, alone, on_file in (
        ({}, 512, 16),
        ({"seq_len": 256}, 2048, 16),  # the recipe's 2¹⁹ tokens
        ({"seq_len": 128}, 4096, 32),
        ({"batch_size": 5}, 5, 5),
    ):
        assert preset("gpt2", changes).train.batch_size == alone
        assert resolve(asked_for(changes, "gpt2", toml)).train.batch_size == on_file


def test_init_determines_the_model():
    held = ModelConfig(vocab_size=99, n_layer=2, seq_len=64, positions="learned")
    run = resolve(asked_for({"init": "w", "steps": 5}, "gpt2"), held)
    assert run.model == held and run.train.batch_size == (1 << 19) // 64 and run.train.steps == 5
    for changes, message in (
        ({"n_layer": 3}, "w contains a model with n_layer 2, not 3"),
        ({"seq_len": 128}, "seq_len"),
    ):
        with pytest.raises(UsageError, match=message):
            resolve(asked_for({"init": "w", **changes}, "gpt2"), held)
    rotary = replace(held, positions="rope")
    assert resolve(asked_for({"init": "w", "seq_len": 128}, "tiny"), rotary).model.seq_len == 128


VALUES = {
    bool: st.booleans(),
    int: st.integers(1, 1 << 40),
    float: st.floats(1e-300, 1e9),
    str: st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=50),
}
CHANGES = [
    st.tuples(st.just(name), st.sampled_from([*about.choices]) if about.choices else VALUES[about.kind])
    for name, about in SETTINGS.items()
]


@given(st.sampled_from([*PRESETS]), st.lists(st.one_of(CHANGES), max_size=4))
def test_configurations_survive_toml(name, changes):
    run = preset(name)
    with contextlib.suppress(UsageError):
        run = run.with_values(dict(changes))
    assert RunConfig().with_values(parse_toml(run.to_toml(), "x")) == run


def test_settings_and_presets_survive_toml():
    runs = [preset(name).with_values({"data": 'a "b"\\\n\tč'}) for name in PRESETS]
    for run in [*runs, RunConfig().with_values({name: other(name, about) for name, about in SETTINGS.items()})]:
        assert RunConfig().with_values(parse_toml(run.to_toml(), "x")) == run


@pytest.mark.parametrize("values, hint", [
    ({"n_layers": 3}, "did you mean 'n_layer'"),
    ({"batch_tokens": 3}, "unknown setting"),
    ({"norm": "layer"}, r"did you mean 'layernorm'\? \(allowed: layernorm, rmsnorm\)"),
    ({"dtype": "float16"}, "float32"),
    ({"steps": 1.5}, "type int"),
    ({"steps": True}, "type int"),
    ({"bias": 1}, "type bool"),
    ({"lr": "1"}, "type float"),
    ({"data": 1}, "type str"),
    ({"data": "\udc80"}, "not valid UTF-8"),
    ({"data": "a\0b"}, "without NUL"),
    ({"data": "a" * 5000}, "at most 4096 bytes"),
    ({"data": [[1] * 99] * 99}, "type str"),
    ({"steps": 1 << 20_000}, "at most .* about 6,021 digits"),
    ({"lr": float("nan")}, "finite"),
    ({"lr": float("inf")}, "finite"),
    ({"rope_base": float("inf")}, "finite"),
    ({"weight_decay": 10**400}, "finite"),
    ({"min_lr": 1.0}, "must not exceed lr"),
    ({"n_head": 5}, "must be a multiple of n_head"),
    ({"positions": "rope", "n_head": 128}, "even"),
    ({"n_kv_head": 3}, "must be a multiple of n_kv_head"),
    ({"n_kv_head": 8}, "must be a multiple"),
    ({"rope_slow": 2.0, "rope_fast": 2.0}, "must be less than rope_fast"),
    ({"head_dim": 5, "positions": "rope"}, "an even head_dim, not 5"),
    ({"qk_norm": False, "qk_norm_gain": True}, "requires qk_norm"),
    ({"batch_size": 6, "grad_accum": 4}, "must be a multiple of grad_accum"),
])  # fmt: skip
def test_invalid_values_are_rejected_with_hint(values, hint):
    with pytest.raises(UsageError, match=hint) as caught:
        RunConfig().with_values(values)
    assert next(iter(values)) in str(caught.value)


@pytest.mark.parametrize("name, values, hint", [
    ("tiny", {"batch_tokens": 1000, "seq_len": 256}, "multiple of seq_len"),
    ("tiny", {"batch_tokens": 1024, "batch_size": 4}, "cannot be combined"),
    ("tiny", {"batch_tokens": 1.5}, "multiple"),
    ("tiny", {"batch_tokens": 0}, "multiple"),
    ("gpt2-medum", {}, "'gpt2-medium'"),
    ("nope", {}, r"unknown preset 'nope' \(allowed: tiny, .*, S, M, L, VL, XL, "),  # preset order
])  # fmt: skip
def test_invalid_presets_and_batches_are_rejected(name, values, hint):
    with pytest.raises(UsageError, match=hint):
        preset(name, values)


def test_values_are_valid_up_to_limits():
    for name, about in SETTINGS.items():
        if about.kind not in (int, float):
            continue

        def beside(limit, side, kind=about.kind):
            return limit + side if kind is int else math.nextafter(limit, side * math.inf)

        assert (about.low is None) != (about.above is None), f"{name} needs one lower limit"
        most = LARGEST_INT if about.kind is int and about.most is None else about.most
        for limit, side, is_allowed, why in (
            (about.low, -1, True, "at least"),
            (about.above, 1, False, "above"),
            (most, 1, True, "at most"),
            (about.below, -1, False, "below"),
        ):
            if limit is not None:
                allowed, beyond = (limit, beside(limit, side))[:: 1 if is_allowed else -1]
                about.check(name, allowed)
                with pytest.raises(UsageError, match=re.escape(f"{name} must be {why}")):
                    about.check(name, beyond)


@pytest.mark.parametrize("text, hint", [
    ("steps = ", "not valid TOML: Invalid"),
    ("[train]\nn_layer = 2", r"\[train\] has no setting 'n_layer'"),
    ("[train]\nbtach_tokens = 2", "did you mean 'batch_tokens'"),
    ("[modell]\nn_layer = 2", "modell"),
    ("[model]\nn_layr = 2", "did you mean 'n_layer'"),
    ("data = " + "[" * 3000 + "]" * 3000, "nested too deeply"),
    ("steps = " + "9" * 5000, "not valid TOML: a number has too many digits"),
    ("# " + "long" * 100_000, "longer than"),
], ids=range(8))  # fmt: skip
def test_invalid_toml_files_are_rejected(text, hint):
    with pytest.raises(UsageError, match=f"mine.toml.*{hint}"):
        parse_toml(text, "mine.toml")


def test_derived_sizes():
    config = ModelConfig(vocab_size=50257, n_embd=768, n_head=12)
    assert (config.padded_vocab, config.hidden, config.head_size) == (50304, 3072, 64)
    assert [replace(config, **c).hidden for c in ({"mlp": "swiglu"}, {"mlp_width": 100})] == [2048, 100]


def test_schedules():
    t = TrainConfig(steps=110, lr=1.0, min_lr=0.1, warmup=10, decay_fraction=0.4)
    expected = {
        "linear": {0: 0.1, 9: 1.0, 10: 1.0, 60: 0.55, 110: 0.1},
        "cosine": {0: 0.1, 60: 0.55, 35: 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2, 110: 0.1},
        "constant": {0: 0.1, 100: 1.0},
        "wsd": {0: 0.1, 9: 1.0, 10: 1.0, 66: 1.0, 88: 0.55, 110: 0.1},
    }
    assert set(SETTINGS["schedule"].choices) == {*SCHEDULES} == {*expected}
    for schedule, rates in expected.items():
        found = {step: learning_rate(replace(t, schedule=schedule), step) for step in rates}
        assert found == pytest.approx(rates), schedule


def test_default_warmup_fits_short_runs(tmp_path):
    def warmup(toml="", **flags):
        (tmp_path / "c.toml").write_text(toml)
        return resolve(asked_for(flags, "tiny-adamw", tmp_path / "c.toml")).train.warmup

    assert (warmup(), warmup(steps=600), warmup(steps=40), warmup(steps=1)) == (120, 120, 8, 0)
    assert warmup(steps=40, warmup=30) == warmup("warmup = 30", steps=40) == 30
    shorter = asked_for({"steps": 40}, "tiny-adamw", None)
    assert resumed(preset("tiny-adamw"), shorter).train.warmup == 8


def test_removed_settings_matter_only_at_other_values():
    assert parse_toml("[train]\nrecheck_every = 0\nsteps = 7\n", "a file") == {"steps": 7}
    values = parse_toml("recheck_every = 3\n", "a file")
    with pytest.raises(UsageError, match="no longer has the setting recheck_every"):
        RunConfig().with_values(values)
