"""Resuming reads the run: its settings, what may change, branches; and what is saved by the clock."""

import json
import shlex
import shutil
from types import SimpleNamespace

import distgpt
import numpy as np
import pytest
from disks import names
from distgpt.core.comm.api import SerialComm
from distgpt.core.saved.rundir import RunDirectory
from distgpt.core.train import progress
from distgpt.core.train.progress import SaveTimer

from conftest import SMALL, inside, losses, metrics, refused

UNUSUAL = ("qk_norm=true", "qk_norm_gain=true", "head_dim=6", "qkv_bias=true", "rope_scaling=llama3")
MODEL = [word for setting in UNUSUAL for word in ("--set", setting)]
LONG = [*SMALL, *MODEL, "--steps", "8", "--save-every", "4"]


def train(*args, **how):
    result = inside("train", *args, **how)
    assert result.returncode == 0, result.stderr
    return result


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Eight steps, with checkpoints at 4 and 8."""
    out = tmp_path_factory.mktemp("finished") / "run"
    train(*LONG, "--out", out)
    return out


@pytest.fixture
def half(finished, tmp_path):
    """The same after the checkpoint of step 4."""
    shutil.copytree(finished, tmp_path / "my run")
    shutil.rmtree(tmp_path / "my run" / "checkpoints" / "step-00000008")
    return tmp_path / "my run"


def history(run):
    """Return what happened, but for what each start has kept for a replay."""
    events = map(json.loads, (run / "history.jsonl").read_text().splitlines())
    return [event for event in events if "bits" not in event]


def weights(run):
    return (run / "weights.safetensors").read_bytes()


def test_a_run_whose_start_came_only_as_far_as_its_history_begins_again(tmp_path):
    """A full disk took nothing of the first line, or a kill came before the configuration."""
    for out, kept in ((tmp_path / "full", ["config.toml", "tokenizer.json"]), (tmp_path / "killed", [])):
        train(*LONG, "--out", out)
        for path in out.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in (*kept, "history.jsonl"):
                path.unlink()
        if kept:
            (out / "history.jsonl").write_bytes(b"")
        train(*LONG, "--out", out, "--resume", "auto")
        assert len(history(out)) == 1 and len(metrics(out)) == 8
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "history.jsonl").write_text('{"of": "another program"}\n')
    refused(inside("train", *LONG, "--out", tmp_path / "mine"), 2, "is not empty and holds no run")


@pytest.mark.parametrize("how", ["auto", "run", "checkpoint", "the same command"])
def test_a_run_resumes_with_its_own_settings(how, half, finished):
    newest = half / "checkpoints" / "step-00000004"
    words = {
        "auto": ["--out", half, "--resume", "auto"],
        "run": ["--resume", half],
        "checkpoint": ["--resume", newest],
        "the same command": [*LONG, "--out", half, "--resume", "auto"],
    }
    result = train(*words[how], "--threads", "1")
    assert "changed from" not in result.stdout and f"writing to {half}" in result.stdout
    assert weights(half) == weights(finished) and losses(half) == losses(finished)
    _, event = history(half)  # after its start
    assert (event["step"], event["changes"], event["from"]) == (4, {}, str(newest))


def test_a_value_that_has_another_name_now_is_named_once(half):
    config = half / "config.toml"
    config.write_text(config.read_text().replace('"allreduce"', '"hierarchical"'))
    found = [train("--resume", half, "--steps", steps, "--threads", "1").stdout for steps in ("10", "11")]
    assert ["grad_sync = 'hierarchical' is 'allreduce' now" in each for each in found] == [True, False]


def test_what_cannot_resume_says_why_and_names_the_way(half, finished, tmp_path):
    gone = inside("train", "--resume", half, "--data", tmp_path / "gone.txt")
    refused(gone, 65, "gone.txt", "--data says where the text of this run is now")
    other = inside("train", "--resume", half, "--init", finished / "weights.safetensors")
    refused(other, 2, "init", "cannot change")
    preset = inside("train", "--resume", half, "--preset", "gpt-mini")  # of fewer steps, too
    refused(preset, 2, "n_layer", "--preset")
    nameless = tmp_path / "caf\udce9"
    refused(inside("train", "--resume", half / "checkpoints" / "step-00000004", "--out", nameless), 2, "UTF-8")
    assert not nameless.exists()


TINY_BATCHES = ["--data", "story", "--tokenizer", "auto", "--steps", "2", "--batch-size", "2"]
TINY_BATCHES += ["--threads", "1", "--eval-every", "0", "--sample-every", "0"]


def test_a_run_that_began_with_weights_resumes_by_the_same_command(finished, tmp_path):
    words = [*SMALL, "--steps", "4", "--init", finished, "--out", tmp_path / "further"]
    train(*words)
    assert "all 4 steps are done" in train(*words, "--resume", "auto").stdout


def test_pretrained_weights_are_trained_gently_unless_asked_otherwise(finished, tmp_path):
    """A preset's learning rate is for random weights."""
    words = [*TINY_BATCHES, "--preset", "gpt2", "--init", finished, "--out", tmp_path / "further"]
    shown = train(*words).stdout
    assert "is trained further, with a peak learning rate of 5e-05 (--lr)" in shown
    t = RunDirectory(tmp_path / "further").saved().train
    assert (t.lr, t.min_lr) == (5e-5, 0.0)
    train(*words, "--resume", "auto")
    assert RunDirectory(tmp_path / "further").saved().train == t
    train(*words[:-1], tmp_path / "other", "--lr", "1e-3", "--set", "min_lr=1e-4")
    assert RunDirectory(tmp_path / "other").saved().train.lr == 1e-3


