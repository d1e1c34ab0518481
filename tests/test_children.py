"""Programs that distgpt starts: what they leave behind, and that they never outlive it."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from distgpt.children import TIMED_OUT, distgpt_command, run, unlaunched
from distgpt.errors import StorageError

PYTHON = sys.executable


def script(text):
    return [PYTHON, "-u", "-c", textwrap.dedent(text)]


def test_what_a_child_said_and_how_it_ended():
    heard = []
    child = """
        import sys
        print("one"); print("two"); print("sorry", file=sys.stderr)
        sys.exit(3)
    """
    ended = run(script(child), on_line=heard.append)
    assert (ended.code, ended.output, ended.errors) == (3, "one\ntwo\n", "sorry\n")
    assert heard == ["one", "two"]
    assert ended.last_words() == "sorry"
    assert ended.seconds > 0


def test_a_child_that_says_much_on_both_streams_does_not_wait_for_us():
    child = "import sys\nfor f in (sys.stderr, sys.stdout): f.write('x' * (1 << 20))"
    ended = run(script(child), timeout=30)
    assert ended.code == 0 and len(ended.output) == len(ended.errors) == 1 << 20


def test_a_child_that_takes_too_long_is_ended():
    begun = time.monotonic()
    assert run(script("import time; time.sleep(60)"), timeout=0.5).code == TIMED_OUT
    assert time.monotonic() - begun < 5


def test_a_killed_child_tells_by_what():
    assert run(script("import os; os.kill(os.getpid(), 9)")).code == -signal.SIGKILL


def test_a_program_that_is_not_there():
    with pytest.raises(StorageError, match="cannot start /no/such/program: No such file"):
        run(["/no/such/program"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_whatever_ends_us_ends_the_grandchildren_too(tmp_path, number):
    """Also those that take no notice of requests."""
    grandchild = f"""
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
        time.sleep(60)
    """
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {textwrap.dedent(grandchild)!r}])"
    parent = subprocess.Popen(
        script(f"from distgpt.children import run; import sys; run([sys.executable, '-c', {child!r}])"),
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 20
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pid = int((tmp_path / "pid").read_text())
    parent.send_signal(number)
    assert parent.wait(timeout=20) != 0
    time.sleep(0.2)
    stat = Path(f"/proc/{pid}/stat")
    assert not stat.exists() or stat.read_text().split()[2] == "Z"


def test_this_program_as_a_command():
    ended = run(distgpt_command("--version"))
    assert ended.code == 0 and ended.output.startswith("distgpt, version")


def test_children_that_are_no_ranks_hear_nothing_of_the_launcher():
    surroundings = {"PMI_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "SLURM_STEP_NUM_TASKS": "2", "HOME": "/"}
    assert unlaunched(surroundings) == {"HOME": "/"}
    assert set(unlaunched()) <= set(os.environ)
