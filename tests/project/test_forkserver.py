"""A command forked by the server of the tests is what a cold start is."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from conftest import SMALL, _server, command, distgpt, popen, wait_for

pytestmark = pytest.mark.ci


def test_output_exit_code_directory_and_standard_input_are_those_of_a_cold_start(tmp_path):
    (tmp_path / "text.txt").write_text("one two three four " * 50)
    for args, code in (
        (["train", "--help"], 0),
        (["infer", "--weights", "nothing.safetensors"], 74),
        (["train", *SMALL, "--data", "text.txt", "--steps", "1", "--progress", "plain", "--out", "."], 2),
    ):
        forked, cold = (vars(distgpt(*args, cwd=tmp_path, cold=cold)) | {"args": None} for cold in (False, True))
        assert forked == cold and forked["returncode"] == code
    how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with popen("infer", "--prompt-file", "/dev/stdin", "--max-new-tokens", "1", **how) as process:
        assert process.communicate("The harbour")[0].startswith("The harbour")
    assert distgpt("estimate", env={"PMI_SIZE": "2"}).returncode == 2


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)], ids=["2", "9"])
def test_signals(tmp_path, number, code):
    """In a session of its own."""
    how = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    process = popen("train", *SMALL, "--steps", "1000000", "--out", tmp_path / "run", **how)
    wait_for(lambda: (tmp_path / "run" / "metrics.jsonl").exists() or process.poll() is not None)
    assert os.getsid(process.pid) == process.pid and process.poll() is None
    os.killpg(process.pid, number)
    assert process.communicate(timeout=60)[1].startswith("distgpt: interrupted" if code == 130 else "")
    assert process.returncode == code


def test_what_a_start_decides_starts_cold(monkeypatch):
    server = _server()
    plain = server.environ
    assert server.suits({**plain, "COLUMNS": "7", "PMI_RANK": "1"})
    assert not any(server.suits({**plain, key: "1"}) for key in ("PYTHONUNBUFFERED", "HOME", "NUMBA_CACHE_DIR"))
    for how in ({"cold": True}, {"env": {"OMP_NUM_THREADS": "2"}}, {"program": [*command()]}):
        with popen("--version", stdout=subprocess.DEVNULL, **how) as process:
            assert type(process) is subprocess.Popen


def test_the_server_has_loaded_no_mpi_and_runs_no_thread():
    process = Path(f"/proc/{_server().process.pid}")
    distgpt("--version")
    maps = (process / "maps").read_text()
    assert not any(name in maps for name in ("libmpi", "mpi4py", "cupy")) and "llvmlite" in maps
    assert len(list((process / "task").iterdir())) == 1