def test_learned_positions_are_trained_further_on_a_shorter_context(finished, tmp_path):
    words = ["--init", finished, *TINY_BATCHES, "--lr", "1e-9", "--out"]
    train(*words, tmp_path / "short", "--seq-len", "5")
    long, short = (distgpt.load(run / "weights.safetensors") for run in (finished, tmp_path / "short"))
    assert (long.config.seq_len, short.config.seq_len) == (16, 5)
    ids = np.arange(5)
    assert np.abs(long.logits(ids) - short.logits(ids)).max() < 1e-5
    refused(inside("train", *words, tmp_path / "long", "--seq-len", "17"), 2, "seq_len is 16", "17")


def test_what_may_change_is_changed_shown_and_remembered(half, tmp_path):
    (tmp_path / "more.toml").write_text("clip = 0.5\nkeep = 9\n")
    changes = ["--lr", "0.005", "--steps", "10", "--schedule", "constant", "--dtype", "float64"]
    result = train("--resume", half, *changes, "--warmup", "0", "--config", tmp_path / "more.toml")
    for words in ("changed from step 4 on: steps 8 → 10, lr 0.01 → 0.005", "schedule cosine → constant"):
        assert words in result.stdout
    assert {line["lr"] for step, line in metrics(half).items() if step > 4} == {0.005}
    saved = RunDirectory(half).saved().train
    assert (saved.steps, saved.clip, saved.keep, saved.batch_size) == (10, 0.5, 9, 8)
    _, event = history(half)  # after its start
    assert event["changes"]["lr"] == [0.01, 0.005] and event["stage"] == "serial" and "time" in event
    assert set(event["changes"]) == {"lr", "steps", "schedule", "dtype", "warmup", "clip", "keep"}
    train("--resume", half, "--steps", "11")  # what was changed stays so
    assert metrics(half)[11]["lr"] == 0.005 and len(history(half)) == 3
    done = train("--resume", half)
    assert "all 11 steps are done" in done.stdout


