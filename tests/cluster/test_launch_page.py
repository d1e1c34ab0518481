"""The launch commands of the page about several ranks, as MPICH's own launcher understands them."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from conftest import MPIRUN, needs_mpi

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "ranks.md"
NODE = "pack:2 numa:4 core:16 pu:2"  # in hwloc's words: eight regions of 16 cores, each of two CPUs
BOUND = re.compile(r"^process (\d+) binding: ([01]+)$", re.MULTILINE)


@pytest.mark.ci
@pytest.mark.ranks
@needs_mpi
@pytest.mark.parametrize("ranks", [8, 16])
def test_the_page_s_command_gives_each_rank_cores_of_one_region(ranks):
    (words,) = re.findall(rf"`(mpirun -n {ranks} -bind-to [^`]+)`", PAGE.read_text())
    program = [MPIRUN, *shlex.split(words)[1:], "true"]
    if "HYDRA" not in subprocess.run([MPIRUN, "--version"], capture_output=True, text=True).stdout:
        pytest.skip("this mpirun is not MPICH's")
    node = {"HWLOC_SYNTHETIC": NODE, "HWLOC_THISSYSTEM": "0", "HYDRA_TOPO_DEBUG": "1"}
    done = subprocess.run(program, env={**os.environ, **node}, capture_output=True, text=True, timeout=60)
    masks = {int(rank): mask for rank, mask in BOUND.findall(done.stdout)}
    assert set(masks) == set(range(ranks)), done
    each = 256 // ranks
    for rank, mask in masks.items():
        mine = {cpu for cpu, bit in enumerate(mask) if bit == "1"}
        assert mine == set(range(each * rank, each * (rank + 1)))
