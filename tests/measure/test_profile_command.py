"""`distgpt profile` from the command line: table, file, refusals."""

import json
import sys
from pathlib import Path

import pytest
from distgpt.measure.profile import operations as rows

from conftest import SMALL, distgpt, inside, needs_mpi, refused

# The peak is measured, but not for long.
SHORT = """import distgpt.measure.profile.session as session
session.SECONDS = 0.05
from distgpt.commands.cli import main
main()"""
PROGRAM = {"program": [sys.executable, "-c", SHORT], "cold": False}


def read_profile(folder, ranks, steps):
    found = json.loads((folder / "profile.json").read_text())
    assert (found["ranks"], found["steps"], len(found["per_rank"])) == (ranks, steps, ranks)
    for profile in (found, *found["per_rank"]):
        assert profile["rows"][-1]["row"] == rows.BETWEEN
        assert profile["rows"][-1]["share"] >= -0.03  # the others claim no more than there was
        assert profile["peak_gflops"] > 0
    assert "versions" in found["environment"]
    return found


@pytest.mark.ci
def test_profile_tells_and_saves(tmp_path):
    words = [*SMALL, "--threads", "2", "--steps", "3", "--out", "found"]
    done = distgpt("profile", *words, cwd=tmp_path, **PROGRAM)
    assert done.returncode == 0, done.stderr
    found = read_profile(tmp_path / "found", ranks=1, steps=3)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")] == ["found/profile.json"]
    for row in found["rows"]:
        assert row["row"] in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert "step 5 of 5" in done.stderr and "Allreduce" not in done.stdout


@pytest.mark.ci
@pytest.mark.ranks
@needs_mpi
def test_profile_of_two_ranks(tmp_path):
    done = distgpt(*("profile", *SMALL, "--steps", "3", "--stage", "mpi", "--out", tmp_path), ranks=2, **PROGRAM)
    assert done.returncode == 0, done.stderr
    found = read_profile(tmp_path, ranks=2, steps=3)
    for profile in (found, *found["per_rank"]):
        named = {row["row"]: row for row in profile["rows"]}
        assert named[rows.WAIT]["calls"] == named[rows.TRANSFER]["calls"] == 1
    assert "Allreduce: transfer" in done.stdout


def test_a_folder_that_takes_no_files_is_refused_beforehand(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", Path("/proc")):
        result = inside("profile", *SMALL, "--out", folder)
        refused(result, 74, folder.name)
        assert "step 1" not in result.stderr
