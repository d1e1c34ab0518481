"""The order of a session on a GPU, on programs that only write down how they were called."""

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_session.sh"
PROGRAM = """#!/bin/sh
echo "$(basename "$0") $*" >>"$JOURNAL"
case "$*" in *"$SLOW"*) exec sleep 30 ;; esac
echo "1 passed in 0.1s"
"""
# What each part is known by, in the order of what matters most.
PARTS = [
    "doctor",
    "python -m pytest tests/gpu/test_cuda_kernels.py --tb",
    "test_float8.py",
    "test_cuda_model.py -k full_size",
    "benchmarks/gpu.py --only machine GPT-2 bfloat16 ",
    "benchmarks/gpu.py --only GPT-2 second stream GPT-2 float8 ",
    "compute-sanitizer --tool memcheck",
    "compute-sanitizer --tool racecheck",
    "compute-sanitizer --tool synccheck",
    "benchmarks/gpu.py --only profile kernels ",
    "python -m pytest tests/gpu/test_cuda_model.py --tb",
    "python -m pytest tests/gpu/test_attention.py --tb",
    "benchmarks/gpu.py --only gpt-mini float32",
]


def session(folder, *args, parts=None, slow="nothing is"):
    for name in ("python", "compute-sanitizer", "nvidia-smi"):
        program = folder / name
        program.write_text(PROGRAM)
        program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "SLOW": slow}
    environment |= {"PY": str(folder / "python"), "JOURNAL": str(folder / "journal")}
    environment |= {"PARTS": parts} if parts else {}
    command = ["bash", str(SCRIPT), str(folder / "out"), *args]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    journal = folder / "journal"
    return done, journal.read_text().splitlines() if journal.exists() else []


def test_what_matters_most_comes_first(tmp_path):
    done, journal = session(tmp_path)
    assert done.returncode == 0, done.stderr
    first = [next(i for i, call in enumerate(journal) if part in call) for part in PARTS]
    assert first == sorted(first)
    assert "kernels: 1 passed in 0.1s [exit code 0]" in done.stdout


def test_parts_are_chosen_by_name_and_unknown_ones_refused_before_anything_is_done(tmp_path):
    done, journal = session(tmp_path, parts="table")
    assert done.returncode == 0 and len(journal) == 1 and "--only profile" in journal[0]
    (tmp_path / "journal").unlink()
    done, journal = session(tmp_path, parts="kernels everything")
    assert (done.returncode, journal) == (2, []) and "everything" in done.stderr
