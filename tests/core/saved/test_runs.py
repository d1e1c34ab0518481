"""The table of runs, run directories in place of weights files, and their locks."""

import errno
import fcntl
import json
import math
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from complaints import complains, done
from disks import raising, without_locks
from distgpt.core.base.errors import StorageError, UsageError, command_line
from distgpt.core.base.system import PACKAGE, python
from distgpt.core.comm.api import SerialComm
from distgpt.core.data.textfile import read_text, resolve_data
from distgpt.core.saved.modelfile import read_description
from distgpt.core.saved.rundir import RunDirectory
from distgpt.core.saved.tensors import write_tensors
from distgpt.core.saved.weights import find_weights
from distgpt.show.runs import Listed, render_terminal

from conftest import SMALL, inside, logged, metrics, popen, refused, summary, validations, wait_for

HELD_OUT = ["--val-fraction", "0.2", "--eval-every", "2"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    top = tmp_path_factory.mktemp("place") / "runs"
    for out, *words in ((top / "my first", "--steps", "6", *HELD_OUT), (top / "sweep" / "second", "--steps", "3")):
        shown = done("train", *SMALL, "--out", out, *words)
        # The printed next command works.
        (line,) = [line for line in shown.splitlines() if line.startswith("next")]
        words, run = shlex.split(line.partition("infer")[2]), RunDirectory(out)
        assert words[:2] == ["--weights", str(run.best if "at step" in shown else run.weights)]
        done("infer", *words, "--max-new-tokens", "2")
    (top / "other").mkdir()
    (top / "other" / "config.toml").write_text("[unknown]\na = 1\n")
    return top


@pytest.fixture
def runs(place, tmp_path):
    return shutil.copytree(place, tmp_path / "runs")


def listed(top, *words):
    return json.loads(done("runs", top, "--json", *words))["runs"]


def test_summary_has_losses_and_stop_reason(runs):
    out = runs / "my first"
    found, recorded = summary(out), logged(out)
    evaluated = validations(out)
    best = min((step for step in evaluated if step), key=evaluated.get)
    assert found["loss"] == [line["loss"] for line in recorded if "loss" in line][-1]
    assert (found["val_loss"], found["step"], found["stop"]) == (evaluated[6], 6, "finished")
    assert (found["best_val_loss"], found["best_step"]) == (evaluated[best], best)
    without = summary(runs / "sweep" / "second")
    assert without["val_loss"] is without["best_val_loss"] is without["best_step"] is None
    (out / "summary.json").unlink()  # the best step survives a resume
    done("train", "--resume", out)
    again = summary(out)
    assert (again["best_step"], again["best_val_loss"]) == (found["best_step"], found["best_val_loss"])
    assert again["steps"] == 0 and again["loss"] is None


def test_runs_are_listed_with_results(runs):
    first, second = listed(runs)
    assert [first["name"], second["name"]] == ["my first", "sweep/second"]
    assert (first["step"], first["steps"], first["state"], first["error"]) == (6, 6, "finished", None)
    assert first["loss"] == summary(runs / "my first")["loss"] and second["val_loss"] is None
    assert first["val_loss"] == pytest.approx(summary(runs / "my first")["best_val_loss"])
    page = inside("runs", runs).stdout
    for words in ("my first", "6/6", "finished", f"{first['val_loss']:.4f}", "tokens/s", "second"):
        assert words in page
    (alone,) = listed(runs / "my first")
    assert alone["name"] == "my first" and inside("runs", cwd=runs.parent).stdout == page


def test_losses_are_also_in_bits_per_byte(runs):
    words = [*SMALL, "--tokenizer", "byte", *HELD_OUT, "--steps", "2", "--out", runs / "bytes"]
    result = done("train", *words)
    by_byte, by_word, _ = listed(runs)
    assert by_byte["train_bits_per_byte"] == pytest.approx(by_byte["loss"] / math.log(2))
    assert by_byte["bits_per_byte"] == pytest.approx(by_byte["val_loss"] / math.log(2))
    tokenizer = read_description(runs / "my first" / "weights.safetensors").tokenizer
    ids = tokenizer.encode(read_text(resolve_data("story")))
    train = ids[round(0.2 * len(ids)) :]
    each = len(tokenizer.decode(train).encode()) / len(train)
    assert by_word["train_bits_per_byte"] == pytest.approx(by_word["loss"] / math.log(2) / each)
    found = summary(runs / "my first")
    assert found["train_bits_per_byte"] == by_word["train_bits_per_byte"]
    assert found["best_bits_per_byte"] == by_word["bits_per_byte"] < by_word["val_loss"]
    for key, loss, bits in (("losses", "loss", "train_bits_per_byte"), ("best", "val_loss", "bits_per_byte")):
        shown = f"{by_byte[loss]:.4f} ({by_byte[bits]:.2f} bits per byte)"
        assert any(shown in line for line in result.splitlines() if line.startswith(key))
    by_bits = [run["bits_per_byte"] for run in listed(runs, "--sort", "bits-per-byte")]
    assert by_bits == [*sorted(by_bits[:2]), None]


def test_timed_run_shows_its_time(runs):
    out = runs / "clock"
    done("train", *SMALL, "--set", "train_minutes=0.02", "--out", out)
    found = listed(out)[0]
    assert (found["steps"], found["elapsed_s"], found["total_s"]) == (None, 1.2, 1.2)
    elapsed = [line["elapsed_s"] for line in logged(out)]
    assert elapsed == sorted(elapsed) and 0 < elapsed[0] < 1.2
    text = (out / "config.toml").read_text().replace("train_minutes = 0.02", "train_minutes = 3.0")
    (out / "config.toml").write_text(text)
    (out / "metrics.jsonl").write_text(json.dumps(logged(out)[0] | {"elapsed_s": 77.0}) + "\n")
    (out / "summary.json").unlink()
    assert "1:17/3:00" in (page := done("runs", out)) and "/7" not in page


def test_running_run_shows_expected_time(runs):
    out = runs / "my first"
    taken = [{"step": step, "loss": 1.0, "step_s": 60.0} for step in (1, 3)]
    (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in taken))
    found = listed(out)[0]
    assert (found["elapsed_s"], found["total_s"]) == (180.0, None) and " 3:00 " in done("runs", out)
    with RunDirectory(out).lock.claimed(SerialComm()):
        assert listed(out)[0]["total_s"] == 360.0 and " 3:00/6:00 " in done("runs", out)


