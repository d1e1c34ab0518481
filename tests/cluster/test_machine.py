"""A node is read from /sys as a person counts it; what is missing or contradicts itself there is said."""

import os
from dataclasses import replace

import pytest
from distgpt.cluster.affinity.machine import MOST_CPUS, cpu_list, read_machine
from distgpt.cluster.affinity.plan import blocks
from distgpt.core.base.formatting import in_runs
from trees import TREES, Core, Seen, Tree, sys_of


@pytest.mark.parametrize("name", TREES)
def test_every_kind_of_node_is_read_as_a_person_counts_it(name):
    tree = TREES[name]
    machine = read_machine(sys_of(name), tree.affinity)
    assert not machine.doubts and machine.allowed == tree.affinity
    assert {cpu.number for cpu in machine.cpus} == tree.online
    assert {cpu.number for cpu in machine.usable} == tree.affinity
    assert len({cpu.core for cpu in machine.cpus}) == tree.seen.cores
    assert len({cpu.socket for cpu in machine.cpus}) == tree.seen.sockets
    assert len({cpu.region for cpu in machine.cpus}) == max(1, tree.seen.regions)
    # SNC4 cuts a cache into four; where none is shown, a region's cores count as its users.
    caches = {"sapphire rapids": 8, "a64fx": 6}.get(name, tree.seen.l3)
    assert len({cpu.cache for cpu in machine.cpus}) == caches


def test_numbers_are_those_of_the_system():
    cpus = {cpu.number: cpu for cpu in read_machine(sys_of("archer2")).cpus}
    assert (cpus[200].core, cpus[200].cache, cpus[200].region, cpus[200].socket) == (72, 72, 4, 1)
    assert {cpu.region for cpu in read_machine(sys_of("power9")).cpus} == {0, 8}


def test_efficient_cores_are_slow_and_favoured_ones_are_not_the_only_fast_ones():
    slow = {name: in_runs(cpu.number for cpu in read_machine(sys_of(name)).cpus if not cpu.fast) for name in TREES}
    assert {name: cpus for name, cpus in slow.items() if cpus} == {"alder lake": "12-19", "big.LITTLE": "0-3"}


def test_cores_of_one_kind_differ_in_clock_and_are_not_slow_for_that(tmp_path):
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


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("devices/system/cpu/online", None),
        ("devices/system/cpu/online", ""),
        ("devices/system/cpu/online", "0-15,zero"),
        ("devices/system/cpu/online", "0-10"),  # as in a container that shows other files
        (CORE, "0-99999999999"),
        (CORE, "\xff\x00"),
        ("devices/system/node/node1/cpulist", "x"),
    ],
)
def test_unreadable_topology_is_doubted_and_the_affinity_remains(file, text, tmp_path):
    root = SMALL.write(tmp_path)
    (root / file).unlink()
    if text is not None:
        (root / file).write_text(text)
    machine = read_machine(root, {3, 4, 11})
    assert len(machine.doubts) == 1 and str(tmp_path) in machine.doubts[0]
    assert [cpu.number for cpu in machine.usable] == [3, 4, 11]
    assert len({cpu.core for cpu in machine.cpus}) == 3 and {cpu.cache for cpu in machine.cpus} == {3}


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (CORE, "1,10"),
        (CORE, "2,9"),
        ("devices/system/node/node1/cpulist", "0-15"),
        ("devices/system/cpu/cpu0/cache/index3/shared_cpu_list", "0-4,8-11"),
    ],
)
def test_files_that_contradict_each_other_still_give_every_rank_its_own_cores(file, text, tmp_path):
    root = SMALL.write(tmp_path)
    (root / file).write_text(text)
    cut = [block.cpus for block in blocks(read_machine(root), 3)]
    assert len(cut) == 3 and len({*sum(cut, ())}) == len(sum(cut, ()))


def test_topology_without_names_of_newer_kernels_is_read(tmp_path):
    root = SMALL.write(tmp_path)
    whole = read_machine(root).cpus
    for path in root.glob("devices/system/cpu/cpu*/topology/core_cpus*"):
        path.unlink()
    assert read_machine(root).cpus == whole and len({cpu.core for cpu in whole}) == 8


def test_lists_of_cpus_are_read_and_written_as_the_system_does():
    assert cpu_list("0-3,7\n") == {0, 1, 2, 3, 7} and cpu_list("") == frozenset()
    assert in_runs([7, 3, 2, 0, 1]) == "0-3,7" and in_runs([]) == ""
    for wrong in ("3-1", "-1", "a", f"0-{MOST_CPUS}"):
        with pytest.raises(ValueError, match=r".*"):
            cpu_list(wrong)
