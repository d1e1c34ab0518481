"""Training in one process: what a run leaves behind, and how one resumes."""

import math

import pytest
from disks import names
from distgpt.core.config import RunConfig, parse_toml
from distgpt.core.saved.modelfile import read_description

from conftest import SMALL, distgpt, inside, losses, metrics


def weights(directory):
    return (directory / "weights.safetensors").read_bytes()


def test_a_run_directory_tells_everything_about_the_run(trained):
    files = {"config.toml", "tokenizer.json", "metrics.jsonl", "weights.safetensors", "summary.json"}
    assert names(trained) == sorted(files | {"checkpoints", "history.jsonl"})
    assert names(trained / "checkpoints") == ["step-00000010", "step-00000020", "step-00000030"]
    run = RunConfig().with_values(parse_toml((trained / "config.toml").read_text(), "config.toml"))
    assert (run.train.steps, run.train.lr, run.model.n_embd) == (30, 1e-2, 16)
    described = read_description(trained / "weights.safetensors")
    assert described.run == run and described.tokenizer.size == run.model.vocab_size


def test_what_a_run_saved_makes_it_again_and_another_can_use_its_tokenizer(trained, tmp_path):
    again = ["--config", trained / "config.toml", "--out", tmp_path / "again", "--threads", "1"]
    assert inside("train", *again).returncode == 0
    assert weights(tmp_path / "again") == weights(trained)
    assert losses(tmp_path / "again") == losses(trained)
    (text := tmp_path / "text.txt").write_text("the fox and the lamp by the sea. " * 9)
    saved = trained / "tokenizer.json"
    other = ["--data", text, "--tokenizer", saved, "--steps", "1", "--out", tmp_path / "other"]
    assert inside("train", *SMALL, *other).returncode == 0
    assert (tmp_path / "other" / "tokenizer.json").read_bytes() == saved.read_bytes()


def test_every_step_is_in_the_metrics(trained):
    steps = metrics(trained)
    assert list(steps) == list(range(1, 31))
    for step, line in steps.items():
        assert line["tokens"] == step * 8 * 16
        assert line["tokens_per_s"] * line["step_s"] == pytest.approx(8 * 16)
        assert all(math.isfinite(line[key]) for key in ("loss", "lr", "grad_norm"))
    assert steps[1]["lr"] == pytest.approx(5e-3) and steps[3]["lr"] == pytest.approx(1e-2)
    assert steps[30]["loss"] < steps[1]["loss"] - 0.5


def test_variants_and_samples_from_the_command_line(tmp_path):
    variant = "--norm rmsnorm --mlp swiglu --positions rope --no-bias --untied"
    args = [*variant.split(), "--steps", "5", "--sample-every", "2"]
    result = inside("train", *SMALL, *args, "--out", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("--- sample after step") == 2
    assert list(metrics(tmp_path / "run")) == [1, 2, 3, 4, 5]


@pytest.mark.ci
def test_a_live_display_survives_any_text(tmp_path):
    """Samples and paths are no markup, whatever they look like."""
    (tmp_path / "text").write_text("[/a][b]" * 200)
    where = tmp_path / "[red]" / "[" / "]"
    args = [*SMALL, "--steps", "2", "--sample-every", "1", "--progress", "live", "--out", where]
    args += ["--data", tmp_path / "text", "--tokenizer", "char", "--resume", "auto"]
    result = distgpt("train", *args)
    assert result.returncode == 0, result.stderr
    assert "[red]" in result.stdout.replace("\n", "")


def test_without_out_every_run_gets_a_directory_and_resume_finds_the_last(tmp_path):
    for steps, *resume in (("2",), ("3",), ("4", "--resume", "auto")):
        result = inside("train", *SMALL, "--steps", steps, *resume, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
    assert names(tmp_path / "runs") == ["tiny-adamw", "tiny-adamw-2"]
    assert list(metrics(tmp_path / "runs" / "tiny-adamw-2")) == [1, 2, 3, 4]


def test_a_run_that_diverges_stops_and_saves_nothing(tmp_path):
    for steps, lr, words in (("5", "1e30", "not finite at step 2"), ("1", "1e38", "weights")):
        args = ["--steps", steps, "--lr", lr, "--warmup", "0", "--clip", "0", "--out", tmp_path / steps]
        result = inside("train", *SMALL, *args)
        assert result.returncode == 76
        assert words in result.stderr and "Traceback" not in result.stderr
        assert not (tmp_path / steps / "weights.safetensors").exists(), words
        assert not (tmp_path / steps / "checkpoints").exists(), words