@pytest.mark.parametrize("columns", [60, 100, 200])
def test_narrow_terminal_shows_fewer_columns(runs, columns):
    long = "a-run-with-a-rather-long-name-of-mine"
    (runs / "my first").rename(runs / long)
    (runs / "sweep" / "grid.json").touch()
    shutil.copytree(runs / "sweep" / "second", runs / "sweep" / "third")
    head, *rows = inside("runs", runs, env={"COLUMNS": str(columns)}).stdout.splitlines()
    assert max(map(len, (head, *rows))) <= columns
    assert head.startswith("run ") and {"steps", "time", "state"} <= {*head.split()}
    assert ("tokens/s" in head and " when" in head) == (columns > 80)
    page = " ".join(rows)
    assert "finished" in page and "6/6" in page and "3/3" in page and "(2 " in page
    assert columns < 200 or (len(rows) == 3 and long in page)
    assert [run["name"] for run in listed(runs / "sweep")] == ["second", "third"]
    assert [run["sweep"] for run in listed(runs)] == [None, "sweep", "sweep"]


def test_missing_runs_suggest_next_command(runs, tmp_path):
    (tmp_path / "empty" / "runs").mkdir(parents=True)
    shown = inside("runs", cwd=tmp_path / "empty")
    assert shown.returncode == 0 and "distgpt train" in shown.stdout
    refused(inside("plot", cwd=tmp_path / "empty"), 2, "distgpt train")
    refused(inside("runs", cwd=tmp_path / "empty" / "runs"), 2, "distgpt train")
    for words in (["runs"], ["plot"], ["compare", "runs/sweep/second"], ["train", "--resume"]):
        result = inside(*words, "runs/my frst", cwd=tmp_path)
        assert result.returncode in (2, 65) and "did you mean 'runs/my first'?" in result.stderr
    assert inside("plot", cwd=tmp_path).stdout == "runs/sweep/second/curves.png\n"


def test_runs_are_sorted(runs):
    def order(*words):
        return [run["name"][:2] for run in listed(runs, *words)]

    assert order("--sort", "steps") == ["sw", "my"] == order("--reverse")
    assert order("--sort", "validation") == ["my", "sw"] == order("--sort", "validation", "--reverse")
    for hours, name in enumerate(("my first", "sweep/second")):
        for path in (runs / name).iterdir():
            os.utime(path, (1e9 + 3600 * hours,) * 2)
    assert order("--sort", "when") == ["sw", "my"]
    assert order("--sort", "loss") == [run["name"][:2] for run in sorted(listed(runs), key=lambda run: run["loss"])]


