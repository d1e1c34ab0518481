"""The doctor's lines about recorded nodes, and about this one."""

import json
import os

import pytest
from conftest import distgpt, needs_mpi
from trees import TREES, listed, sys_of

from distgpt.cluster.affinity.machine import cpu_list, read_machine
from distgpt.measure.doctor import node as described
from distgpt.measure.doctor import report, verdicts


@pytest.fixture
def facts_of(monkeypatch):
    """Return what a rank on a recorded node would tell of it."""

    def facts(name, mask=None, host="n1", granted=0.0, first=True, bind="auto"):
        tree = TREES[name]
        cpus = tree.affinity if mask is None else cpu_list(mask)
        monkeypatch.setattr(described, "usable_cores", lambda: cpus)
        monkeypatch.setattr(described, "read_machine", lambda allowed: read_machine(sys_of(name), allowed))
        grant = {"number": granted or len(cpus), "limit": ""}
        node = described.of_host() if first else None
        return {"host": host, "cpus": listed(cpus), "granted_cores": grant, "node": node, "bind": bind}

    return facts


def alone(facts):
    (node,) = described.nodes([facts], launched=False)
    return node


def launched(*facts):
    (node,) = described.nodes([*facts], launched=True)
    return node


@pytest.mark.parametrize("name", TREES)
def test_a_node_is_counted_as_a_person_counts_it(name, facts_of, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    node, seen = alone(json.loads(json.dumps(facts_of(name)))), TREES[name].seen
    counted = node["cpus"], node["cores"], node["sockets"], node["regions"]
    assert counted == (seen.cpus, seen.cores, seen.sockets, max(1, seen.regions))
    report.print_page([report.pairs([("node", described.summary(node)), ("best", described.advice(node))])])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 6 and max(map(len, lines)) <= 80


def test_what_suits_a_node_is_proposed(facts_of):
    archer2 = described.advice(alone(facts_of("archer2")))
    assert "mpirun -n 8 " in archer2 and "16 threads" in archer2
    assert "--bind-to none -n 8 …" in archer2  # what Open MPI needs
    laptop = alone(facts_of("alder lake"))
    assert laptop["suits"]["threads"] == 6 and "are slow and left idle" in described.summary(laptop)
    assert alone(facts_of("container", granted=0.5))["suits"]["threads"] == 1
    assert (
        described.summary(alone(facts_of("cascade lake"))) == "2 sockets, 2 NUMA regions, 48 cores, 96 CPUs"
    )


def test_what_a_run_would_note_of_its_ranks_is_shown(facts_of):
    regions = [f"{16 * i}-{16 * i + 15}" for i in range(8)]
    bound = launched(*(facts_of("archer2", mask, first=mask == "0-15") for mask in regions))
    (note,) = bound["notes"]
    assert "was bound to 16 cores in one NUMA region, a thread on each" in note
    free = launched(*(facts_of("archer2", granted=16, first=i == 0) for i in range(8)))
    assert "binds itself to 16 cores" in free["notes"][0]
    few = [facts_of("holes", mask, granted=1, first=i == 0) for i, mask in enumerate(("0-3", "0-3,7"))]
    assert "2 ranks of a host share cores" in launched(*few)["notes"][0]
    off = launched(*(facts_of("archer2", first=i == 0, bind="off") for i in range(8)))
    assert off["notes"] == []  # each may run on every core
    crowd = launched(*(facts_of("virtual", first=i == 0) for i in range(3)))
    assert crowd["notes"] == []  # no rank has a core of its own


def test_a_cpu_of_each_core_is_the_whole_node(facts_of):
    """As srun --hint=nomultithread binds ranks: half of the CPUs are second ones of cores that are used."""

    def warned(masks):
        ranks = [
            {**facts_of("archer2", mask, first=i == 0), "rank": i, "core_share": len(cpu_list(mask))}
            | {"cores_of_host": 256}
            for i, mask in enumerate(masks)
        ]
        return list(verdicts._cores({"launcher": "srun"}, ranks))

    assert warned([f"{16 * i}-{16 * i + 15}" for i in range(8)]) == []
    (warning,) = warned(["0,128", "1,129"])
    assert "2 of 128 cores" in warning


def test_equal_nodes_are_described_once(facts_of):
    ranks = [facts_of("archer2", host="n1"), facts_of("archer2", host="n2"), facts_of("grace", host="n3")]
    two = described.nodes(ranks, launched=True)
    assert [node["hosts"] for node in two] == [["n1", "n2"], ["n3"]]
    assert described.nodes([{**ranks[0], "node": None}], launched=True) == []  # no Linux


def test_a_node_that_contradicts_itself_is_not_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(described, "read_machine", lambda allowed: read_machine(tmp_path, allowed))
    facts = {"host": "n1", "granted_cores": {"number": 2.0, "limit": ""}, "bind": "auto"}
    monkeypatch.setattr(described, "usable_cores", lambda: {0, 1})
    node = alone({**facts, "cpus": "0-1", "node": described.of_host()})
    assert str(tmp_path) in described.summary(node) and "region" not in described.summary(node)
    assert "2 threads" in described.advice(node)
    first, second = ({**facts, "cpus": cpu, "node": None} for cpu in "01")
    monkeypatch.setattr(described, "usable_cores", lambda: {0})
    assert launched({**first, "node": described.of_host()}, second)["doubts"]  # whose CPU is not known


@needs_mpi
def test_the_doctor_describes_this_node_once_for_its_ranks():
    result = distgpt("doctor", "--json", ranks=2)
    assert result.returncode == 0, result.stderr
    (node,) = json.loads(result.stdout)["nodes"]
    assert cpu_list(node["usable"]) == os.sched_getaffinity(0)
