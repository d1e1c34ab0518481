"""Ensembles: the combined model, and the runs of its models."""

import re
import signal
from dataclasses import replace
from types import SimpleNamespace

import distgpt as library
import numpy as np
import pytest
from distgpt.core.config import ModelConfig, RunConfig
from distgpt.core.config.run_request import asked_for
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.cpu.stages import open_stage
from distgpt.core.data.tokenizers import load_tokenizer
from distgpt.core.saved.modelfile import Description, save_model
from distgpt.core.train.step import Step
from distgpt.models.ensemble import write_ensemble
from distgpt.recipes import scaling, within
from stopping import at_call

from conftest import distgpt, inside, logged, refused, succeeded
from models import build, plain_logits

PLAIN = ModelConfig(
    vocab_size=256, seq_len=24, n_layer=3, n_head=4, n_kv_head=2, n_embd=64, norm="rmsnorm", norm_gain=False, bias=False
)
CONFIGS = {
    "fast": replace(
        PLAIN,
        tied=False,
        mlp="relu2",
        positions="rope",
        qk_norm=True,
        embed_norm=True,
        value_embeddings=True,
        previous_embedding=True,
        window=8,
    ),
    "swiglu": replace(PLAIN, tied=False, mlp="swiglu"),
}
SMALL = ("--preset", "tiny", "--n-layer", "1", "--n-embd", "32", "--n-head", "2", "--seq-len", "32", "--threads", "1")
SHORT = (*SMALL, "--steps", "6", "--data", "story", "--val-fraction", "0.2", "--set", "ensemble=2")


@pytest.fixture(params=CONFIGS)
def members(request, tmp_path):
    paths = []
    for seed in range(3):
        model = build(CONFIGS[request.param], CpuKernels("float32", 1))
        model.initialise(seed)
        paths.append(tmp_path / f"{seed}.safetensors")
        save_model(paths[-1], model, Description(RunConfig(CONFIGS[request.param]), load_tokenizer("byte")))
    return paths


def log_mean(logits):
    """Return the log-probabilities of the normalized geometric mean of predictions."""
    mean = np.mean([each - np.logaddexp.reduce(each, -1, keepdims=True) for each in logits], 0)
    return mean - np.logaddexp.reduce(mean, -1, keepdims=True)


def refuse_other_scores(weights, tokens, expected):
    """Compare the log-probabilities of decoders, which skip inputs with weight 0."""
    for dtype, close in (("float32", 1e-5), ("bfloat16", 0.003), ("int8", 0.006)):
        sample = library.load(weights, dtype=dtype).generate(tokens.tolist(), 1, logprobs=1, prompt_logprobs=True)
        scored = [each.logprob for each in sample.prompt_likelihoods[1:]]
        np.testing.assert_allclose(scored, expected[np.arange(23), tokens[1:]], atol=close, err_msg=dtype)


@pytest.mark.smoke
def test_ensemble_averages_predictions(members, tmp_path):
    out = tmp_path / "ensemble.safetensors"
    assert "3 models" in succeeded("weights", "ensemble", *members, "--out", out).stdout
    tokens = np.random.default_rng(0).integers(0, 256, 24)
    ensemble, models = library.load(out), [library.load(path) for path in members]
    expected = log_mean([plain_logits(each.config, each.parameters(), tokens) for each in models])
    assert log_mean([ensemble.logits(tokens).astype(float)]) == pytest.approx(expected, abs=1e-4)
    refuse_other_scores(out, tokens, expected)
    assert "3 groups of channels" in succeeded("weights", "info", out).stdout
    # Training connects the models, in one matrix after another.
    rng, trained = np.random.default_rng(1), tmp_path / "trained.safetensors"
    for name in ("blocks.2.attn.qkv.w", "blocks.0.attn.proj.w", "blocks.1.mlp.fc.w", "blocks.1.mlp.proj.w"):
        w = ensemble.parameters()[name]
        w += 0.05 * rng.standard_normal(w.shape)
        ensemble.save(trained)
        refuse_other_scores(trained, tokens, log_mean([ensemble.logits(tokens).astype(float)]))


def test_ensembles_of_ensembles(members, tmp_path):
    two, four = tmp_path / "two.safetensors", tmp_path / "four.safetensors"
    write_ensemble(members[:2], two)
    write_ensemble([two, two], four)
    tokens = np.arange(24)
    whole, half = (log_mean([library.load(path).logits(tokens)]) for path in (four, two))
    assert whole == pytest.approx(half, abs=1e-4)