def test_run_states(runs):
    out = runs / "my first"

    def state():
        return listed(out)[0]["state"]

    with RunDirectory(out).lock.claimed(SerialComm()):
        assert state() == "running"
    (out / "running.json").touch()
    assert state() == "stopped"  # an older summary does not count
    (out / "running.json").unlink()
    for text, found in (('{"stop": "interrupted"}', "interrupted"), ("{}", "finished")):
        (out / "summary.json").write_text(text)
        assert state() == found
    os.utime(out / "summary.json", (1e8, 1e8))  # an older start
    assert state() == "stopped"
    (out / "summary.json").unlink()
    assert state() == "stopped"
    (out / "metrics.jsonl").unlink()
    assert state() == "begun"


@pytest.mark.parametrize(("file", "content"), [
    ("metrics.jsonl", '{"step": 1, "val_loss": "low"}\n'),
    ("metrics.jsonl", "[" * 100_000 + "\n"),
    ("metrics.jsonl", '{"step": Infinity, "loss": 1}\n'),
    ("summary.json", '{"stop": NaN}'),
    ("config.toml", "a\x1b[31m = 1"),
])  # fmt: skip
def test_corrupt_run_leaves_the_others(runs, file, content):
    (runs / "my first" / file).write_text(content)
    first, second = listed(runs)
    assert (first["state"], second["state"]) == ("damaged", "finished") and file in first["error"]
    page = inside("runs", runs).stdout
    assert "damaged" in page and file in page and "\x1b" not in page


@pytest.mark.parametrize("seconds", [2.0**63, 2.0**60, 1e300, -1e300])
def test_invalid_file_time_is_omitted(seconds):
    assert "begun" in render_terminal([Listed("a", "a", when=seconds)])


def test_metrics_that_are_not_finite_are_null(tmp_path):
    RunDirectory(tmp_path).record({"step": 1, "loss": math.nan, "grad_norm": math.inf, "lr": 0.5})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert line == '{"step": 1, "loss": null, "grad_norm": null, "lr": 0.5}'


def test_missing_weights_suggest_nearest_path(tmp_path):
    (tmp_path / "run.safetensors").touch()
    with pytest.raises(StorageError, match=r"No such file or directory; did you mean .*run\.safetensors"):
        find_weights(tmp_path / "rum.safetensors")


def test_run_directory_means_best_weights(runs, monkeypatch):
    out = runs / "my first"
    run = RunDirectory(out)
    assert find_weights(out) == run.best and find_weights(run.weights) == run.weights
    run.best.unlink()
    assert find_weights(out) == run.weights
    run.weights.unlink()
    newest = run.checkpoints / "step-00000006"
    assert find_weights(out) == newest / "weights.safetensors" == find_weights(newest)
    for words in (["infer", "--max-new-tokens", "2"], ["eval", "--val", "story", "--val-tokens", "40"]):
        done(*words, "--threads", "1", "--weights", out)
    further = ["--data", "story", "--steps", "1", "--batch-size", "2", "--out", runs / "more"]
    done("train", "--init", out, *further)
    assert RunDirectory(runs / "more").saved().train.init == str(newest / "weights.safetensors")
    shutil.rmtree(run.checkpoints)
    refused(inside("infer", "--weights", out), 2, "contains no weights")
    near = "runs/sweep/seconds"
    refused(inside("infer", "--weights", near, cwd=runs.parent), 74, near, "'runs/sweep/second'")


def test_run_without_steps_is_replaced(runs, tmp_path):
    out, words = tmp_path / "runs" / "tiny-adamw", ["train", *SMALL, "--steps", "1"]

    def begun():
        shutil.copytree(runs / "sweep" / "second", out, dirs_exist_ok=True)
        shutil.rmtree(out / "checkpoints")
        for name in ("metrics.jsonl", "weights.safetensors", "summary.json"):
            (out / name).unlink()

    for place in ([], ["--out", out]):
        begun()
        assert inside(*words, *place, cwd=tmp_path).returncode == 0 and RunDirectory(out).finished_at() == 1
    assert inside(*words, cwd=tmp_path).returncode == 0  # the first run has a step
    assert RunDirectory(tmp_path / "runs" / "tiny-adamw-2").finished_at() == 1
    refused(inside(*words, "--out", out), 2, "add --resume auto")
    begun()
    (out / "running.json").write_text("{}")  # the run may be starting
    assert inside(*words, cwd=tmp_path).returncode == 0
    assert (out / "running.json").exists() and (tmp_path / "runs" / "tiny-adamw-3").exists()


def test_mistyped_directory_is_not_resumed(runs):
    near = ["--resume", "auto", "--out", "runs/my frst"]
    for more in ([], ["--steps", "9"], ["--stage", "mpi"]):
        result = inside("train", *near, *more, "--threads", "1", cwd=runs.parent)
        refused(result, 2, "runs/my frst", "'runs/my first'", "--data")
    assert not (runs / "my frst").exists()
    assert inside("train", *SMALL, "--steps", "1", *near, cwd=runs.parent).returncode == 0


