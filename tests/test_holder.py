"""Which process trains in a run's directory: named while it lives, and told from others with its number."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from conftest import SMALL, inside, popen

from distgpt.comm.serial import SerialComm
from distgpt.errors import DataError
from distgpt.saved import holder
from distgpt.saved.holder import held, is_alive, myself, read_holder


def test_a_holder_is_there_only_as_long_as_it_holds(tmp_path):
    path = tmp_path / "running.json"
    assert read_holder(path) is None
    with pytest.raises(ZeroDivisionError), held(path, SerialComm()):
        assert read_holder(path) == myself() and is_alive(myself())
        raise ZeroDivisionError
    assert not path.exists()


def test_what_another_process_took_over_stays_its_own(tmp_path):
    path = tmp_path / "running.json"
    with held(path, SerialComm()):
        other = json.loads(path.read_text()) | {"pid": 1}
        path.write_text(json.dumps(other))
    assert read_holder(path).pid == 1
    with held(path, SerialComm()):
        path.write_text("damaged")
    assert path.exists()


def test_a_number_counts_only_with_its_start_its_machine_and_its_namespace():
    own = myself()
    assert is_alive(replace(own, started=own.started - 1)) is False
    assert is_alive(replace(own, host="elsewhere")) is None
    assert is_alive(replace(own, space="another boot")) is None


def test_a_process_that_ended_is_not_alive_even_before_anybody_asked_how():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        there = replace(myself(), pid=child.pid, started=holder._started(child.pid))
        assert is_alive(there)
        child.stdin.close()
        while is_alive(there):  # then a zombie
            time.sleep(0.01)
    assert is_alive(there) is False


def test_without_proc_a_signal_asks(monkeypatch):
    monkeypatch.setattr(holder, "_space", lambda: "")
    own = myself()
    assert is_alive(own) and is_alive(replace(own, started=0))
    assert not is_alive(replace(own, pid=2**22 + 1))


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{}", '{"pid": 1}', "[" * 10_000),
        '{"host": "h", "space": "s", "pid": -1, "started": 0}',
        '{"host": "h", "space": "s", "pid": true, "started": 0}',
        '{"host": "h", "space": "s", "pid": 1e300, "started": 0}',
        '{"host": 1, "space": "s", "pid": 1, "started": 0}',
        '{"host": "h", "space": "s", "pid": 1, "started": 0, "more": 0}',
    ],
)
def test_damaged_ones_are_refused(tmp_path, content):
    (tmp_path / "running.json").write_text(content)
    with pytest.raises(DataError, match=r"running\.json"):
        read_holder(tmp_path / "running.json")


def listed(top):
    (run,) = json.loads(inside("runs", top, "--json").stdout)["runs"]
    return run["state"]


def test_a_run_is_running_until_its_process_ends_however_it_does(tmp_path):
    out = tmp_path / "run"
    words = ["train", *SMALL, "--out", out, "--steps", 10**7, "--log-every", 10**6, "--progress", "plain"]
    for ending, state, resume in (
        (signal.SIGINT, "interrupted", []),
        (signal.SIGKILL, "stopped", ["--resume", "auto"]),
    ):
        how = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with popen(*map(str, words), *resume, **how) as process:
            try:
                until = time.monotonic() + 60
                while not (out / "running.json").exists() and time.monotonic() < until:
                    time.sleep(0.05)
                for path in out.glob("*.*"):  # quiet for long
                    os.utime(path, (1e9, 1e9))
                assert listed(tmp_path) == "running"
            finally:
                process.send_signal(ending)
                process.wait()
        assert listed(tmp_path) == state
        assert (out / "running.json").exists() is (ending == signal.SIGKILL)
