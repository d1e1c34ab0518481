"""The page about a whole node gives the ranks and threads that the plan gives."""

import re
from pathlib import Path

import pytest
from distgpt.cluster.affinity.machine import read_machine
from distgpt.cluster.affinity.plan import recommended
from trees import TREES, sys_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "explanation" / "whole-node.md"
ROWS = {
    "archer2": "two Zen 2 of 64 cores, four regions each (ARCHER2)",
    "sapphire rapids": "two Sapphire Rapids of 56 cores, four regions each (SNC4), with AMX",
    "genoa": "two Zen 4 of 96 cores, one region each (NPS1)",
    "cascade lake": "two Cascade Lake of 24 cores, one region each",
    "grace": "Grace, 72 cores in one region",
    "a64fx": "A64FX, four regions of 12 cores",
    "alder lake": "a laptop with 6 fast cores and 8 efficient ones",
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_the_page_is_what_the_plan_recommends(name):
    (row,) = re.findall(rf"^\| {re.escape(ROWS[name])} \|(.*)\|$", PAGE.read_text(), re.M)
    shape, command, under_slurm = (cell.strip() for cell in row.split("|"))
    advice = recommended(read_machine(sys_of(name), TREES[name].affinity))
    assert shape == f"{advice.ranks} × {advice.threads}"
    started = f"mpirun -n {advice.ranks} distgpt train --stage mpi" if advice.ranks > 1 else "distgpt train"
    assert command == f"`{started}`"
    assert under_slurm in ("", f"`distgpt submit --system slurm --node {advice.ranks}x{advice.threads}`")


def test_every_row_of_the_page_is_held_against_a_node():
    table = PAGE.read_text().split("| under Slurm |")[1].split("\n\n")[0]
    assert table.count("\n| ") == len(ROWS)
