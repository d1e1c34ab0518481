"""What a run leaves about its speed and memory, and what results say of the machine."""

import errno
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from disks import raising
from distgpt.measure.doctor import facts
from distgpt.measure.doctor.facts import anonymised, environment

from conftest import SMALL, inside, metrics


def test_a_run_reports_what_it_took(tmp_path):
    words = ["train", *SMALL, "--out", tmp_path / "run", "--steps"]
    assert inside(*words, "12", "--save-every", "12").returncode == 0
    found = json.loads((tmp_path / "run" / "summary.json").read_text())
    lines = list(metrics(tmp_path / "run").values())
    assert (found["ranks"], found["threads"], found["steps"], found["stage"]) == (1, 1, 12, "serial")
    assert found["allreduce"] is None and found["peak_gpu_memory"] is None
    assert found["train_s"] == pytest.approx(sum(line["step_s"] for line in lines))
    assert found["tokens"] == lines[-1]["tokens"]
    seconds = sorted(line["step_s"] for line in lines[2:])
    assert found["step_s_median"] == pytest.approx((seconds[4] + seconds[5]) / 2)
    assert found["tokens_per_s"] == pytest.approx(8 * 16 / found["step_s_median"])
    assert len(found["peak_memory"]) == 1 and min(found["peak_memory"]) > 20 << 20
    assert inside(*words, "14", "--resume", "auto").returncode == 0  # reports its own steps
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2


@pytest.mark.ci
def test_peak_memory_is_that_of_the_peak():
    """In a process of its own, which begins small."""
    hungry = """if True:
        from distgpt.core.comm.resources import peak_memory
        before = peak_memory()
        block = b"x" * 200_000_000
        del block
        print(before, peak_memory())
    """
    result = subprocess.run([sys.executable, "-c", hungry], capture_output=True, text=True, check=True)
    before, most = map(int, result.stdout.split())
    assert 200e6 < most < before + 210e6


def test_results_say_where_they_are_from_and_no_more(monkeypatch):
    words = ["train", "--data", "/home/me/my.txt", "--launcher", "/home/me/bin/mpirun --host n1,n2"]
    monkeypatch.setattr("sys.argv", ["/somewhere/bin/distgpt", *words])
    found = environment()
    assert found["command"] == "distgpt train --data my.txt --launcher 'mpirun --host …'"
    assert found["cores"] == len(os.sched_getaffinity(0))
    assert {"distgpt", "python", "numpy", "numba"} <= found["versions"].keys()
    text = json.dumps(found)
    for private in (platform.node(), str(Path.home()), "/home/me"):
        assert len(private) < 3 or private not in text


def test_an_installed_package_names_no_commit(monkeypatch):
    """One that lies outside a checkout, as from a wheel, cannot know it."""
    monkeypatch.setattr(facts, "_git", raising(OSError(errno.ENOENT, "no git")))
    found = environment()
    assert "commit" not in found and found["versions"]["distgpt"] and None not in found.values()


SHOWN = {
    "a/b.txt": "a/b.txt",
    "--out=/x/y": "--out=y",
    "/home/alice/mpich/bin/mpirun --map-by=core": "mpirun --map-by=core",
    "srun -w n[1-3] -H n4 --nodelist=n5 --hostfile hosts": "srun -w … -H … --nodelist=… --hostfile hosts",
    "../../home/alice/t.txt": "t.txt",
    "~/x": "x",
    "cannot read '/data/a/b': gone; 3 tokens/s": "cannot read 'b': gone; 3 tokens/s",
    "process 1 on node n7 exited": "process 1 on node … exited",
    "https://a.org/b/c": "https://a.org/b/c",
    "mine: gone, not mined": "…: gone, not mined",
}


def test_texts_are_shown_without_paths_and_hosts(monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: "mine.cluster.org")
    assert {text: anonymised(text) for text in SHOWN} == SHOWN