@pytest.mark.ci
def test_a_branch_leaves_the_run_as_it_is(finished, tmp_path):
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    start, branch = finished / "checkpoints" / "step-00000004", tmp_path / "branch"
    train("--resume", start, "--out", branch, "--lr", "0.02")
    assert list(metrics(branch)) == [5, 6, 7, 8]
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before
    assert history(branch)[0]["from"] == str(start) and history(branch)[0]["changes"] == {"lr": [0.01, 0.02]}
    refused(inside("train", "--resume", start, "--out", branch), 2, "branch holds a run", "another --out")
    whole = weights(branch)
    shutil.rmtree(branch / "checkpoints")  # as if it had ended before it saved anything
    train("--out", branch, "--resume", "auto")
    assert list(metrics(branch)) == [5, 6, 7, 8] and weights(branch) == whole
    assert [event["branch"] for event in history(branch)] == [True, True]
    for damaged, code in (("[1]", 65), ('{"branch": true, "from": "/gone"}', 65)):
        shutil.rmtree(branch / "checkpoints", ignore_errors=True)
        (branch / "history.jsonl").write_text(damaged)
        refused(inside("train", "--out", branch, "--resume", "auto"), code)
    shutil.copytree(start, tmp_path / "alone")
    refused(inside("train", "--resume", tmp_path / "alone"), 2, "--out")
    train("--resume", tmp_path / "alone", "--out", tmp_path / "another", "--steps", "5")


def test_another_text_is_read_from_here_on_with_a_note(tmp_path):
    for name, text in (("one", "the lamp was lit. " * 40), ("two", "was the lamp lit? " * 40)):
        (tmp_path / name).write_text(text.replace("?", "."))
    line = [*SMALL, "--tokenizer", "char", "--val-fraction", "0.2", "--steps", "3", "--out", tmp_path / "run"]
    train(*line, "--data", tmp_path / "one")
    result = train("--data", tmp_path / "two", "--steps", "5", "--out", tmp_path / "run", "--resume", "auto")
    assert "two is another text than so far" in result.stdout
    assert history(tmp_path / "run")[1]["changes"]["data"][1] == str(tmp_path / "two")


def test_a_run_that_saved_nothing_begins_again_with_its_settings(half):
    shutil.rmtree(half / "checkpoints")
    (half / "history.jsonl").write_text('{"from": "/gone", "branch": false}\n')  # it had resumed before
    result = train("--out", half, "--resume", "auto", "--steps", "3")
    assert "no checkpoint in" in result.stdout and "steps 8 → 3" in result.stdout
    assert list(metrics(half)) == [1, 2, 3]


# A run that is finished


def contents(run):
    return {
        path.relative_to(run): (path.read_bytes(), path.stat().st_mtime_ns) for path in run.rglob("*") if path.is_file()
    }


def asked_for_more(run, *flags):
    """Resume a finished run, which must stay as it is; return the options that ask for more, as printed."""
    before = contents(run)
    result = train("--out", run, "--resume", "auto", *flags)
    assert contents(run) == before
    said, more = result.stdout.splitlines()
    assert said.startswith(f"{run} is finished, and nothing was changed: ")
    return shlex.split(more.partition(": ")[2])


@pytest.mark.ci
def test_a_run_that_is_finished_stays_as_it_is_and_says_what_asks_for_more(half, tmp_path):
    run = half
    train("--resume", run)
    more = asked_for_more(run, "--lr", "0.1")
    assert more == ["--out", str(run), "--resume", "auto", "--steps", "16"]
    branch = train("--resume", run, "--out", tmp_path / "branch")
    assert "nothing is left to train: --steps asks for more" in branch.stdout
    train(*more)
    assert list(metrics(run))[-1] == 16
    (run / "weights.safetensors").unlink()  # as if it had been killed before they were written
    whole = (run / "summary.json").read_bytes()
    train("--out", run, "--resume", "auto")
    assert weights(run) and (run / "summary.json").read_bytes() == whole
    (run / "summary.json").write_text('{"stop": "finished", "step": 8}')  # before --steps 16, and then killed
    train("--out", run, "--resume", "auto")
    assert json.loads((run / "summary.json").read_text())["step"] == 16


