"""Topology from /sys, and cores for ranks by regions and caches on every kind of node."""

import itertools
import os
import re
from dataclasses import replace

import pytest
from distgpt.cluster.affinity.machine import MOST_CPUS, cpu_list, read_machine
from distgpt.cluster.affinity.plan import Advice, blocks, recommended
from distgpt.core.base.formatting import in_runs
from trees import TREES, Core, Seen, Tree, sys_of

from conftest import ROOT


@pytest.mark.parametrize("name", TREES)
def test_recorded_nodes_are_counted(name):
    tree = TREES[name]
    machine = read_machine(sys_of(name), tree.affinity)
    assert not machine.doubts and machine.allowed == tree.affinity
    assert {cpu.number for cpu in machine.cpus} == tree.online
    assert {cpu.number for cpu in machine.usable} == tree.affinity
    assert len({cpu.core for cpu in machine.cpus}) == tree.seen.cores
    assert len({cpu.socket for cpu in machine.cpus}) == tree.seen.sockets
    assert len({cpu.region for cpu in machine.cpus}) == max(1, tree.seen.regions)
    # SNC4 splits a cache into four; without cache files a region counts as one.
    caches = {"sapphire rapids": 8, "a64fx": 6}.get(name, tree.seen.l3)
    assert len({cpu.cache for cpu in machine.cpus}) == caches


def test_cpu_numbers_match_the_system():
    cpus = {cpu.number: cpu for cpu in read_machine(sys_of("archer2")).cpus}
    assert (cpus[200].core, cpus[200].cache, cpus[200].region, cpus[200].socket) == (72, 72, 4, 1)
    assert {cpu.region for cpu in read_machine(sys_of("power9")).cpus} == {0, 8}


def test_only_efficient_cores_are_slow():
    slow = {name: in_runs(cpu.number for cpu in read_machine(sys_of(name)).cpus if not cpu.fast) for name in TREES}
    assert {name: cpus for name, cpus in slow.items() if cpus} == {"alder lake": "12-19", "big.LITTLE": "0-3"}


def test_small_clock_differences_are_not_slow(tmp_path):
    for folder, khz, slow in (("favoured", (4700000, 4400000), []), ("small", (5100000, 3300000), [1, 3])):
        cores = [replace(core, khz=khz[i % 2]) for i, core in enumerate(SMALL.cores[:4])]
        machine = read_machine(replace(SMALL, cores=cores).write(tmp_path / folder), range(4))
        assert not machine.doubts and [cpu.number for cpu in machine.usable if not cpu.fast] == slow


def test_this_machine_is_read():
    machine = read_machine(allowed=os.sched_getaffinity(0))
    assert machine.allowed == os.sched_getaffinity(0) and len(machine.usable) == len(machine.allowed)


