"""How the tests themselves run: a line says every few seconds how far they are; long ones begin first."""

import os
import re
import subprocess
import sys

import pytest

from conftest import HELPERS, LONG, ROOT, TESTS, _turn


@pytest.mark.ci
def test_lines_of_dots_are_short_and_end_in_how_many_are_done():
    words = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "tests/core/base/test_formatting.py"]
    shown = subprocess.run([*words, "tests/recipes/test_dial.py"], cwd=ROOT, capture_output=True, text=True)
    lines = re.findall(r"^(\.+) +\[ *(\d+)/(\d+)\]$", shown.stdout, re.MULTILINE)
    assert shown.returncode == 0 and lines, shown.stdout
    assert max(len(dots) for dots, _, _ in lines) < 45 and lines[-1][1] == lines[-1][2]


def test_what_takes_long_begins_first():
    assert _turn("ranks") < _turn(LONG[0]) < _turn(LONG[-1]) < _turn("test_conftest") == _turn("test_files")
    found = {path.stem for path in TESTS.rglob("test_*.py")}
    assert set(LONG) <= found


def test_no_two_files_of_tests_have_one_name():
    """Folders of tests are no packages, so that pytest would collect the first one alone."""
    names = [path.name for path in TESTS.rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)


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
