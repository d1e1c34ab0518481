"""The test setup: files, and commands forked by the test server."""

import os
import signal
import subprocess
import sys

import pytest

from conftest import HELPERS, LONG, ROOT, SMALL, TESTS, distgpt, popen, wait_for


def test_files_have_unique_names():
    """Test directories are not packages, so pytest collects one of two files with the same name."""
    names = [path.stem for path in TESTS.rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names) and set(LONG) <= set(names)


@pytest.mark.ci
def test_nohup_leaves_children_the_default_sighup(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import signal, subprocess, sys\n"
        "def test_it():\n"
        "    asked = 'import signal; print(signal.getsignal(signal.SIGHUP) == signal.SIG_DFL)'\n"
        "    assert subprocess.check_output([sys.executable, '-c', asked]) == b'True\\n'\n"
        "    signal.raise_signal(signal.SIGHUP)\n"
    )
    words = [sys.executable, "-m", "pytest", "-q", "-n", "1", "-p", "no:cacheprovider", "-p", "conftest"]
    words += ["--rootdir", tmp_path, tmp_path]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{TESTS}:{HELPERS}"}
    env.pop("DISTGPT_TEST_TIERS", None)
    done = subprocess.run(["nohup", *words], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.ci
def test_forked_command_matches_cold_start(tmp_path):
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


@pytest.mark.ci
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)], ids=["2", "9"])
def test_forked_command_receives_signals(tmp_path, number, code):
    how = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    process = popen("train", *SMALL, "--steps", "1000000", "--out", tmp_path / "run", **how)
    wait_for(lambda: (tmp_path / "run" / "metrics.jsonl").exists() or process.poll() is not None)
    assert os.getsid(process.pid) == process.pid and process.poll() is None
    os.killpg(process.pid, number)
    assert process.communicate(timeout=60)[1].startswith("distgpt: interrupted" if code == 130 else "")
    assert process.returncode == code
