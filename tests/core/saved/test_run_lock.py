"""The lock of a run's directory, held by one process and released when it ends."""

import errno
import fcntl
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from complaints import complains
from disks import raising, without_locks
from distgpt.core.base.errors import StorageError, UsageError
from distgpt.core.comm.api import SerialComm
from distgpt.core.saved.rundir import RunDirectory

from conftest import SMALL, inside, metrics, popen, refused, wait_for

HOLD = """
import sys
from pathlib import Path
from distgpt.core.saved.rundir import RunDirectory
RunDirectory(Path(sys.argv[1])).lock.claim()
print("held", flush=True)
input()
"""
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


@pytest.mark.ci
def test_second_process_is_rejected_until_first_ends(tmp_path):
    run = RunDirectory(tmp_path)
    words = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "held\n"
        who = f"process {child.pid} on {HOST}"
        for refuse in (run.lock.claim, run.lock.refuse_second):
            with complains(f"is in use by {who}", "another --out", kind=UsageError):
                refuse()
        assert run.lock.is_held()
        child.kill()
    assert run.lock.refuse_second() == who and not run.lock.is_held()
    with run.lock.claimed(SerialComm()):
        assert run.lock.is_held()
    assert not run.lock.path.exists()


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


def listed(top):
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
                assert listed(tmp_path) == "running"
            finally:
                process.send_signal(ending)
                process.wait()
        assert listed(tmp_path) == state and (out / "running.json").exists() is (ending == signal.SIGKILL)


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
