"""How tests start distgpt: always as a real process, and under a real mpirun where ranks are asked for."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
SCRIPT = [sys.executable, "-c", "from distgpt.cli import main; main()"]
MPIRUN = shutil.which("mpirun", path=str(BIN)) or shutil.which("mpirun")
needs_mpi = pytest.mark.skipif(
    MPIRUN is None or importlib.util.find_spec("mpi4py") is None, reason="needs mpi4py and mpirun"
)

# A model that trains in about a millisecond a step, with everything that matters in it.
_MODEL = "--n-layer 2 --n-head 2 --n-embd 16 --seq-len 16 --data story --tokenizer word --threads 1"
_MODEL += " --norm layernorm --mlp gelu --positions learned --bias"
SMALL = f"{_MODEL} --batch-size 8 --lr 1e-2 --warmup 2".split()


def command(*args, ranks=0, program=SCRIPT):
    launcher = [MPIRUN, "-n", str(ranks)] if ranks else []
    return [*launcher, *program, *map(os.fsdecode, args)]


def clean_environment(**more):
    """Without what a surrounding launcher or an earlier test may have left."""
    unwanted = ("PMI", "PMIX", "OMPI_", "SLURM_", "MPI_", "PYTHONUNBUFFERED")
    own = {key: value for key, value in os.environ.items() if not key.startswith(unwanted)}
    return {**own, "COLUMNS": "100", **more}


def distgpt(*args, ranks=0, cwd=None, env=None, program=SCRIPT, timeout=100):
    """Run a command to its end. Under mpirun with `ranks`; output is text."""
    return subprocess.run(
        command(*args, ranks=ranks, program=program),
        cwd=cwd,
        env=clean_environment(**(env or {})),
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=timeout,
    )


def train(out, *args, ranks=0, **how):
    """A training run of the small model that must succeed; gives its directory."""
    stage = ["--stage", "mpi"] if ranks else []
    result = distgpt("train", *SMALL, "--out", out, *stage, *args, ranks=ranks, **how)
    assert result.returncode == 0, result.stderr
    return Path(out)


def metrics(directory):
    """What the run logged of its training steps, by step."""
    lines = map(json.loads, (Path(directory) / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line for line in lines if "loss" in line}


def losses(directory):
    return [line["loss"] for line in metrics(directory).values()]


def refused(result, code, *words):
    """A failure that was expected: this exit code, these words, one line, no traceback."""
    assert result.returncode == code, (result.returncode, result.stdout, result.stderr)
    said = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(said) == 1 and said[0].startswith("distgpt: "), result.stderr
    for word in words:
        assert str(word) in said[0], (word, said[0])
    assert "step 1" not in result.stdout


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A run of a few steps: its directory."""
    return train(tmp_path_factory.mktemp("trained") / "run", "--steps", "30", "--save-every", "10")
