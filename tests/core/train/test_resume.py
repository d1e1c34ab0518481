"""Resuming: changed settings, branches, and saving by the clock."""

import json
import os
import shlex
import shutil
import sys
from functools import partial

import distgpt
import numpy as np
import pytest
from disks import names
from distgpt.core.comm.api import SerialComm
from distgpt.core.saved.rundir import RunDirectory
from distgpt.core.train import progress
from distgpt.core.train.progress import SaveTimer

from conftest import SMALL, inside, logged, losses, metrics, refused, succeeded, summary
from conftest import distgpt as started

UNUSUAL = ("qk_norm=true", "qk_norm_gain=true", "head_dim=6", "qkv_bias=true", "rope_scaling=llama3")
MODEL = [word for setting in UNUSUAL for word in ("--set", setting)]
HELD_OUT = ["--val-fraction", "0.1", "--eval-every", "2"]
LONG = [*SMALL, *MODEL, *HELD_OUT, "--schedule", "constant", "--steps", "8", "--save-every", "4"]


train = partial(succeeded, "train")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "run"
    train(*LONG, "--out", out)
    return out


@pytest.fixture
def half(finished, tmp_path):
    shutil.copytree(finished, half := tmp_path / "my run")
    shutil.rmtree(half / "checkpoints" / "step-00000008")
    for name in ("weights", "best"):
        (half / f"{name}.safetensors").unlink()
    return half


def history(run):
    return [event for event in logged(run, "history") if "bits" not in event]


def weights(run, name="weights"):
    return (run / f"{name}.safetensors").read_bytes()


def untimed(run):
    lines = logged(run)
    return [{key: value for key, value in line.items() if key[-2:] != "_s" and key != "time"} for line in lines]


