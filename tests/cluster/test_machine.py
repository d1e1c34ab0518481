"""Topology from /sys, and cores for ranks by regions and caches on every kind of node."""

import itertools
import json
import os
import re
import shutil
import socket
import sys
from dataclasses import replace

import pytest
from distgpt.cluster.affinity import bind
from distgpt.cluster.affinity.bind import TAKEN, VARIABLE, Placed, claim_of, doubts
from distgpt.cluster.affinity.machine import MOST_CPUS, SYS, cpu_list, read_machine
from distgpt.cluster.affinity.plan import Advice, Rank, blocks, place_of, recommended
from distgpt.core.base.formatting import in_runs
from distgpt.core.comm.affinity import Affinity
from distgpt.core.comm.api import SerialComm
from trees import TREES, Core, Seen, Tree, sys_of

from conftest import HELPERS, MPIRUN, ROOT, distgpt, inside, needs_mpi, refused, succeeded
from conftest import SMALL as WORDS


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


OWN = sorted(os.sched_getaffinity(0))[:2] if hasattr(os, "sched_getaffinity") else []
PLACED = [sys.executable, str(HELPERS / "placed.py")]
needs_two_cores = pytest.mark.skipif(
    len(OWN) != 2 or shutil.which("taskset") is None, reason="needs two CPUs to run on, and taskset"
)


def of_two_ranks(test):
    for mark in (needs_two_cores, needs_mpi, pytest.mark.ranks, pytest.mark.ci):
        test = mark(test)
    return test


@pytest.fixture
def node(tmp_path):
    cores = [Core((cpu,), region=i, l3=i) for i, cpu in enumerate(OWN)]
    return Tree(cores, Seen(cpus=2, cores=2, sockets=1, regions=2, l3=2)).write(tmp_path / "sys")


def placed(root, ranks=0, threads=0, stage="", bind="auto", launch=()):
    two = ["taskset", "-c", ",".join(map(str, OWN))]  # this machine may have more
    words = [*two, *launch, *PLACED]
    if ranks:
        words = [*two, *launch, MPIRUN, "-n", str(ranks), *PLACED]
    words += [stage or ("mpi" if ranks else "serial"), str(threads), str(root)]
    result = succeeded(program=words, cold=True, env={VARIABLE: bind}, by=distgpt)
    return sorted(map(json.loads, result.stdout.splitlines()), key=lambda told: told["rank"])


@of_two_ranks
def test_unbound_ranks_bind_to_separate_cores(node):
    first, second = placed(node, ranks=2)
    for told, cpu in zip((first, second), OWN, strict=True):
        assert told["threads"] == 1 and told["workers"] == {"0": [cpu]} and told["reading"] == OWN
        assert told["child"] == told["later"] == [cpu] and told["tasks"] == [[cpu]]  # also MPI's own threads
    assert not first["lines"] and not second["lines"]
    # A second stage of the process has the launch's CPUs.
    assert first["unbound"] == second["unbound"] == OWN and not first["again"] and not first["beside"]
    assert first["after"] == OWN[:1]


@pytest.mark.ci
@needs_two_cores
def test_threads_are_pinned_and_children_are_not(node):
    (told,) = placed(node)
    assert told["threads"] == 2 and told["workers"] == {"0": OWN, "1": [OWN[1]]}
    assert told["child"] == told["later"] == OWN and told["forked"] == {"0": OWN, "1": OWN}


@pytest.mark.ci
@needs_two_cores
def test_single_process_on_equal_cores_is_not_pinned():
    (told,) = placed(SYS)
    assert all(mask == OWN for mask in told["workers"].values()) and not told["lines"]


@of_two_ranks
def test_bound_launch_is_kept(node):
    (told,) = placed(node, launch=["taskset", "-c", str(OWN[1])])
    assert told["workers"] == {"0": OWN[1:]} and told["threads"] == 1 and told["child"] == OWN[1:]
    words = [*PLACED, "mpi", "0", str(node)]
    crossed = [MPIRUN]
    for cpu in reversed(OWN):
        crossed += ["-n", "1", "taskset", "-c", str(cpu), *words, *([":"] if cpu != OWN[0] else [])]
    result = distgpt(program=crossed, cold=True, env={VARIABLE: "auto"})
    found = sorted(map(json.loads, result.stdout.splitlines()), key=lambda told: told["rank"])
    assert [told["workers"] for told in found] == [{"0": [OWN[1]]}, {"0": [OWN[0]]}] and not found[0]["lines"]


@of_two_ranks
def test_oversubscribed_ranks_are_not_pinned(node):
    for told in placed(node, ranks=3):
        assert told["workers"] == {"0": OWN}
    for told in placed(node, ranks=2, threads=2):  # a given number stays on the rank's core
        assert told["workers"] == {"0": [OWN[told["rank"]]], "1": [OWN[told["rank"]]]}


@of_two_ranks
def test_second_job_on_cores_stays_unbound_with_note(node):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(claim_of(OWN[1]))
        first, second = placed(node, ranks=2)
        assert first["workers"] == second["workers"] == {"0": OWN}
        assert first["lines"] == [TAKEN] and not second["lines"]
        assert placed(node)[0]["workers"] == {"0": OWN, "1": OWN}


@of_two_ranks
def test_variable_disables_binding(node):
    for told in placed(node, ranks=2, bind="off"):
        assert told["workers"] == {"0": OWN} and not told["lines"]


