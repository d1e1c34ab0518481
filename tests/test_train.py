"""Training in one process: what a run leaves behind, and going on from where one stopped."""

import math
import os
import shutil
import signal
import subprocess
import time

import pytest
from conftest import SMALL, distgpt, losses, metrics, popen, refused, train

from distgpt.config import RunConfig, parse_toml
from distgpt.data.tokenizers.naming import tokenizer_from_json
from distgpt.saved import tensors as weightsfile

CONSTANT = ["--schedule", "constant", "--save-every", "5"]


def weights(directory):
    return (directory / "weights.safetensors").read_bytes()


def test_a_run_directory_tells_everything_about_the_run(trained):
    inside = {path.name for path in trained.iterdir()}
    files = {"config.toml", "tokenizer.json", "metrics.jsonl", "weights.safetensors", "summary.json"}
    assert inside == files | {"checkpoints"}
    names = sorted(path.name for path in (trained / "checkpoints").iterdir())
    assert names == ["step-00000010", "step-00000020", "step-00000030"]

    run = RunConfig().with_values(parse_toml((trained / "config.toml").read_text(), "config.toml"))
    assert (run.train.steps, run.train.lr, run.model.n_embd) == (30, 1e-2, 16)
    path = trained / "weights.safetensors"
    config, tokenizer = weightsfile.describe(weightsfile.read_header(path), path)
    assert RunConfig().with_values(parse_toml(config, "weights")) == run
    assert tokenizer_from_json(tokenizer, "weights").size == run.model.vocab_size


