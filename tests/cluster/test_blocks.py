"""Cores are cut among ranks by regions and caches, and threads have one each, on every kind of node."""

import itertools
import re

import pytest
from distgpt.cluster.affinity.machine import cpu_list, read_machine
from distgpt.cluster.affinity.plan import Advice, blocks, recommended
from trees import TREES, sys_of

from conftest import ROOT


def machine_of(name, allowed=None):
    return read_machine(sys_of(name), TREES[name].affinity if allowed is None else allowed)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("name", TREES)
def test_no_plan_shares_a_core_or_takes_one_that_was_not_given(name, ranks):
    machine, cut = machine_of(name), blocks(machine_of(name), ranks)
    assert len(cut) in (0, ranks) and bool(cut) == (len(machine.cores) >= ranks)
    assert len({len(block.seats) for block in cut}) <= 1  # equal parts of a step
    taken = list(itertools.chain(*(block.cpus for block in cut)))
    core_of = {cpu.number: cpu.core for cpu in machine.cpus}
    assert len({*taken}) == len(taken) and {*taken} <= machine.allowed
    for block in cut:
        assert {*block.seats} <= {*block.cpus} and len({core_of[cpu] for cpu in block.seats}) == len(block.seats)
        assert {core_of[cpu] for cpu in block.seats} == {core_of[cpu] for cpu in block.cpus}
    users = [core_of[cpu] for block in cut for cpu in block.seats]
    assert len({*users}) == len(users)


def seats(name, ranks, allowed=None):
    return [block.seats for block in blocks(machine_of(name, allowed), ranks)]


def runs(*texts):
    return [tuple(sorted(cpu_list(text))) for text in texts]


def test_ranks_get_regions_of_their_own():
    assert seats("archer2", 8) == runs(*(f"{16 * i}-{16 * i + 15}" for i in range(8)))
    assert seats("archer2", 2) == runs("0-63", "64-127")
    assert seats("sapphire rapids", 8)[5] == tuple(range(70, 84))
    assert seats("cascade lake", 2) == [tuple(range(0, 48, 2)), tuple(range(1, 48, 2))]  # numbered by turns
    assert seats("a64fx", 4) == runs("12-23", "24-35", "36-47", "48-59")
    assert seats("power9", 2)[1] == tuple(range(64, 128, 4))


def test_a_block_has_all_cpus_of_its_cores_and_a_seat_on_each_core():
    assert blocks(machine_of("archer2"), 8)[2].cpus == (*range(32, 48), *range(160, 176))
    assert blocks(machine_of("holes"), 1)[0].cpus == tuple(sorted(TREES["holes"].affinity))
    assert seats("holes", 1) == [(0, 1, 2, 3, 7)]


def test_some_cores_stay_idle_rather_than_that_a_rank_lies_in_two_regions():
    assert seats("archer2", 3) == runs("0-41", "42-83", "84-125")  # more than a region each
    assert {len(each) for each in seats("offline", 2)} == {7}
    # Three ranks of two sockets: a third of the cores, in both sockets, is more than half a socket.
    of_three = [{cpu // 96 for cpu in each} for each in seats("genoa", 3)]
    assert [len(each) for each in seats("genoa", 3)] == [48] * 3 and of_three == [{0}, {0}, {1}]


def test_ranks_keep_to_caches_within_a_region():
    for each in seats("genoa", 24):
        assert len({cpu // 8 for cpu in each}) == 1


def test_efficient_cores_are_left_out_where_there_are_fast_ones():
    assert seats("alder lake", 1) == [(0, 2, 4, 6, 8, 10)] and seats("big.LITTLE", 2) == [(4, 5), (6, 7)]
    assert seats("alder lake", 1, {0, 13, 14}) == [(0,)]
    assert seats("alder lake", 2, {12, 13, 14}) == [(12,), (13,)]  # bound to them alone


RECOMMENDED = {
    "archer2": (8, 16),
    "sapphire rapids": (8, 14),
    "genoa": (2, 96),
    "grace": (1, 72),
    "cascade lake": (2, 24),
    "alder lake": (1, 6),
    "virtual": (1, 2),
    "container": (1, 8),
    "holes": (1, 5),
    "offline": (2, 7),
    "big.LITTLE": (1, 4),
    "a64fx": (4, 12),
    "power9": (2, 16),
}


def test_a_node_is_recommended_a_rank_for_each_region():
    found = {name: recommended(machine_of(name)) for name in TREES}
    assert {name: (advice.ranks, advice.threads) for name, advice in found.items()} == RECOMMENDED


def test_a_quota_changes_that():
    archer2 = machine_of("archer2")
    assert recommended(archer2, granted=8.0) == Advice(1, 8, "8 of 128 cores are granted")
    assert recommended(archer2, granted=0.5).threads == 1


PAGE = (ROOT / "docs" / "explanation" / "whole-node.md").read_text().split("| under Slurm |")[1].split("\n\n")[0]
ROWS = {
    "archer2": "two Zen 2 of 64 cores, four regions each (ARCHER2)",
    "sapphire rapids": "two Sapphire Rapids of 56 cores, four regions each (SNC4), with AMX",
    "genoa": "two Zen 4 of 96 cores, one region each (NPS1)",
    "cascade lake": "two Cascade Lake of 24 cores, one region each",
    "grace": "Grace, 72 cores in one region",
    "a64fx": "A64FX, four regions of 12 cores",
    "alder lake": "a laptop with 6 fast cores and 8 efficient ones",
}


def test_rows_of_the_page_are_what_the_plan_recommends():
    assert PAGE.count("\n| ") == len(ROWS)
    for name, described in ROWS.items():
        (row,) = re.findall(rf"^\| {re.escape(described)} \|(.*)\|$", PAGE, re.M)
        shape, command, under_slurm = (cell.strip() for cell in row.split("|"))
        ranks, threads = RECOMMENDED[name]
        assert shape == f"{ranks} × {threads}"
        assert command == (f"`mpirun -n {ranks} distgpt train --stage mpi`" if ranks > 1 else "`distgpt train`")
        assert under_slurm in ("", f"`distgpt submit --system slurm --node {ranks}x{threads}`")
