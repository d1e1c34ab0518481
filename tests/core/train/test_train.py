"""Training in one process: what a run leaves behind, and how one resumes."""

import math
import os
import shutil
import signal
import subprocess

import pytest
from disks import names
from distgpt.core.config import RunConfig, parse_toml
from distgpt.core.saved.modelfile import read_description

from conftest import SMALL, distgpt, inside, losses, metrics, popen, refused, train, wait_for

CONSTANT = ["--schedule", "constant", "--save-every", "5"]


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


@pytest.mark.ci
def test_what_a_run_saved_makes_it_again_and_another_can_use_its_tokenizer(trained, tmp_path):
    again = ["--config", trained / "config.toml", "--out", tmp_path / "again", "--threads", "1"]
    assert inside("train", *again).returncode == 0
    assert weights(tmp_path / "again") == weights(trained)
    assert losses(tmp_path / "again") == losses(trained)
    (text := tmp_path / "text.txt").write_text("the fox and the lamp by the sea. " * 9)
    saved = trained / "tokenizer.json"
    other = train(tmp_path / "run", "--data", text, "--tokenizer", saved, "--steps", "1")
    assert (other / "tokenizer.json").read_bytes() == saved.read_bytes()


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


# Resuming


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What nothing interrupted."""
    return train(tmp_path_factory.mktemp("whole") / "run", "--steps", "12", *CONSTANT)


@pytest.fixture
def half(whole, tmp_path):
    """The same run as it was after the checkpoint of step 10."""
    shutil.copytree(whole, tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / "checkpoints" / "step-00000012")
    (tmp_path / "half" / "weights.safetensors").unlink()
    return tmp_path / "half"


def resumed(out, *args):
    """Up to step 12; the finished command."""
    return inside("train", *SMALL, "--out", out, "--steps", "12", *CONSTANT, "--resume", "auto", *args)


@pytest.mark.ci
def test_a_resumed_run_is_the_same_bit_for_bit(whole, tmp_path):
    train(tmp_path / "shorter", "--steps", "7", *CONSTANT)
    shutil.copytree(whole, tmp_path / "finished")
    for name in ("shorter", "finished", "not there"):
        assert resumed(tmp_path / name).returncode == 0
        assert weights(tmp_path / name) == weights(whole), name
        assert losses(tmp_path / name) == losses(whole), name
    chosen = whole / "checkpoints" / "step-00000005"
    assert resumed(tmp_path / "chosen", "--resume", chosen).returncode == 0
    assert list(metrics(tmp_path / "chosen")) == list(range(6, 13))
    assert weights(tmp_path / "chosen") == weights(whole)


@pytest.mark.ci
def test_a_killed_run_resumes_bit_for_bit(tmp_path):
    args = ["--steps", "400", "--save-every", "10", "--sample-every", "150"]
    uninterrupted, run = train(tmp_path / "whole", *args), tmp_path / "run"
    job = popen("train", *SMALL, "--out", run, *args, stdout=subprocess.DEVNULL)
    wait_for((run / "checkpoints" / "step-00000030").exists)
    job.kill()
    assert job.wait() == -signal.SIGKILL
    assert not (run / "weights.safetensors").exists()
    train(run, *args, "--resume", "auto")
    assert weights(run) == weights(uninterrupted)
    assert losses(run) == losses(uninterrupted)


@pytest.mark.ci
def test_damaged_checkpoints_are_named_and_the_newest_intact_one_is_used(whole, half):
    damaged = half / "checkpoints" / "step-00000010" / "optimizer.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-5] ^= 1
    damaged.write_bytes(content)
    with (half / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "lo')  # as a killed run leaves it
    result = resumed(half)
    assert result.returncode == 0, result.stderr
    assert str(damaged) in result.stdout and "resuming from" in result.stdout
    assert "step-00000005" in result.stdout
    assert weights(half) == weights(whole)
    assert (half / "metrics.jsonl").read_text().splitlines()[-1].startswith('{"step": 12,')
    for state in half.glob("checkpoints/*/state.json"):
        os.truncate(state, 3)
    refused(resumed(half), 65, "no checkpoint in", "is intact")


def tree(directory):
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*")}


@pytest.mark.ci
def test_runs_do_not_mix(whole, half, tmp_path):
    same, auto, before = ["train", *SMALL, "--steps", "12", *CONSTANT], ["--resume", "auto"], tree(half)
    for change, code, words in (
        (["--seed", "5", *auto], 2, ["seed was 1337 and is now 5", "leave out the flag"]),
        (["--n-embd", "32", *auto], 2, ["n_embd was 16 and is now 32", "another --out and no --resume"]),
        (["--lr", "0.5"], 2, ["another configuration", "add --resume auto", "choose another --out"]),
        (["--n-layer", "1"], 2, ["another configuration", "add --resume auto", "another --out"]),
        ([], 2, ["--resume auto"]),
        (["--steps", "4", *auto], 2, ["is at step 10, past the 4 steps"]),
        (["--resume", "nowhere"], 65, ["nowhere", "no such checkpoint"]),
    ):
        refused(inside(*same, "--out", half, *change), code, *words)
        assert tree(half) == before, change
    chosen = ["--out", tmp_path / "run", "--resume", whole / "checkpoints" / "step-00000005"]
    refused(inside(*same, *chosen, "--tokenizer", "byte"), 2, "tokenizer was 'word' and is now 'byte'")
    assert not (tmp_path / "run").exists()


@pytest.mark.ci
def test_a_text_that_changed_under_its_name_is_noticed(tmp_path):
    """Other characters; the same words in another order."""
    for tokenizer, before, after, words in (
        ("char", "abcdefg" * 50, "hijklmn" * 50, "vocabulary"),
        (
            "word",
            "one two three four five\n" * 9,
            "five four three two one\n" * 9,
            "the text or its tokenizer has changed",
        ),
    ):
        text = tmp_path / f"{tokenizer}.txt"
        text.write_text(before)
        args = ["--data", text, "--tokenizer", tokenizer, "--steps", "6"]
        run = train(tmp_path / tokenizer, *args, "--steps", "4")
        text.write_text(after)
        refused(inside("train", *SMALL, "--out", run, *args, "--resume", "auto"), 65, words)


def test_a_run_that_diverges_stops_and_saves_nothing(tmp_path):
    for steps, lr, words in (("5", "1e30", "not finite at step 2"), ("1", "1e38", "weights")):
        args = ["--steps", steps, "--lr", lr, "--warmup", "0", "--clip", "0", "--out", tmp_path / steps]
        result = inside("train", *SMALL, *args)
        assert result.returncode == 76
        assert words in result.stderr and "Traceback" not in result.stderr
        assert not (tmp_path / steps / "weights.safetensors").exists(), words
        assert not (tmp_path / steps / "checkpoints").exists(), words
