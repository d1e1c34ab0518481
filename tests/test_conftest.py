"""How the tests themselves run: every few seconds a line says how far they are."""

import re
import subprocess
import sys
from pathlib import Path


def test_lines_of_dots_are_short_and_end_in_how_many_are_done():
    words = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "tests/test_formatting.py"]
    root = Path(__file__).parents[1]
    shown = subprocess.run([*words, "tests/config/test_dial.py"], cwd=root, capture_output=True, text=True)
    lines = re.findall(r"^(\.+) +\[ *(\d+)/(\d+)\]$", shown.stdout, re.MULTILINE)
    assert shown.returncode == 0 and lines, shown.stdout
    assert max(len(dots) for dots, _, _ in lines) < 45 and lines[-1][1] == lines[-1][2]