def test_transformers_model_suggests_import(runs, tmp_path):
    there = tmp_path / "my model"
    result = inside("weights", "export", runs / "my first", "--out", there)
    if result.returncode:  # a word tokenizer cannot be exported
        there.mkdir()
        (there / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=f"weights import '{there}' --out 'my model.safetensors'"):
        find_weights(there)
    write_tensors(there / "model.safetensors", {"w": np.zeros(2, np.float32)}, {})
    refused(inside("infer", "--weights", there / "model.safetensors"), 65, f"weights import '{there}'")


def test_suggested_commands_are_quoted(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["-c"])
    assert command_line("plot", "a b") == shlex.join(python(PACKAGE, "plot", "a b"))
    monkeypatch.setattr(sys, "argv", [".venv/bin/distgpt"])
    assert command_line("plot") == ".venv/bin/distgpt plot"
    (tmp_path / "distgpt").touch(mode=0o755)
    assert command_line("plot") == "distgpt plot"


HOST = platform.node()
NO_LOCKS = raising(OSError(errno.ENOLCK, "No locks available"))


@pytest.fixture(params=[True, False], ids=["locks", "no locks"])
def run(request, tmp_path, monkeypatch):
    if not request.param:
        monkeypatch.setattr(fcntl, "flock", NO_LOCKS)
    return RunDirectory(tmp_path)


def test_directory_is_held_while_claimed(run, tmp_path, monkeypatch):
    assert not run.lock.is_held() and run.lock.refuse_second() == ""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ZeroDivisionError), RunDirectory(Path()).lock.claimed(SerialComm()):
        monkeypatch.chdir("/")  # the path was relative
        assert json.loads(run.lock.path.read_text()) == {"host": HOST, "pid": os.getpid()} and run.lock.is_held()
        raise ZeroDivisionError
    with run.lock.claimed(SerialComm()):
        run.lock.claim()  # again in the same process
        assert run.lock.is_held() and run.lock.refuse_second() == ""
    assert not run.lock.is_held() and not list(tmp_path.iterdir())
    with run.lock.claimed(SerialComm()):
        run.lock.path.unlink()
        run.lock.path.write_text("another's")
    assert run.lock.path.read_text() == "another's"


def test_undecodable_names_are_rejected(tmp_path):
    for name in ("a\0b", "a\udc80"):
        with pytest.raises(UsageError, match="choose another --out"):
            RunDirectory(tmp_path / name).refuse_undecodable()
    assert not RunDirectory(tmp_path / "none").is_there() and RunDirectory(tmp_path).is_there()


def test_stale_lock_file_means_in_use(tmp_path, monkeypatch):
    """On NFS a removed open file is stale; other failures are storage errors."""
    lock = RunDirectory(tmp_path).lock
    with lock.claimed(SerialComm()):
        lock.refuse_taken()
        monkeypatch.setattr(os, "fstat", raising(OSError(errno.EIO, "bad")))
        with pytest.raises(StorageError, match="running"):
            lock.refuse_taken()
        monkeypatch.setattr(os, "fstat", raising(OSError(errno.ESTALE, "stale")))
        with pytest.raises(UsageError, match="is in use"):
            lock.refuse_taken()
        monkeypatch.undo()


@pytest.mark.ci
def test_second_run_and_forked_child_are_rejected(run):
    first, second = run.lock, RunDirectory(run.lock.path.parent).lock
    with first.claimed(SerialComm()):
        for refuse in (second.claim, second.refuse_second):
            with pytest.raises(UsageError, match="is in use"):
                refuse()
        assert second.is_held()
        second.release()
        assert first.path.exists()
        if (child := os.fork()) == 0:
            refused = 0
            for refuse in (first.claim, first.refuse_taken, second.claim):
                try:
                    refuse()
                except UsageError:
                    refused += 1
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3 and first.path.exists()
    with second.claimed(SerialComm()):
        assert first.is_held()


@pytest.mark.parametrize("content, who", [
    *((content, "another process") for content in ("", "[]", "damaged", '{"host": 3, "pid": 7}')),
    ('{"host": "h", "space": "s", "pid": -1}', "process -1 on h"),  # another version's format
    *((json.dumps({"host": host, "pid": pid}), None)
      for host, pid in (("elsewhere", os.getpid()), (HOST, 2**22 + 1), (HOST, -1), (HOST, 2**80), (HOST, "1"))),
], ids=range(10))  # fmt: skip
def test_unheld_lock_file_is_ignored(run, content, who):
    run.lock.path.write_text(content)
    assert not run.lock.is_held() and who in (None, run.lock.refuse_second())
    with run.lock.claimed(SerialComm()):
        assert json.loads(run.lock.path.read_text())["pid"] == os.getpid()


