"""`distgpt profile` from the command line: table, both files, refusals."""

import json
import sys
from pathlib import Path

from conftest import SMALL, distgpt, inside, needs_mpi, refused

from distgpt.core.model.model import flag_count
from distgpt.measure.doctor import speed as peaks
from distgpt.measure.profile import operations as rows
from distgpt.measure.profile.session import TRACED

# Peaks are measured, but not for long.
SHORT = """import distgpt.measure.doctor.speed as peaks
peaks.SECONDS = 0.05
from distgpt.commands.cli import main
main()"""
PROGRAM = {"program": [sys.executable, "-c", SHORT], "cold": False}


def check_files(folder, ranks, steps, threads=1):
    """The structure of both files; gives what profile.json holds."""
    found, trace = (json.loads((folder / name).read_text()) for name in ("profile.json", "trace.json"))
    assert (found["ranks"], found["steps"], len(found["per_rank"])) == (ranks, steps, ranks)
    for profile in (found, *found["per_rank"]):
        assert profile["rows"][-1]["row"] == rows.BETWEEN
        assert profile["rows"][-1]["share"] >= -0.03  # the others claim no more than there was
        assert profile["peaks"]["gflops"] > 0 and profile["peaks"]["gbytes_per_s"] > 0
    assert "versions" in found["environment"]
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"X", "M"}
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(tracks) == {(rank, tid) for rank in range(ranks) for tid in range(1 + threads)}
    assert set(tracks.values()) == {"steps", *(f"worker {n}" for n in range(threads))}
    spans = [e for e in events if e["ph"] == "X"]
    assert {(e["pid"], e["tid"]) for e in spans} == set(tracks)
    assert all(e["ts"] >= 0 and e["dur"] >= 0 and e["cat"] for e in spans)
    whole = [e for e in spans if e["cat"] == "step"]
    assert len(whole) == ranks * min(steps, TRACED)
    for event in spans:
        assert any(
            s["pid"] == event["pid"] and s["ts"] - 0.01 <= event["ts"] <= s["ts"] + s["dur"] for s in whole
        )
    return found


def test_profile_tells_and_saves(tmp_path):
    words = [*SMALL, "--threads", "2", "--steps", "12", "--out", "found"]
    done = distgpt("profile", *words, cwd=tmp_path, **PROGRAM)
    assert done.returncode == 0, done.stderr
    found = check_files(tmp_path / "found", ranks=1, steps=12, threads=2)
    assert [path.name for path in tmp_path.iterdir()] == ["found"]  # no run, no weights
    assert sorted(path.name for path in (tmp_path / "found").iterdir()) == ["profile.json", "trace.json"]
    for row in found["rows"]:
        assert row["row"] in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert "step 14 of 14" in done.stderr and "step 14" not in done.stdout
    assert "Allreduce" not in done.stdout


@needs_mpi
def test_profile_of_two_ranks(tmp_path):
    done = distgpt(
        *("profile", *SMALL, "--steps", "3", "--stage", "mpi", "--out", tmp_path),
        ranks=2,
        **PROGRAM,
    )
    assert done.returncode == 0, done.stderr
    found = check_files(tmp_path, ranks=2, steps=3)
    for profile in (found, *found["per_rank"]):
        named = {row["row"]: row for row in profile["rows"]}
        assert named[rows.TRANSFER]["gbytes"] * 1e9 == 4 * (found["parameters"] + flag_count(2))
        assert named[rows.WAIT]["calls"] == 1
    assert "waiting for ranks" in done.stdout and "Allreduce: transfer" in done.stdout


def test_a_folder_that_takes_no_files_is_refused_beforehand(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", Path("/proc")):
        result = inside("profile", *SMALL, "--out", folder)
        refused(result, 74, folder.name)
        assert "step 1" not in result.stderr


def test_steps_of_a_configuration_do_not_count(tmp_path, monkeypatch):
    monkeypatch.setattr(peaks, "SECONDS", 0.01)
    config = tmp_path / "my.toml"
    config.write_text("steps = 5")
    done = inside("profile", *SMALL, "--steps", "3", "--config", config, "--out", tmp_path)
    assert "--steps sets how many are measured" in done.stderr
    assert json.loads((tmp_path / "profile.json").read_text())["steps"] == 3