def test_invalid_bind_variable_is_rejected(tmp_path):
    refused(inside("train", *WORDS, "--out", tmp_path / "run", env={VARIABLE: "no"}), 2, f"{VARIABLE} must be")


def ranks_of(masks, threads):
    return [Rank("host", tuple(sorted(cpus)), threads, "auto") for cpus in masks]


def places(name, masks, threads):
    here = ranks_of(masks, threads)
    return [place_of(read_machine(sys_of(name), rank.cpus), here, i) for i, rank in enumerate(here)]


EVERY = TREES["archer2"].online


def test_unbound_launch_gets_blocks():
    unbound = places("archer2", [EVERY] * 8, 16)
    assert all(place.binds and place.seats == place.block.seats for place in unbound)
    assert unbound[3].block.cpus == (*range(48, 64), *range(176, 192))
    bound = places("archer2", [range(16 * i, 16 * i + 16) for i in range(8)], 16)
    assert not any(place.binds for place in bound)
    assert [place.seats for place in bound] == [place.seats for place in unbound]
    sockets = [[*range(64 * i, 64 * i + 64)] for i in (0, 0, 0, 0, 1, 1, 1, 1)]  # -bind-to socket
    assert [place.seats for place in places("archer2", sockets, 16)] == [place.seats for place in unbound]


def test_partial_block_threads_are_not_pinned():
    for threads in (4, 17, 32):
        place = places("archer2", [EVERY] * 8, threads)[1]
        assert place.binds and place.block.seats == tuple(range(16, 32)) and not place.seats
    (alone,) = places("archer2", [EVERY], 8)
    assert not alone.binds and not alone.seats


def test_ambiguous_places_are_not_bound(tmp_path):
    assert places("archer2", [range(16), range(8, 24)], 8) == [None, None]  # masks that overlap
    assert places("archer2", [range(16), range(128, 144)], 16) == [None, None]  # CPUs of the same cores
    assert places("alder lake", [range(20)], 6)[0].seats == ()  # a laptop
    here = ranks_of([range(2)] * 2, 1)
    machine = read_machine(tmp_path, range(2))
    assert place_of(machine, here, 0) is None
    (line,) = doubts(machine, here)
    assert str(tmp_path) in line and line.endswith(": threads are not bound to cores")


@pytest.mark.parametrize(("masks", "threads", "shared"), [
    ([EVERY] * 8, 16, ""),
    ([EVERY], 128, ""),
    ([range(16), range(8, 24)], 8, "8-15"),
    ([[0], [128]], 1, "0"),  # -bind-to hwthread
    ([range(16), range(128, 144)], 16, "0-15"),
])  # fmt: skip
def test_conflicting_launch_is_described(masks, threads, shared):
    here = ranks_of(masks, threads)
    lines = doubts(read_machine(sys_of("archer2"), here[0].cpus), here)
    assert len(lines) == bool(shared)
    assert all(line.startswith(f"2 ranks of a host share cores ({shared}); bind each") for line in lines)


@pytest.mark.parametrize(
    ("share", "ranks", "granted", "threads"),
    [(256.0, 1, 256, 128), (32.0, 8, 32, 16), (32.0, 8, 8, 8), (0.5, 512, 1, 1)],
)
def test_threads_match_granted_cores_of_share(share, ranks, granted, threads, monkeypatch):
    comm = SerialComm()
    comm.cores, comm.local_size = share, ranks
    monkeypatch.setattr(Affinity, "share", lambda self, cores, ranks, grants: granted)
    monkeypatch.setattr(bind, "usable_cores", lambda: EVERY)
    for choice, expected in {"auto": threads, "off": granted}.items():
        monkeypatch.setenv(VARIABLE, choice)
        assert Placed(sys_of("archer2")).threads(comm) == expected


@pytest.fixture
def archer2(monkeypatch):
    monkeypatch.setenv(VARIABLE, "auto")
    monkeypatch.setattr(bind, "usable_cores", lambda: EVERY)
    monkeypatch.setattr(bind, "claim_of", lambda core: f"\0distgpt-test-{os.getpid()}-{core}")
    yield (found := Placed(sys_of("archer2")))
    found.forget()


def test_threads_pin_themselves_once(archer2, monkeypatch):
    assert not archer2.place(SerialComm(), 128, threads_given=False)
    calls = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda who: calls.append(who) or {7, 8})
    monkeypatch.setattr(os, "sched_setaffinity", lambda who, cpus: calls.append((who, cpus)))
    archer2.pin_thread(5, 128)
    archer2.pin_thread(1, 3)  # another pool
    assert calls == [0, (0, {5})]
    archer2.pin_thread(0, 128)  # the main thread is only moved
    assert calls[2:] == [0, (0, {0}), (0, {7, 8})]


def test_ranks_agree_if_one_cannot_bind(archer2, monkeypatch):
    monkeypatch.setattr(bind, "claim_of", lambda core: "x" * 200)
    sent = []
    monkeypatch.setattr(bind, "gather", lambda comm, text: sent.append(text) or [text])
    (line,) = archer2.place(SerialComm(), 128, threads_given=False)
    assert "cannot claim cores (AF_UNIX path too long)" in line
    often = len(sent)
    monkeypatch.delattr(os, "sched_setaffinity")
    assert not archer2.place(SerialComm(), 128, threads_given=False) and len(sent) == 2 * often > 0
