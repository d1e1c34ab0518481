"""Some fuzzing: loaders meet damaged files by the commands of users (tests/fuzz/run.py), ranks fail."""

import re
import subprocess
import sys

import pytest

from conftest import TESTS, needs_mpi

RUN = TESTS / "fuzz" / "run.py"


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
@needs_mpi
def test_a_rank_that_fails_where_it_meets_the_others_ends_the_job():
    words = [sys.executable, str(RUN.with_name("collectives.py")), "--only", "overlapped", "--every", "60"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280)
    # One case in 60; how many there are depends on how often ranks meet.
    cases = re.search(r"(\d+) cases, 0 failures", done.stdout)
    assert done.returncode == 0 and cases and int(cases[1]) >= 3, done.stdout + done.stderr


@pytest.mark.slow
def test_no_damaged_file_hurts():
    words = [sys.executable, str(RUN), "--cases", "1000", "--seconds", "8"]  # and twice as long to begin
    done = subprocess.run(words, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    cases = int(re.search(r"(\d+) cases, 0 failures", done.stdout)[1])
    assert cases >= 50, "the targets were hardly reached"
