"""How the tests themselves run."""

import os
import subprocess
import sys

import pytest

from conftest import HELPERS, LONG, ROOT, TESTS


def test_files_of_tests_have_names_of_their_own_and_long_ones_exist():
    """Folders of tests are no packages: of two files with one name pytest collects the first."""
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
