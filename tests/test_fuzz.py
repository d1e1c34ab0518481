"""Some fuzzing: loaders meet damaged files by the commands of users (tests/fuzz/run.py)."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parent / "fuzz" / "run.py"


@pytest.mark.slow
def test_no_damaged_file_hurts():
    words = [sys.executable, str(RUN), "--cases", "1000", "--seconds", "15"]  # and twice as long to begin
    done = subprocess.run(words, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    cases = int(re.search(r"(\d+) cases, 0 failures", done.stdout)[1])
    assert cases >= 50, "the targets were hardly reached"
