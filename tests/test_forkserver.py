"""A command forked by the server of the tests is what a cold start is."""

import os
import signal
import subprocess
import time

import pytest
from conftest import MPIRUN, SMALL, _server, command, distgpt, popen


def told(result):
    return result.returncode, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["--version"], 0),
        (["train", "--help"], 0),
        (["infer", "--weights", "nothing.safetensors"], 74),
        (["train", *SMALL, "--steps", "1", "--progress", "plain", "--out", "/dev/null/run"], 74),
    ],
)
def test_the_same_output_and_exit_code(args, code, tmp_path):
    forked, cold = (told(distgpt(*args, cwd=tmp_path, cold=cold)) for cold in (False, True))
    assert forked == cold and forked[0] == code


def test_directory_environment_and_standard_streams(tmp_path):
    """The text is read from where the command starts; what it is launched as stands in the environment."""
    (tmp_path / "text.txt").write_text("one two three four " * 50)
    words = [*SMALL, "--data", "text.txt", "--steps", "1", "--out", "run"]
    assert distgpt("train", *words, cwd=tmp_path).returncode == 0
    assert (tmp_path / "run" / "weights.safetensors").exists()
    words = ["--weights", "run/weights.safetensors", "--prompt-file", "/dev/stdin", "--max-new-tokens", "1"]
    how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": tmp_path}
    with popen("infer", *words, **how) as process:
        assert process.communicate("two three")[0].startswith("two three")
    assert distgpt("estimate", env={"PMI_SIZE": "2"}).returncode == 2


def test_a_reader_that_has_gone():
    reading, writing = os.pipe()
    os.close(reading)
    process = popen("train", "--help", stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert process.communicate() == (None, "") and process.returncode == 74


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)],
    ids=["2", "15", "9"],
)
def test_signals(tmp_path, number, code):
    """In a session of its own, and with SIGINT at work also where the tests ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    how = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    process = popen("train", *SMALL, "--steps", "1000000", "--out", tmp_path / "run", **how)
    signal.signal(signal.SIGINT, before)
    while not (tmp_path / "run" / "metrics.jsonl").exists() and process.poll() is None:
        time.sleep(0.01)
    assert os.getsid(process.pid) == process.pid and process.poll() is None
    os.killpg(process.pid, number)
    assert process.communicate(timeout=60)[1].startswith("distgpt: interrupted" if code == 130 else "")
    assert process.returncode == code


def test_what_a_start_decides_starts_cold(monkeypatch):
    server = _server()
    plain = server.environ
    assert server.suits({**plain, "COLUMNS": "7", "PMI_RANK": "1"})
    assert not any(
        server.suits({**plain, key: "1"}) for key in ("PYTHONUNBUFFERED", "HOME", "NUMBA_CACHE_DIR")
    )
    for how in ({"cold": True}, {"env": {"OMP_NUM_THREADS": "2"}}, {"program": [*command()]}):
        with popen("--version", stdout=subprocess.DEVNULL, **how) as process:
            assert type(process) is subprocess.Popen


@pytest.mark.skipif(MPIRUN is None, reason="needs mpirun")
def test_the_server_has_loaded_no_mpi_and_runs_no_thread():
    maps, pid = [], _server().process.pid
    distgpt("--version")
    with open(f"/proc/{pid}/maps") as file:  # noqa: PTH123
        maps = file.read()
    assert "libmpi" not in maps and "mpi4py" not in maps and "cupy" not in maps and "llvmlite" in maps
    assert len(os.listdir(f"/proc/{pid}/task")) == 1  # noqa: PTH208