# 8 cores with two CPUs each, in two NUMA regions with a third-level cache each.
SMALL = Tree(
    [Core((i, i + 8), region=i // 4, l3=i // 4) for i in range(8)], Seen(cpus=16, cores=8, sockets=1, regions=2, l3=2)
)
CORE = "devices/system/cpu/cpu1/topology/core_cpus_list"


@pytest.mark.parametrize(("file", "text"), [
    ("devices/system/cpu/online", None),
    ("devices/system/cpu/online", ""),
    ("devices/system/cpu/online", "0-15,zero"),
    ("devices/system/cpu/online", "0-10"),  # a container with other files
    (CORE, "0-99999999999"),
    (CORE, "\xff\x00"),
    ("devices/system/node/node1/cpulist", "x"),
])  # fmt: skip
def test_unreadable_topology_keeps_affinity(file, text, tmp_path):
    root = SMALL.write(tmp_path)
    (root / file).unlink()
    if text is not None:
        (root / file).write_text(text)
    machine = read_machine(root, {3, 4, 11})
    assert len(machine.doubts) == 1 and str(tmp_path) in machine.doubts[0]
    assert [cpu.number for cpu in machine.usable] == [3, 4, 11]
    assert len({cpu.core for cpu in machine.cpus}) == 3 and {cpu.cache for cpu in machine.cpus} == {3}


@pytest.mark.parametrize(("file", "text"), [
    (CORE, "1,10"),
    (CORE, "2,9"),
    ("devices/system/node/node1/cpulist", "0-15"),
    ("devices/system/cpu/cpu0/cache/index3/shared_cpu_list", "0-4,8-11"),
])  # fmt: skip
def test_contradictory_files_give_separate_cores(file, text, tmp_path):
    root = SMALL.write(tmp_path)
    (root / file).write_text(text)
    cut = [block.cpus for block in blocks(read_machine(root), 3)]
    assert len(cut) == 3 and len({*sum(cut, ())}) == len(sum(cut, ()))


def test_old_kernel_topology_is_read(tmp_path):
    root = SMALL.write(tmp_path)
    whole = read_machine(root).cpus
    for path in root.glob("devices/system/cpu/cpu*/topology/core_cpus*"):
        path.unlink()
    assert read_machine(root).cpus == whole and len({cpu.core for cpu in whole}) == 8


def test_cpu_lists_round_trip():
    assert cpu_list("0-3,7\n") == {0, 1, 2, 3, 7} and cpu_list("") == frozenset()
    assert in_runs([7, 3, 2, 0, 1]) == "0-3,7" and in_runs([]) == ""
    for wrong in ("3-1", "-1", "a", f"0-{MOST_CPUS}"):
        with pytest.raises(ValueError, match=r".*"):
            cpu_list(wrong)


def machine_of(name, allowed=None):
    return read_machine(sys_of(name), TREES[name].affinity if allowed is None else allowed)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("name", TREES)
def test_plans_share_no_core_and_stay_in_affinity(name, ranks):
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


def test_ranks_get_separate_regions():
    assert seats("archer2", 8) == runs(*(f"{16 * i}-{16 * i + 15}" for i in range(8)))
    assert seats("archer2", 2) == runs("0-63", "64-127") and seats("sapphire rapids", 8)[5] == tuple(range(70, 84))
    assert seats("cascade lake", 2) == [tuple(range(0, 48, 2)), tuple(range(1, 48, 2))]  # numbered by turns
    assert seats("a64fx", 4) == runs("12-23", "24-35", "36-47", "48-59")
    assert seats("power9", 2)[1] == tuple(range(64, 128, 4))


def test_block_has_all_cpus_of_its_cores():
    assert blocks(machine_of("archer2"), 8)[2].cpus == (*range(32, 48), *range(160, 176))
    assert blocks(machine_of("holes"), 1)[0].cpus == tuple(sorted(TREES["holes"].affinity))
    assert seats("holes", 1) == [(0, 1, 2, 3, 7)]


def test_ranks_do_not_straddle_regions_or_caches():
    assert seats("archer2", 3) == runs("0-41", "42-83", "84-125")  # more than a region each
    assert {len(each) for each in seats("offline", 2)} == {7}
    # Two of three ranks on two sockets use half a socket each.
    of_three = [{cpu // 96 for cpu in each} for each in seats("genoa", 3)]
    assert [len(each) for each in seats("genoa", 3)] == [48] * 3 and of_three == [{0}, {0}, {1}]
    assert all(len({cpu // 8 for cpu in each}) == 1 for each in seats("genoa", 24))


def test_efficient_cores_stay_idle_next_to_fast_ones():
    assert seats("alder lake", 1) == [(0, 2, 4, 6, 8, 10)] and seats("big.LITTLE", 2) == [(4, 5), (6, 7)]
    assert seats("alder lake", 1, {0, 13, 14}) == [(0,)]
    assert seats("alder lake", 2, {12, 13, 14}) == [(12,), (13,)]  # bound only to efficient cores


RECOMMENDED = {
    "archer2": (8, 16), "sapphire rapids": (8, 14), "genoa": (2, 96), "grace": (1, 72), "cascade lake": (2, 24),
    "alder lake": (1, 6), "virtual": (1, 2), "container": (1, 8), "holes": (1, 5), "offline": (2, 7),
    "big.LITTLE": (1, 4), "a64fx": (4, 12), "power9": (2, 16),
}  # fmt: skip


def test_recommended_ranks_match_regions():
    found = {name: recommended(machine_of(name)) for name in TREES}
    assert {name: (advice.ranks, advice.threads) for name, advice in found.items()} == RECOMMENDED


def test_quota_changes_recommendation():
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


def test_page_rows_match_recommendation():
    assert PAGE.count("\n| ") == len(ROWS)
    for name, described in ROWS.items():
        (row,) = re.findall(rf"^\| {re.escape(described)} \|(.*)\|$", PAGE, re.M)
        shape, command, under_slurm = (cell.strip() for cell in row.split("|"))
        ranks, threads = RECOMMENDED[name]
        assert shape == f"{ranks} × {threads}"
        assert command == (f"`mpirun -n {ranks} distgpt train --stage mpi`" if ranks > 1 else "`distgpt train`")
        assert under_slurm in ("", f"`distgpt submit --system slurm --node {ranks}x{threads}`")