def test_unequal_models_are_refused(members, tmp_path):
    out = tmp_path / "out.safetensors"
    other, tied = tmp_path / "other.safetensors", tmp_path / "tied.safetensors"
    for path, config in ((other, replace(CONFIGS["fast"], n_layer=1)), (tied, PLAIN)):
        save_model(path, build(config, CpuKernels("float32", 1)), Description(RunConfig(config), None))
    refused(inside("weights", "ensemble", members[0], other, "--out", out), 2, f"{other} has another architecture")
    refused(inside("weights", "ensemble", tied, tied, "--out", out), 2, "untied output layer")
    assert not out.exists()
    write_ensemble(members[:2], out)
    refused(inside("weights", "export", out, "--out", tmp_path / "x"), 2, "norm_groups")


@pytest.mark.smoke
def test_ensemble_resumes_bitwise_identical(tmp_path, monkeypatch):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    said = succeeded("train", *SHORT, "--out", whole, "--metrics-textfile", tmp_path).stdout
    ends = [path.read_text() for path in tmp_path.glob("*.prom")]
    assert len(ends) == 2 and all(re.search(r"exit_code\{.*\} 0\.0", text) for text in ends)
    assert f"model 2 of 2, in {whole}-member-2" in said and f"infer --weights {whole / 'ensemble.safetensors'}" in said
    seeds = [library.load(f"{path}/best.safetensors").parameters()["wte"] for path in (whole, f"{whole}-member-2")]
    assert not np.allclose(*seeds)
    with monkeypatch.context() as patched:
        at_call(patched, Step, "launch", 9, signal.SIGTERM)
        stopped = inside("train", *SHORT, "--out", halves)
    assert stopped.returncode == 143 and f"resume with --out {halves} --resume auto" in stopped.stderr
    assert not (halves / "ensemble.safetensors").exists()
    resumed = succeeded("train", "--out", halves, "--resume", "auto", "--threads", "1").stdout
    assert "model 2 of 2" in resumed and "resuming from" in resumed
    written = [(run / "ensemble.safetensors").read_bytes() for run in (whole, halves)]
    assert written[0] == written[1]
    assert len([line for line in logged(f"{halves}-member-2") if "loss" in line]) == 6


@pytest.fixture
def finished(tmp_path):
    """Return the directory of a finished ensemble, and the words that resume it."""
    out = tmp_path / "run"
    succeeded("train", *SHORT, "--out", out)
    return out, ("train", "--out", out, "--resume", "auto", "--threads", "1")


def test_finished_ensemble_changes_only_if_damaged(finished, tmp_path):
    run, resume = finished
    config, written = (run / "config.toml").read_text(), (run / "ensemble.safetensors").read_bytes()
    again = succeeded(*resume, "--lr", "0.5").stdout
    assert "is finished; nothing was changed" in again and "model 2" not in again
    assert (run / "config.toml").read_text() == config
    (run / "ensemble.safetensors").write_bytes(written[:1000])
    assert re.search("took .* for 0 models of 2", succeeded(*resume).stdout)
    assert (run / "ensemble.safetensors").read_bytes() == written
    by_hand = tmp_path / "by-hand.safetensors"
    succeeded("weights", "ensemble", run, f"{run}-member-2", "--out", by_hand)
    assert by_hand.read_bytes() == written
    scored = succeeded("eval", "--weights", run, "--val", "story", "--threads", "1").stdout
    assert "bits per byte" in scored


def test_finished_ensemble_gets_models_and_steps(finished, tmp_path, monkeypatch):
    run, resume = finished
    larger = succeeded(*resume, "--set", "ensemble=3").stdout
    assert "model 3 of 3" in larger and re.search("took .* for 1 model of 3", larger)
    again = succeeded(*resume).stdout  # the setting is kept
    assert "is finished; nothing was changed" in again
    with monkeypatch.context() as patched:
        at_call(patched, Step, "launch", 1, signal.SIGTERM)
        assert inside(*resume, "--steps", "8").returncode == 143
    assert not (run / "ensemble.safetensors").exists()  # its first model has changed
    longer = succeeded(*resume).stdout
    assert longer.count("resuming from") == 3 and re.search("took .* for 3 models", longer)
    branch = succeeded("train", "--resume", run, "--out", tmp_path / "branch", "--steps", "9", "--threads", "1").stdout
    assert "model 2" not in branch and library.load(tmp_path / "branch").config.norm_groups == 1