def contents(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


NEWEST = "checkpoints/step-00000004"
KILLED = """
import os, signal
from distgpt.commands.cli import main
from distgpt.core.train.step import Step
launch = Step.launch
def killed(self, step, *rest):
    step == 6 and os.kill(os.getpid(), signal.SIGKILL)
    return launch(self, step, *rest)
Step.launch = killed
main()
"""


AGAIN = shlex.join(LONG)  # the same command
WAYS = {
    "auto": "--out HALF --resume auto",
    "run": "--resume HALF",
    "checkpoint": f"--resume HALF/{NEWEST}",
    "branch": f"--resume HALF/{NEWEST} --out branch",
    **dict.fromkeys(("command", "not there", "shorter", "damaged", "killed"), f"{AGAIN} --out HALF --resume auto"),
}


def words_of(command, **places):
    words = command.split()
    for name, place in places.items():
        words = [word.replace(name, str(place)) for word in words]
    return words


@pytest.mark.parametrize("how", [*list(WAYS)[:-1], pytest.param("killed", marks=pytest.mark.ci)])
def test_run_resumes_bitwise_identical(how, half, finished, tmp_path):
    out, newest = tmp_path / "branch" if how == "branch" else half, half / NEWEST
    if how in ("not there", "shorter", "killed"):
        shutil.rmtree(half)
    if how == "shorter":
        train(*LONG, "--steps", "6", "--out", half)
    if how == "killed":
        result = started("train", *LONG, "--out", half, program=[sys.executable, "-c", KILLED], cold=False)
        assert result.returncode == -9 and not (half / "weights.safetensors").exists()
    if how == "damaged":
        shutil.copytree(finished / "checkpoints" / "step-00000008", half / "checkpoints" / "step-00000008")
        damaged = half / "checkpoints" / "step-00000008" / "optimizer.safetensors"
        damaged.write_bytes(damaged.read_bytes()[:-5] + b"12345")
        with (half / "metrics.jsonl").open("a") as file:
            file.write('{"step": 9, "lo')  # left by a killed run
    before = contents(half) if how == "branch" else None
    result = train(*words_of(WAYS[how], HALF=half), "--threads", "1", cwd=tmp_path)
    assert ("changed from" in result.stdout) == (how == "shorter")
    assert f"writing to {'branch' if how == 'branch' else out}" in result.stdout
    whole = untimed(finished)
    assert untimed(out) == ([line for line in whole if line["step"] > 4] if how == "branch" else whole)
    assert weights(out) == weights(finished) and weights(out, "best") == weights(finished, "best")
    event = history(out)[-1]
    if how not in ("not there", "shorter", "killed"):
        assert (event["step"], event["changes"], event["from"]) == (4, {}, str(newest))
        assert event["branch"] == (how == "branch")
    assert how != "damaged" or str(damaged) in result.stdout
    assert how != "branch" or contents(half) == before


@pytest.mark.parametrize("how", ["of a later step", "damaged", "of fewer tokens"])
def test_mismatched_best_weights_are_rewritten(how, half, finished):
    best, whole = half / "best.safetensors", weights(finished, "best")
    best.write_bytes(whole[:-5] + b"12345" if how == "damaged" else whole)
    fewer = ["--val-tokens", "16"] if how == "of fewer tokens" else []
    result = train("--resume", half, "--threads", "1", *fewer)
    assert bool(fewer) != ("the next evaluation rewrites it" in " ".join(result.stdout.split()))
    assert not fewer or "over 16 of 127 held-out tokens" in result.stdout
    state = json.loads((half / "checkpoints" / "step-00000008" / "state.json").read_text())
    assert (state["best"]["tokens"] == 16) == bool(fewer) and (best.read_bytes() == whole) != bool(fewer)
    assert f"after step {state['best']['step']}, with validation loss" in inside("weights", "info", best).stdout


def test_run_without_valid_checkpoint_is_rejected(half):
    for state in half.glob("checkpoints/*/state.json"):
        os.truncate(state, 3)
    refused(inside("train", *LONG, "--out", half, "--resume", "auto"), 65, "no checkpoint in", "is valid")


def test_run_without_checkpoints_restarts(half, tmp_path):
    """It keeps its settings, also without a history or configuration."""
    shutil.rmtree(half / "checkpoints")
    for name, kept, written in (
        ("resumed", ["config.toml", "tokenizer.json", "metrics.jsonl"], '{"from": "/gone", "branch": false}\n'),
        ("full", ["config.toml", "tokenizer.json"], ""),
        ("killed", [], (half / "history.jsonl").read_text().partition("\n")[0] + "\n"),
    ):
        (out := tmp_path / name).mkdir()
        for file in kept:
            shutil.copy(half / file, out)
        (out / "history.jsonl").write_text(written)
        result = train(*([] if kept else LONG), "--out", out, "--resume", "auto", "--steps", "3", "--threads", "1")
        assert list(metrics(out)) == [1, 2, 3] and bool(kept) == ("steps 8 → 3" in result.stdout)
        assert len(history(out)) == (2 if name == "resumed" else 1)


@pytest.fixture(scope="module")
def falling(tmp_path_factory):
    out = tmp_path_factory.mktemp("falling") / "run"
    words = "--steps 6 --save-every 3 --schedule wsd --set decay_fraction=0.5 --warmup 4"
    train(*SMALL, *words.split(), "--out", out)
    return out


DECAY = "--steps 3 --decay-from"
REFUSED = [
    (f"{AGAIN} --out HALF", 2, "--resume auto"),
    (f"{AGAIN} --out HALF --lr 0.5", 2, "other settings|--resume auto|another --out"),
    (f"{AGAIN} --out HALF --n-layer 1", 2, "other settings|--resume auto|another --out"),
    (f"{AGAIN} --out HALF --resume auto --seed 5", 2, "seed was 1337 and is now 5"),
    (f"{AGAIN} --out HALF --resume auto --n-embd 32", 2, "n_embd was 16 and is now 32|another --out"),
    (f"{AGAIN} --out HALF --resume auto --steps 3", 2, "at step 4"),
    (f"{AGAIN} --out HALF --resume nowhere", 65, "nowhere|no such checkpoint"),
    ("--resume HALF --data gone.txt", 65, "gone.txt|--data"),
    ("--resume HALF --init FINISHED/weights.safetensors", 2, "init|cannot change"),
    ("--resume HALF --preset gpt-mini", 2, "n_layer|--preset"),  # also fewer steps
    (f"--resume HALF/{NEWEST} --out caf\udce9", 2, "UTF-8"),
    (f"--resume HALF/{NEWEST} --out new --tokenizer byte", 2, "tokenizer was 'word' and is now 'byte'"),
    (f"--resume HALF/{NEWEST} --out FINISHED --lr 0.02", 2, "contains a run|another --out"),
    ("--resume alone", 2, "--out"),
    (f"{AGAIN} --out mine", 2, "is not empty and not a run directory"),
    ("--out list --resume auto", 65, "history.jsonl"),
    ("--out gone --resume auto", 65, "/gone"),
    # A new run with a falling learning rate, from where it is constant.
    (f"{DECAY} empty", 65, "empty is neither a checkpoint nor a run directory"),
    (f"{DECAY} unsaved", 65, "unsaved has no checkpoint"),
    (f"{DECAY} nothing", 65, "no such checkpoint"),
    (f"{DECAY} FALLING", 2, "the learning rate is not constant there"),
    (f"{DECAY} FALLING/checkpoints/step-00000003", 2, "the learning rate is not constant there"),
    (f"{DECAY} HALF --out HALF", 2, "another --out"),
    (f"{DECAY} HALF --resume auto", 2, "--resume cannot be combined"),
    (f"{DECAY} HALF --set train_minutes=1", 2, "train_minutes"),
    ("--decay-from HALF", 2, "--steps"),
]


@pytest.mark.parametrize(("command", "code", "named"), REFUSED)
def test_impossible_resume_changes_nothing(command, code, named, half, finished, falling, tmp_path):
    for name in ("empty", "mine", "list", "gone"):
        (tmp_path / name).mkdir()
    shutil.copytree(half / NEWEST, tmp_path / "alone")
    shutil.copytree(half, tmp_path / "unsaved", ignore=shutil.ignore_patterns("step-*"))
    (tmp_path / "mine" / "history.jsonl").write_text('{"of": "another program"}\n')
    for name, damaged in (("list", "[1]"), ("gone", '{"branch": true, "from": "/gone"}')):
        shutil.copytree(half, tmp_path / name, ignore=shutil.ignore_patterns("step-*"), dirs_exist_ok=True)
        (tmp_path / name / "history.jsonl").write_text(damaged)
    words, before = words_of(command, HALF=half, FINISHED=finished, FALLING=falling), contents(tmp_path)
    refused(inside("train", *words, cwd=tmp_path), code, *named.split("|"))
    assert contents(tmp_path) == before


def test_renamed_value_is_noted_once(half):
    config = half / "config.toml"
    config.write_text(config.read_text().replace('"allreduce"', '"hierarchical"'))
    found = [train("--resume", half, "--steps", steps, "--threads", "1").stdout for steps in ("10", "11")]
    assert ["grad_sync = 'hierarchical' is 'allreduce' now" in each for each in found] == [True, False]


def test_changed_settings_are_shown_and_saved(half, tmp_path):
    (tmp_path / "more.toml").write_text("clip = 0.5\nkeep = 9\n")
    changes = ["--lr", "0.005", "--steps", "10", "--schedule", "wsd", "--set", "decay_fraction=0", "--dtype", "float64"]
    result = train("--resume", half, *changes, "--warmup", "0", "--config", tmp_path / "more.toml")
    for words in ("changed from step 4 on: steps 8 → 10, lr 0.01 → 0.005", "schedule constant → wsd"):
        assert words in result.stdout
    assert {line["lr"] for step, line in metrics(half).items() if step > 4} == {0.005}
    saved = RunDirectory(half).saved().train
    assert (saved.steps, saved.clip, saved.keep, saved.batch_size) == (10, 0.5, 9, 8)
    _, event = history(half)  # after its start
    assert event["changes"]["lr"] == [0.01, 0.005] and event["stage"] == "serial" and "time" in event
    changed = {"lr", "steps", "schedule", "decay_fraction", "dtype", "warmup", "clip", "keep"}
    assert set(event["changes"]) == changed
    train("--resume", half, "--steps", "11")  # changes persist
    assert metrics(half)[11]["lr"] == 0.005 and len(history(half)) == 3
    assert "all 11 steps are done" in train("--resume", half).stdout


TEXTS = [
    ("char", "abcdefg" * 50, "hijklmn" * 50, "vocabulary"),
    ("word", "one two three four five\n" * 9, "five four three two one\n" * 9, "--data"),
]


@pytest.mark.parametrize(("tokenizer", "before", "after", "named"), TEXTS)
def test_changed_data_is_rejected_and_new_data_noted(tokenizer, before, after, named, tmp_path):
    run, text, other = tmp_path / "run", tmp_path / "text.txt", tmp_path / "other.txt"
    text.write_text(before)
    args = [*SMALL, "--tokenizer", tokenizer, "--out", run, "--steps"]
    train(*args, "2", "--data", text)
    other.write_text(before[::-1] if tokenizer == "char" else after)
    assert "other.txt" in train(*args, "3", "--data", other, "--resume", "auto").stdout
    assert history(run)[1]["changes"]["data"][1] == str(other)
    other.write_text(after if tokenizer == "char" else before)
    refused(inside("train", *args, "4", "--data", other, "--resume", "auto"), 65, named)


def test_branch_without_checkpoints_restarts(finished, tmp_path):
    start, branch = shutil.copytree(finished / NEWEST, tmp_path / "alone"), tmp_path / "branch"
    train("--resume", start, "--out", branch, "--lr", "0.02")
    assert history(branch)[0]["changes"] == {"lr": [0.01, 0.02]}
    whole = weights(branch)
    shutil.rmtree(branch / "checkpoints")
    train("--out", branch, "--resume", "auto")
    assert list(metrics(branch)) == [5, 6, 7, 8] and weights(branch) == whole
    assert [(event["branch"], event["from"]) for event in history(branch)] == [(True, str(start))] * 2


def test_decay_from_matches_falling_schedule(finished, tmp_path):
    train("--decay-from", finished / NEWEST, "--steps", "4", "--threads", "1")
    decayed = finished.with_name("run-decayed")
    rates = {step: line["lr"] for step, line in metrics(decayed).items()}
    assert rates == pytest.approx({5: 0.01, 6: 0.0075, 7: 0.005, 8: 0.0025})
    train(*LONG, "--schedule", "wsd", "--set", "decay_fraction=0.5", "--out", tmp_path / "whole")
    assert weights(decayed)[-2048:] == weights(tmp_path / "whole")[-2048:]  # without the header
    by_python = distgpt.train(decay_from=str(finished), steps=1, out=tmp_path / "python", threads=1)
    steps = [line["step"] for line in by_python.metrics if "loss" in line]
    assert steps == [9]  # the newest checkpoint was 8


TINY_BATCHES = ["--data", "story", "--tokenizer", "auto", "--steps", "2", "--batch-size", "2"]
TINY_BATCHES += ["--threads", "1", "--eval-every", "0", "--sample-every", "0"]


def test_pretrained_weights_ignore_preset_learning_rate(finished, tmp_path):
    words = [*TINY_BATCHES, "--preset", "gpt2", "--init", finished, "--out", tmp_path / "further"]
    assert "is trained further, with a peak learning rate of 5e-05 (--lr)" in train(*words).stdout
    t = RunDirectory(tmp_path / "further").saved().train
    assert (t.lr, t.min_lr) == (5e-5, 0.0) and "all 2 steps are done" in train(*words, "--resume", "auto").stdout
    assert RunDirectory(tmp_path / "further").saved().train == t
    train(*words[:-1], tmp_path / "other", "--lr", "1e-3", "--set", "min_lr=1e-4")
    assert RunDirectory(tmp_path / "other").saved().train.lr == 1e-3


def test_learned_positions_allow_shorter_context(finished, tmp_path):
    words = ["--init", finished, *TINY_BATCHES, "--lr", "1e-9", "--out"]
    train(*words, tmp_path / "short", "--seq-len", "5")
    long, short = (distgpt.load(run / "weights.safetensors") for run in (finished, tmp_path / "short"))
    assert (long.config.seq_len, short.config.seq_len) == (16, 5)
    ids = np.arange(5)
    assert np.abs(long.logits(ids) - short.logits(ids)).max() < 1e-5
    refused(inside("train", *words, tmp_path / "long", "--seq-len", "17"), 2, "seq_len 16", "17")


def asked_for_more(run, *flags):
    before = contents(run)
    result = train("--out", run, "--resume", "auto", *flags)
    assert contents(run) == before
    said, more = result.stdout.splitlines()
    assert said.startswith(f"{run} is finished; nothing was changed: ")
    return shlex.split(more.partition(": ")[2])


def test_finished_run_suggests_more_steps(finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "my run")
    more = asked_for_more(run, "--lr", "0.1")
    assert more == ["--out", str(run), "--resume", "auto", "--steps", "16"]
    branch = train("--resume", run, "--out", tmp_path / "branch")
    assert "nothing is left to train; increase --steps" in branch.stdout
    train(*more)
    assert list(metrics(run))[-1] == 16
    (run / "weights.safetensors").unlink()  # simulates a kill before they were written
    whole = (run / "summary.json").read_bytes()
    train("--out", run, "--resume", "auto")
    assert weights(run) and (run / "summary.json").read_bytes() == whole
    (run / "summary.json").write_text('{"stop": "finished", "step": 8}')  # an older summary
    train("--out", run, "--resume", "auto")
    assert summary(run)["step"] == 16


@pytest.mark.ci
def test_finished_timed_run_suggests_more_time(tmp_path):
    run, by = tmp_path / "run", ["--schedule", "constant"]
    train(*SMALL, *by, "--within", "1s", "--preset", "tiny", "--out", run)
    steps = summary(run)["step"]
    more = asked_for_more(run, "--within", "1s")
    assert more[-2:] == ["--within", "2s"] and asked_for_more(run, "--steps", "9999999") == more
    train(*more)
    assert summary(run)["step"] > steps and asked_for_more(run)[-2:] == ["--within", "4s"]


@pytest.mark.parametrize(
    "seconds", [(0.001, 30.0), (0.001, 0.0), (1.0, 1.0), (70.0, 70.0), (1000.0, 1000.0), (1.0, 0.01)]
)
def test_save_timer_checks_the_clock_rarely(seconds, monkeypatch):
    """Vary the seconds of steps and of the first step; in the last case, steps get slower after 30 s."""
    usual, first = seconds
    gets_slower = first == 0.01
    now, checks, due = 0.0, [], []
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    monkeypatch.setattr(progress, "on_root", lambda comm, judge: checks.append(1) or judge())
    timer, step, slack = SaveTimer(SerialComm(), 5.0, step=100), 100, 1.1 * usual + 2
    while (not due or now < 1500) and step < 1_500_100:
        step += 1
        now += first if step == 101 or (gets_slower and now < 30) else usual
        if timer.is_due(step):
            due.append(now)
            timer.saved()
    between = [b - a for a, b in zip([0.0, *due], due, strict=False)]
    if gets_slower:
        assert 300 <= between.pop(0) < 3600
    assert all(300 <= pause <= 300 + slack for pause in between), between
    assert len(checks) < 160 or gets_slower


def test_saving_by_the_clock_keeps_results(finished, tmp_path):
    words = [*LONG, "--save-every", "0.0000001s", "--out"]
    train(*words, tmp_path / "all")
    assert names(tmp_path / "all" / "checkpoints") == [f"step-{step:08}" for step in (6, 7, 8)]
    train(*words, tmp_path / "own", "--save-every", "5")  # overrides the earlier option
    assert names(tmp_path / "own" / "checkpoints") == ["step-00000005", "step-00000008"]
    assert losses(tmp_path / "all") == losses(tmp_path / "own") == losses(finished)


def test_interruption_names_the_saved_step(tmp_path, monkeypatch):
    out, record = tmp_path / "my run", RunDirectory.record

    def interrupted(at, *words):
        def stop(self, line):
            record(self, line)
            if line["step"] == at:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(RunDirectory, "record", stop)
            result = inside("train", *SMALL, "--steps", "8", "--save", "sync", "--out", out, *words)
        found = summary(out)
        assert (result.returncode, found["stop"], found["step"]) == (130, "interrupted", at)
        assert found["loss"] == losses(out)[-1]
        return result.stderr

    assert "--save-every" in interrupted(3)
    saved = interrupted(5, "--save-every", "2", "--resume", "auto")
    assert "step 4 " in saved and f"--out '{out}' --resume auto\n" in saved
    assert interrupted(5, "--resume", "auto") == saved
    train("--out", out, "--resume", "auto")
    assert summary(out)["stop"] == "finished"
