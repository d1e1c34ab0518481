"""A rank that fails while its stage is opened ends the job; what only some ranks lack is told once."""

import shutil
import sys
from pathlib import Path

import pytest
from conftest import distgpt, needs_mpi, refused

pytestmark = needs_mpi

DRIVER = """
import os, sys
sys.path.insert(0, {folder!r})
import wholegpu
from distgpt.gpu import accelerator
from distgpt.errors import UsageError
from distgpt.gpu import probe

wholegpu.install("", 1)
how, rank = os.environ["BREAK"].split()

def fails(*args, **more):
    if os.environ["PMI_RANK"] == rank:
        raise UsageError("planted") if how == "missing" else RuntimeError("planted")
    return old(*args, **more)

if how == "missing":
    old, probe.require_gpu = probe.require_gpu, fails
else:
    old, accelerator.open_device = accelerator.open_device, fails
from distgpt.cli import main
main()
"""


@pytest.fixture
def broken(tmp_path):
    if shutil.which("g++") is None:
        pytest.skip("needs g++ for the stand-in of a GPU")
    driver = tmp_path / "driver.py"

    def run(how, rank):
        driver.write_text(DRIVER.format(folder=str(Path(__file__).parent)))
        args = ("train", "--stage", "mpi-cuda", "--out", tmp_path / "run")
        env = {"BREAK": f"{how} {rank}"}
        return distgpt(*args, ranks=2, program=[sys.executable, str(driver)], env=env, timeout=60)

    return run


@pytest.mark.parametrize("rank", [0, 1])
def test_a_gpu_that_one_rank_lacks_is_told_once_with_the_rank(broken, rank):
    refused(broken("missing", rank), 2, f"rank {rank}: planted")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_in_opening_its_gpu_ends_the_job(broken, rank):
    result = broken("opening", rank)
    assert result.returncode == 70
    assert f"rank {rank}: internal error" in result.stderr and "planted" in result.stderr
