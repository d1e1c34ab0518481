"""The core trains and generates while nothing else can be imported, as the whole program does."""

import sys
from pathlib import Path

import distgpt as package
import pytest

from conftest import distgpt, losses, needs_mpi
from core.alone import SIZE

ALONE = [sys.executable, str(Path(__file__).with_name("alone.py"))]


def bytes_of(run):
    return (run / "weights.safetensors").read_bytes()


@pytest.mark.ci
@pytest.mark.ranks
@needs_mpi
@pytest.mark.timeout(900)  # where no loop is compiled yet
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_core_alone_trains_resumes_and_generates(ranks, tmp_path):
    alone, whole = tmp_path / "alone", tmp_path / "whole"
    stage = "serial" if ranks == 1 else "mpi"
    for steps in (3, 6):
        result = distgpt(stage, alone, str(steps), program=ALONE, ranks=ranks, timeout=600)
        assert result.returncode == 0, result.stderr
    settings = [f"--{name.replace('_', '-')}={value}" for name, value in SIZE.items() if name != "matmul"]
    (tmp_path / "own.toml").write_text('matmul = "own"')
    words = [*settings, "--config", tmp_path / "own.toml", "--threads=1", f"--stage={stage}"]
    for more in (["--steps=3"], ["--steps=6", "--resume=auto"]):
        result_of_whole = distgpt("train", *words, *more, "--out", whole, ranks=ranks)
        assert result_of_whole.returncode == 0, result_of_whole.stderr
    assert losses(alone) == losses(whole) and len(losses(alone)) == 6
    assert bytes_of(alone) == bytes_of(whole)
    if ranks == 1:
        text = package.load(whole / "weights.safetensors").generate("The", max_new_tokens=8, temperature=0)
        assert result.stdout.rstrip("\n").endswith(text.rstrip("\n"))