@pytest.mark.ci
def test_a_run_that_ended_by_the_clock_names_the_time_that_asks_for_more(tmp_path):
    run, by = tmp_path / "run", ["--schedule", "constant"]
    train(*SMALL, *by, "--within", "2s", "--preset", "tiny", "--out", run)
    steps = json.loads((run / "summary.json").read_text())["step"]
    more = asked_for_more(run, "--within", "2s")
    assert more[-2:] == ["--within", "4s"] and asked_for_more(run, "--steps", "9999999") == more
    train(*more)
    assert json.loads((run / "summary.json").read_text())["step"] > steps
    assert asked_for_more(run)[-2:] == ["--within", "8s"]


# What is saved when


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is set."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock.now)
    return clock


def test_a_checkpoint_is_due_after_its_minutes_with_few_looks_at_the_clock(clock, monkeypatch):
    asked = []
    monkeypatch.setattr(progress, "on_root", lambda comm, judge: asked.append(1) or judge())
    for seconds, first in ((0.001, 30.0), (0.001, 0.0), (1.0, 1.0), (70.0, 70.0), (1000.0, 1000.0)):
        clock.now, due = 0.0, []
        asked.clear()
        timer = SaveTimer(SerialComm(), 5.0, step=100)
        for step in range(101, 101 + min(int(1500 / seconds), 1_500_000)):
            clock.now += first if step == 101 else seconds
            if timer.is_due(step):
                due.append(clock.now)
                timer.saved()
        between = [b - a for a, b in zip([0.0, *due], due, strict=False)]
        assert due and all(300 <= pause <= 300 + 1.1 * seconds + 2 for pause in between), (seconds, between)
        assert len(asked) < 160, (seconds, len(asked))


def test_a_run_that_gets_slower_is_noticed(clock):
    timer = SaveTimer(SerialComm(), 5.0, step=0)
    for step in range(1, 10_000):
        clock.now += 0.01 if clock.now < 60 else 1.0
        if timer.is_due(step):
            break
    assert 300 <= clock.now < 3600


def test_a_run_saves_by_the_clock_and_computes_the_same(finished, tmp_path, monkeypatch):
    words = [*SMALL, *MODEL, "--steps", "8", "--save-every", "0.0000001s", "--out"]
    train(*words, tmp_path / "all")
    assert names(tmp_path / "all" / "checkpoints") == [f"step-{step:08}" for step in (6, 7, 8)]
    train(*words, tmp_path / "own", "--save-every", "5")  # which counts alone
    assert names(tmp_path / "own" / "checkpoints") == ["step-00000005", "step-00000008"]
    assert losses(tmp_path / "all") == losses(tmp_path / "own") == losses(finished)


# What is said at the end


def interrupted(monkeypatch, out, at, *words):
    """The result of a run that is interrupted as it records step `at`."""
    record = RunDirectory.record

    def stop(self, line):
        record(self, line)
        if line["step"] == at:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "record", stop)
        return inside("train", *SMALL, "--steps", "8", "--out", out, *words)


def test_an_interruption_says_what_is_true(tmp_path, monkeypatch):
    out = tmp_path / "my run"
    nothing = "distgpt: interrupted; nothing was saved yet (--save-every)\n"
    result = interrupted(monkeypatch, out, 3)
    assert result.returncode == 130 and result.stderr == nothing
    found = json.loads((out / "summary.json").read_text())
    assert (found["stop"], found["step"]) == ("interrupted", 3) and found["loss"] == losses(out)[-1]
    result = interrupted(monkeypatch, out, 5, "--save-every", "2", "--save", "sync", "--resume", "auto")
    assert result.stderr == f"distgpt: interrupted; step 4 is saved: resume with --out '{out}' --resume auto\n"
    result = interrupted(monkeypatch, out, 5, "--resume", "auto")
    assert "step 4 is saved" in result.stderr
    train("--out", out, "--resume", "auto")
    assert json.loads((out / "summary.json").read_text())["stop"] == "finished"