def test_another_run_can_use_the_saved_tokenizer(trained, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the fox and the lamp by the sea. " * 9)
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


def test_the_saved_configuration_makes_the_same_run_again(trained, tmp_path):
    again = ["--config", trained / "config.toml", "--out", tmp_path / "again", "--threads", "1"]
    assert distgpt("train", *again).returncode == 0
    assert weights(tmp_path / "again") == weights(trained)
    assert losses(tmp_path / "again") == losses(trained)


@pytest.mark.slow
def test_the_run_that_compiles_and_those_after_it_agree_to_the_bit(tmp_path):
    env = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    runs = [train(tmp_path / name, "--steps", "5", env=env) for name in ("compiles", "loads")]
    assert (tmp_path / "cache").is_dir()
    assert weights(runs[0]) == weights(runs[1])


def test_the_first_loss_of_gpt_mini_on_the_story(tmp_path):
    args = ["--preset", "gpt-mini", "--steps", "1", "--threads", "1"]
    result = distgpt("train", *args, "--out", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    (loss,) = losses(tmp_path / "run")
    assert 5.1 < loss < 5.2


@pytest.mark.parametrize("variant", ["--norm rmsnorm --mlp swiglu --positions rope --no-bias --untied"])
def test_variants_and_samples_from_the_command_line(tmp_path, variant):
    args = [*variant.split(), "--steps", "4", "--sample-every", "2", "--log-every", "2"]
    result = distgpt("train", *SMALL, *args, "--out", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("--- sample after step") == 2
    assert list(metrics(tmp_path / "run")) == [2, 4]


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
    for steps in ("2", "3"):
        result = distgpt("train", *SMALL, "--steps", steps, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"tiny", "tiny-2"}
    result = distgpt("train", *SMALL, "--steps", "4", "--resume", "auto", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert list(metrics(tmp_path / "runs" / "tiny-2")) == [1, 2, 3, 4]
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"tiny", "tiny-2"}


# Going on


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


def test_a_longer_run_goes_on_bit_for_bit(whole, tmp_path):
    run = train(tmp_path / "run", "--steps", "7", *CONSTANT)
    train(run, "--steps", "12", "--resume", "auto", *CONSTANT)
    assert weights(run) == weights(whole)
    assert losses(run) == losses(whole)


def test_a_killed_run_goes_on_bit_for_bit(tmp_path):
    args = ["--steps", "400", "--save-every", "10", "--sample-every", "150"]
    uninterrupted = train(tmp_path / "whole", *args)
    run = tmp_path / "run"
    job = popen("train", *SMALL, "--out", run, *args, stdout=subprocess.DEVNULL)
    while not (run / "checkpoints" / "step-00000030").exists():
        time.sleep(0.001)
        assert job.poll() is None
    job.kill()
    assert job.wait() == -signal.SIGKILL
    assert not (run / "weights.safetensors").exists()
    train(run, *args, "--resume", "auto")
    assert weights(run) == weights(uninterrupted)
    assert losses(run) == losses(uninterrupted)


def test_ctrl_c_ends_a_run_with_one_line(tmp_path):
    run = tmp_path / "run"
    args = [*SMALL, "--out", run, "--steps", "100000", "--save-every", "10"]
    job = popen("train", *args, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not (run / "checkpoints" / "step-00000010").exists():
        time.sleep(0.001)
        assert job.poll() is None
    job.send_signal(signal.SIGINT)
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 130
    assert errors.startswith("distgpt: interrupted; a run with checkpoints") and errors.count("\n") == 1


def test_resume_starts_fresh_where_there_is_nothing(whole, tmp_path):
    run = train(tmp_path / "run", "--steps", "12", "--resume", "auto", *CONSTANT)
    assert weights(run) == weights(whole)


def test_a_damaged_checkpoint_is_named_and_the_one_before_used(whole, half):
    damaged = half / "checkpoints" / "step-00000010" / "optimizer.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-5] ^= 1
    damaged.write_bytes(content)
    result = distgpt("train", *SMALL, "--out", half, "--steps", "12", "--resume", "auto", *CONSTANT)
    assert result.returncode == 0, result.stderr
    assert str(damaged) in result.stdout and "resuming from" in result.stdout
    assert "step-00000005" in result.stdout
    assert weights(half) == weights(whole)


def test_a_chosen_checkpoint_in_a_new_directory(whole, tmp_path):
    chosen = whole / "checkpoints" / "step-00000005"
    run = train(tmp_path / "run", "--steps", "12", "--resume", chosen, *CONSTANT)
    assert list(metrics(run)) == list(range(6, 13))
    assert weights(run) == weights(whole)


def test_a_line_that_was_cut_off_does_not_spoil_the_metrics(half):
    with (half / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "lo')
    train(half, "--steps", "12", "--resume", "auto", *CONSTANT)
    assert (half / "metrics.jsonl").read_text().splitlines()[-1].startswith('{"step": 12,')


def test_a_finished_run_has_nothing_left_to_do(whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    train(run, "--steps", "12", "--resume", "auto", *CONSTANT)
    assert weights(run) == weights(whole) and losses(run) == losses(whole)


def tree(directory):
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*")}


@pytest.mark.parametrize(
    "change, code, words",
    [
        (["--lr", "0.5", "--resume", "auto"], 2, ["lr was 0.01 and is now 0.5"]),
        (["--n-embd", "32", "--resume", "auto"], 2, ["n_embd was 16 and is now 32"]),
        (["--lr", "0.5"], 2, ["another configuration", "choose another --out"]),
        ([], 2, ["--resume auto"]),
        (["--steps", "4", "--resume", "auto"], 2, ["is at step 10, past the 4 steps"]),
        (["--resume", "nowhere"], 65, ["nowhere", "no such checkpoint"]),
    ],
)
def test_runs_do_not_mix(half, change, code, words):
    before = tree(half)
    result = distgpt("train", *SMALL, "--out", half, "--steps", "12", *CONSTANT, *change)
    refused(result, code, *words)
    assert tree(half) == before


@pytest.mark.parametrize(
    "change, words",
    [
        (["--n-embd", "32"], ["n_embd was 16 and is now 32"]),
        (["--seed", "5"], ["seed was 1337 and is now 5"]),
        (["--tokenizer", "byte"], ["tokenizer was 'word' and is now 'byte'"]),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(whole, tmp_path, change, words):
    chosen = whole / "checkpoints" / "step-00000005"
    args = ["--out", tmp_path / "run", "--steps", "12", "--resume", chosen]
    refused(distgpt("train", *SMALL, *args, *CONSTANT, *change), 2, *words)
    assert not (tmp_path / "run").exists()


def test_a_text_that_changed_under_its_name_is_noticed(tmp_path):
    text = tmp_path / "text"
    text.write_text("abcdefg" * 50)
    args = ["--data", text, "--tokenizer", "char", "--steps", "4"]
    run = train(tmp_path / "run", *args)
    text.write_text("hijklmn" * 50)
    again = distgpt("train", *SMALL, "--out", run, *args, "--resume", "auto")
    refused(again, 65, "vocabulary")


def test_the_same_words_in_another_order_are_noticed_too(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("one two three four five\n" * 9)
    out = train(tmp_path / "run", "--data", text, "--steps", "4")
    text.write_text("five four three two one\n" * 9)
    result = distgpt("train", *SMALL, "--data", text, "--steps", "6", "--resume", "auto", "--out", out)
    refused(result, 65, "the text has changed")


def test_only_damaged_checkpoints_is_an_error(half):
    for state in half.glob("checkpoints/*/state.json"):
        os.truncate(state, 3)
    result = distgpt("train", *SMALL, "--out", half, "--steps", "12", "--resume", "auto", *CONSTANT)
    refused(result, 65, "no checkpoint in", "is intact")


# Diverging


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    args = ["--steps", "5", "--warmup", "0", "--clip", "0", "--lr", "1e30"]
    result = distgpt("train", *SMALL, *args, "--out", tmp_path / "run")
    assert result.returncode == 76
    assert "not finite at step 2" in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "run" / "weights.safetensors").exists()


def test_weights_that_became_useless_in_the_last_step_are_not_saved(tmp_path):
    args = ["--steps", "1", "--warmup", "0", "--clip", "0", "--lr", "1e38"]
    result = distgpt("train", *SMALL, *args, "--out", tmp_path / "run")
    assert result.returncode == 76
    assert "weights" in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "run" / "weights.safetensors").exists()
    assert not (tmp_path / "run" / "checkpoints").exists()
