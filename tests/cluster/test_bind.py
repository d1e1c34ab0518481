"""Ranks bind themselves and their threads if the launch did not: processes on two real cores."""

import json
import os
import shutil
import socket
import sys

import pytest
from distgpt.cluster.affinity import bind
from distgpt.cluster.affinity.bind import TAKEN, VARIABLE, Placed, claim_of, doubts
from distgpt.cluster.affinity.machine import SYS, read_machine
from distgpt.cluster.affinity.plan import Rank, place_of
from distgpt.core.comm.affinity import Affinity
from distgpt.core.comm.api import SerialComm
from trees import TREES, Core, Seen, Tree, sys_of

from conftest import HELPERS, MPIRUN, SMALL, distgpt, inside, needs_mpi, refused, succeeded

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
    refused(inside("train", *SMALL, "--out", tmp_path / "run", env={VARIABLE: "no"}), 2, f"{VARIABLE} must be")


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