def test_lock_on_full_disk_is_a_storage_error(run, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "ftruncate", raising(OSError(errno.ENOSPC, "No space left on device")))
    with complains("No space left", kind=StorageError):
        run.lock.claim()
    assert not list(tmp_path.iterdir())


@pytest.fixture
def unlocked(tmp_path_factory):
    if shutil.which("cc") is None or sys.platform != "linux":
        pytest.skip("needs a C compiler and Linux")
    return without_locks(tmp_path_factory.mktemp("unlocked"))


def test_missing_locks_are_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", NO_LOCKS)
    (tmp_path / "text.txt").write_text("Once upon a time. " * 20)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    prepare = ["data", "prepare", tmp_path / "text.txt", "--tokenizer", "byte", "--out", tmp_path / "shards"]
    infer = ["infer", "--prompts", tmp_path / "prompts.jsonl", "--max-new-tokens", "1"]
    train = ["train", *SMALL, "--steps", "1", "--out", tmp_path / "run"]
    for words in (prepare, [*infer, "--out", tmp_path / "answers.jsonl"], train):
        result = inside(*words)
        said = result.stdout + result.stderr
        assert result.returncode == 0 and said.count(f"the file system of {words[-1]} has no locks") == 1, said


@pytest.mark.ci
@pytest.mark.parametrize("locks", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_concurrent_start_is_rejected(locks, tmp_path, request):
    words = ["train", *SMALL, "--steps", "100000", "--time-limit", "100s", "--out", tmp_path / "run"]
    how = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    how |= {} if locks else {"cold": True, "env": request.getfixturevalue("unlocked")}
    both = [popen(*map(str, words), *resume, **how) for resume in ([], ["--resume", "auto"])]
    wait_for(lambda: any(process.poll() is not None for process in both), 60)
    (refused,) = [process for process in both if process.poll() is not None]
    assert refused.returncode == 2 and str(tmp_path / "run") in refused.communicate()[1]
    (other,) = [process for process in both if process is not refused]
    wait_for(lambda: (tmp_path / "run" / "metrics.jsonl").exists() or other.poll() is not None, 60)
    other.terminate()
    assert other.wait() == 143 and metrics(tmp_path / "run")


def state_of(top):
    (run,) = json.loads(inside("runs", top, "--json").stdout)["runs"]
    return run["state"]


@pytest.mark.ci
def test_run_is_running_until_its_process_ends(tmp_path):
    out = tmp_path / "run"
    words = ["train", *SMALL, "--out", out, "--steps", 10**7, "--progress", "plain"]
    needed = ("running.json", "metrics.jsonl")
    for ending, state, resume in (
        (signal.SIGINT, "interrupted", []),
        (signal.SIGKILL, "stopped", ["--resume", "auto"]),
    ):
        how = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with popen(*map(str, words), *resume, **how) as process:
            try:
                wait_for(lambda: all((out / name).exists() for name in needed), 60)
                for path in out.glob("*.*"):  # not updated for a long time
                    os.utime(path, (1e9, 1e9))
                assert state_of(tmp_path) == "running"
            finally:
                process.send_signal(ending)
                process.wait()
        assert state_of(tmp_path) == state and (out / "running.json").exists() is (ending == signal.SIGKILL)


def test_leftovers_of_killed_runs_are_removed(tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    left = [f".{name}.0123456789ab.tmp" for name in ("config.toml", "best.safetensors", "weights.safetensors")]
    for name in (*left, "running.json"):
        (out / name).write_text("half")
    assert inside("train", *SMALL, "--steps", "1", "--out", out, "--resume", "auto").returncode == 0
    assert not list(out.glob(".*"))
    for name in (*left, ".mine.0123456789ab.tmp"):
        (out / name).write_text("half")
    (out / "checkpoints" / ".tmp-step-00000001").mkdir()
    (out / "running.json").write_text('{"host": "nowhere", "pid": 7}')
    again = inside("train", "--steps", "2", "--resume", out, "--threads", "1")
    assert again.returncode == 0 and "process 7 on nowhere left this run" in again.stdout
    assert [path.name for path in out.rglob(".*")] == [".mine.0123456789ab.tmp"]
    assert not (out / "running.json").exists()
    refused(inside("train", *SMALL, "--out", tmp_path, "--resume", "auto"), 2, "not empty")