def test_python_trains_an_ensemble(tmp_path):
    settings = {"n_layer": 1, "n_embd": 32, "n_head": 2, "seq_len": 32, "steps": 4, "data": "story", "threads": 1}
    trained = library.train("tiny", **settings, ensemble=2, out=tmp_path / "run")
    assert trained.model.config.norm_groups == 2 and trained.directory == tmp_path / "run"
    assert [line["step"] for line in trained.metrics if "loss" in line] == [1, 2, 3, 4] * 2
    notes = []
    again = library.train(out=tmp_path / "run", resume="auto", threads=1, on_note=notes.append)
    assert "is finished" in notes[-2] and again.metrics == [] and again.model.config.norm_groups == 2
    grown = library.train(out=tmp_path / "run", resume="auto", threads=1, ensemble=3)  # without held-out text
    assert grown.model.config.norm_groups == 3 and len(grown.metrics) == 4


@pytest.mark.parametrize("words, why", [
    (("--preset", "gpt2", "--n-layer", "1"), "untied output layer"),
    (("--preset", "tiny", "--set", "ensemble=65"), "ensemble"),
    (("--preset", "tiny", "--set", f"seed={2**63 - 1}"), "seed"),
])  # fmt: skip
def test_impossible_ensembles_are_refused(words, why, tmp_path):
    refused(inside("train", "--set", "ensemble=2", *words, "--out", tmp_path / "run"), 2, why)
    assert not (tmp_path / "run").exists()


def test_directories_of_other_runs_are_refused(tmp_path):
    """At the start, not after the first model."""
    other = tmp_path / "run-member-2"
    other.mkdir()
    refused(inside("train", *SHORT, "--out", tmp_path / "run"), 2, f"{other} already exists")
    assert not (tmp_path / "run").exists()


@pytest.fixture
def chosen(monkeypatch):
    """Return the request after --within 5m, on a machine that takes 6 seconds to measure depth 1."""
    now = [1000.0]

    def speed(stage, run):
        now[0] += 6
        return 1e5, 0.0

    def request(**given):
        stage = replace(open_stage("serial", 1), begun=now[0])
        return within.with_clock(asked_for({"within": "5m", "depth": 1, "data": "story", **given}), stage, print)

    monkeypatch.setattr(within, "measured_speed", speed)
    monkeypatch.setattr(within, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return request


@pytest.mark.parametrize("size", [1, 3])
def test_models_share_the_time_of_measuring(size, chosen):
    assert chosen(ensemble=size).uncounted == pytest.approx(6 * (1 - 1 / size))


def test_within_trains_one_model_if_others_cannot_be_averaged(chosen):
    given = {}, {"tied": True}, {"lora_rank": 4}, {"family": "llama"}
    several, *one = [chosen(**each).given["ensemble"] for each in given]
    assert several > 1 and one == [1, 1, 1]


@pytest.mark.smoke
def test_ranks_train_an_ensemble(tmp_path):
    out = tmp_path / "run"
    words = (*SHORT, "--batch-size", "4", "--stage", "mpi", "--out", out)
    said = succeeded("train", *words, by=distgpt, ranks=2).stdout
    assert said.count("for 2 models") == 1 and library.load(out).config.norm_groups == 2


def test_short_texts_get_ensembles():
    short, long = scaling.Text(347_000, 2048), scaling.Text(5e7, 8192)
    rates = {depth: 5e10 / scaling.flops(depth, short) for depth in (1, 2, 3, 4)}

    def chosen(minutes, text, **how):
        return scaling.choose(60 * minutes, rates, text, **how)

    assert chosen(30, short).ensemble > 1 == chosen(30, long).ensemble == chosen(1.9, short).ensemble
    widest = chosen(1e6, short)
    assert widest.ensemble > 1 and widest.ensemble * scaling.width(widest.depth) <= scaling.WIDEST_ENSEMBLE
    for size in (1, 3):
        given = chosen(30, short, ensemble=size)
        assert given.ensemble == size and given.seconds * size <= 1800
        assert given.bits_per_byte >= chosen(30, short).bits_per_byte
    bits = [chosen(minutes, short).bits_per_byte for minutes in range(1, 60)]
    assert bits == sorted(bits, reverse=True)
