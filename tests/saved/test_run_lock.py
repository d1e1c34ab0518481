"""Which process trains in a run's directory: named while it lives, and told from others with its number."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from conftest import SMALL, inside, metrics, popen, refused
from disks import raising

from distgpt.comm.serial import SerialComm
from distgpt.errors import DataError, StorageError, UsageError
from distgpt.saved import run_lock as locks
from distgpt.saved.run_lock import claim, is_alive, myself, read_holder, refuse_second, release, run_lock
from distgpt.saved.rundir import RunDirectory


def test_a_holder_is_there_only_as_long_as_it_holds(tmp_path):
    path = tmp_path / "running.json"
    assert read_holder(path) is None
    with pytest.raises(ZeroDivisionError), run_lock(path, SerialComm()):
        assert read_holder(path) == myself() and is_alive(myself())
        raise ZeroDivisionError
    assert not path.exists()


def test_what_another_process_took_over_stays_its_own(tmp_path):
    path = tmp_path / "running.json"
    with run_lock(path, SerialComm()):
        other = json.loads(path.read_text()) | {"pid": 1}
        path.write_text(json.dumps(other))
    assert read_holder(path).pid == 1
    with run_lock(path, SerialComm()):
        path.write_text("damaged")
    assert path.exists()


def test_a_second_process_is_refused_until_the_first_has_ended(tmp_path):
    path = tmp_path / "running.json"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        there = replace(myself(), pid=child.pid, started=locks._started(child.pid))
        path.write_text(json.dumps(asdict(there)))
        for _ in range(2):
            with pytest.raises(UsageError, match=f"is in use: process {child.pid} on .*another --out"):
                claim(path)
        child.stdin.close()
        while is_alive(there):  # then a zombie
            time.sleep(0.01)
    assert refuse_second(path) == there
    with run_lock(path, SerialComm()):
        assert read_holder(path) == myself() and [path.name for path in tmp_path.iterdir()] == [path.name]
        claim(path)  # again, as in a notebook
    assert not path.exists()


@pytest.mark.parametrize("content", ["elsewhere", "damaged", ""])
def test_what_cannot_be_seen_from_here_lives_as_long_as_it_touches_its_file(tmp_path, content):
    path = tmp_path / "running.json"
    far = json.dumps(asdict(replace(myself(), host="elsewhere")))
    path.write_text(far if content == "elsewhere" else content)
    with pytest.raises(UsageError, match="is in use"):
        claim(path)
    os.utime(path, (time.time() - locks.SECONDS_DEAD - 1,) * 2)
    with run_lock(path, SerialComm()):
        assert read_holder(path) == myself()


def test_a_living_process_touches_its_file_and_notices_that_its_place_was_taken(tmp_path, monkeypatch):
    def wait_for(condition):
        until = time.monotonic() + 20
        while not condition() and time.monotonic() < until:
            time.sleep(0.01)
        assert condition()

    monkeypatch.setattr(locks, "SECONDS_BEAT", 0.01)
    run = RunDirectory(tmp_path)
    with run_lock(run.running, SerialComm()):
        os.utime(run.running, (0, 0))
        wait_for(lambda: run.running.stat().st_mtime > 0)
        run.refuse_if_lost()
        run.running.write_text(json.dumps(asdict(replace(myself(), host="elsewhere"))))
        os.utime(run.running, (0, 0))
        wait_for(lambda: locks.is_lost(run.running))
        with pytest.raises(StorageError, match="another process has taken over"):
            run.refuse_if_lost()
    assert run.running.stat().st_mtime == 0


def test_a_place_is_known_from_everywhere_and_by_itself_no_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with run_lock(Path("running.json"), SerialComm()):
        monkeypatch.chdir("/")
    assert not (tmp_path / "running.json").exists()
    (tmp_path / "running.json").write_text(json.dumps(asdict(replace(myself(), pid=2**22 + 1))))
    assert inside("train", *SMALL, "--steps", "1", "--out", tmp_path).returncode == 0


def test_of_two_that_begin_at_once_one_is_refused(tmp_path):
    words = ["train", *SMALL, "--steps", "100000", "--time-limit", "20s", "--out", tmp_path / "run"]
    how = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    both = [popen(*map(str, words), *resume, **how) for resume in ([], ["--resume", "auto"])]
    until = time.monotonic() + 15
    while all(process.poll() is None for process in both) and time.monotonic() < until:
        time.sleep(0.05)
    (refused,) = [process for process in both if process.poll() is not None]
    assert refused.returncode == 2 and str(tmp_path / "run") in refused.communicate()[1]
    (other,) = [process for process in both if process is not refused]
    while not (tmp_path / "run" / "metrics.jsonl").exists() and other.poll() is None:
        time.sleep(0.05)
    other.terminate()
    assert other.wait() == 143 and metrics(tmp_path / "run")


def test_a_run_that_was_killed_is_taken_over_aloud(tmp_path):
    words = ["train", *SMALL, "--steps", "4", "--out", tmp_path / "run"]
    assert inside(*map(str, words)).returncode == 0
    dead = replace(myself(), pid=2**22 + 1)
    (tmp_path / "run" / "running.json").write_text(json.dumps(asdict(dead)))
    again = inside("train", "--resume", tmp_path / "run")
    assert again.returncode == 0 and f"process {dead.pid} on {dead.host} has left this run" in again.stdout
    assert not (tmp_path / "run" / "running.json").exists()


def test_a_number_counts_only_with_its_start_its_machine_and_its_namespace():
    own = myself()
    assert is_alive(replace(own, started=own.started - 1)) is False
    assert is_alive(replace(own, host="elsewhere")) is None
    assert is_alive(replace(own, space="another boot")) is None


def test_without_proc_a_signal_asks(monkeypatch):
    monkeypatch.setattr(locks, "_space", lambda: "")
    own = myself()
    assert is_alive(own) and is_alive(replace(own, started=0))
    assert not is_alive(replace(own, pid=2**22 + 1))


def test_damaged_ones_are_refused(tmp_path):
    for content in ("", "[]", '{"host": "h", "space": "s", "pid": -1, "started": 0}'):
        (tmp_path / "running.json").write_text(content)
        with pytest.raises(DataError, match=r"running\.json"):
            read_holder(tmp_path / "running.json")


def listed(top):
    (run,) = json.loads(inside("runs", top, "--json").stdout)["runs"]
    return run["state"]


def test_a_run_is_running_until_its_process_ends_however_it_does(tmp_path):
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
                until = time.monotonic() + 60
                while not all((out / name).exists() for name in needed) and time.monotonic() < until:
                    time.sleep(0.05)
                for path in out.glob("*.*"):  # quiet for long
                    os.utime(path, (1e9, 1e9))
                assert listed(tmp_path) == "running"
            finally:
                process.send_signal(ending)
                process.wait()
        assert listed(tmp_path) == state
        assert (out / "running.json").exists() is (ending == signal.SIGKILL)


def test_a_place_is_taken_by_a_whole_file_or_not_at_all(tmp_path, monkeypatch):
    """Also where the disk is full, and on file systems without links; nothing is left beside it."""
    path = tmp_path / "running.json"
    with monkeypatch.context() as patch:
        patch.setattr(locks, "new_file", raising(OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(StorageError, match="No space left"):
            claim(path)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(Path, "hardlink_to", raising(OSError(errno.EPERM, "Operation not permitted")))
    claim(path)
    assert read_holder(path) == myself() and [file.name for file in tmp_path.iterdir()] == [path.name]
    release(path)


def test_what_killed_runs_have_left_is_no_obstacle_and_goes(tmp_path):
    """Before there was a configuration, and later; files of others stay."""
    out = tmp_path / "run"
    out.mkdir()
    left = [
        f".{name}.0123456789ab.tmp" for name in ("config.toml", "best.safetensors", "weights.safetensors")
    ]
    for name in (*left, ".running.json.0123456789abcdef"):
        (out / name).write_text("half")
    assert inside("train", *SMALL, "--steps", "1", "--out", out, "--resume", "auto").returncode == 0
    assert not list(out.glob(".*"))
    for name in (*left, ".mine.0123456789ab.tmp"):
        (out / name).write_text("half")
    (out / "checkpoints" / ".tmp-step-00000001").mkdir()
    assert inside("train", "--steps", "2", "--resume", out, "--threads", "1").returncode == 0
    assert [path.name for path in out.rglob(".*")] == [".mine.0123456789ab.tmp"]
    refused(inside("train", *SMALL, "--out", tmp_path, "--resume", "auto"), 2, "not empty")
