"""The doctor's lines about recorded nodes, and about this one."""

import json
import os

import pytest
from conftest import distgpt, needs_mpi
from trees import TREES, listed, sys_of

from distgpt.cluster.affinity.machine import cpu_list, read_machine
from distgpt.measure.doctor import report


@pytest.fixture
def facts_of(monkeypatch):
    """Return what a rank on a recorded node would tell of it."""

    def facts(name, host="n1", granted=0.0):
        cpus = TREES[name].affinity
        monkeypatch.setattr(report, "usable_cores", lambda: cpus)
        monkeypatch.setattr(report, "read_machine", lambda allowed: read_machine(sys_of(name), allowed))
        grant = {"number": granted or len(cpus), "limit": ""}
        return {"host": host, "cpus": listed(cpus), "granted_cores": grant, "node": report.cpus_of_host()}

    return facts


@pytest.mark.parametrize("name", TREES)
def test_a_node_is_counted_as_a_person_counts_it(name, facts_of, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    (node,), seen = report.nodes([json.loads(json.dumps(facts_of(name)))]), TREES[name].seen
    counted = node["cpus"], node["cores"], node["sockets"], node["regions"]
    assert counted == (seen.cpus, seen.cores, seen.sockets, max(1, seen.regions))
    page = "\n".join(report.rows([("node", report.summary(node)), ("best", report.advice(node))]))
    lines = page.splitlines()
    assert len(lines) <= 6 and max(map(len, lines)) <= 80


def test_the_advice_fits_the_node(facts_of):
    (archer2,) = report.nodes([facts_of("archer2")])
    assert "mpirun -n 8 " in report.advice(archer2) and "16 threads" in report.advice(archer2)
    assert "--bind-to none -n 8 …" in report.advice(archer2)  # what Open MPI needs
    (laptop,) = report.nodes([facts_of("alder lake")])
    assert laptop["suits"]["threads"] == 6 and "are slow and stay idle" in report.summary(laptop)
    assert report.nodes([facts_of("container", granted=0.5)])[0]["suits"]["threads"] == 1
    (node,) = report.nodes([facts_of("cascade lake")])
    assert report.summary(node) == "2 sockets, 2 NUMA regions, 48 cores, 96 CPUs"


def test_equal_nodes_are_described_once(facts_of):
    ranks = [facts_of("archer2", "n1"), facts_of("archer2", "n2"), facts_of("grace", "n3")]
    assert [node["hosts"] for node in report.nodes(ranks)] == [["n1", "n2"], ["n3"]]
    assert report.nodes([{**ranks[0], "node": None}]) == []  # no Linux


def test_a_node_that_contradicts_itself_is_not_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "read_machine", lambda allowed: read_machine(tmp_path, allowed))
    monkeypatch.setattr(report, "usable_cores", lambda: {0, 1})
    facts = {"host": "n1", "cpus": "0-1", "granted_cores": {"number": 2.0, "limit": ""}}
    (node,) = report.nodes([facts | {"node": report.cpus_of_host()}])
    assert str(tmp_path) in report.summary(node) and "region" not in report.summary(node)
    assert "2 threads" in report.advice(node)


@needs_mpi
def test_the_doctor_describes_this_node_once_for_its_ranks():
    result = distgpt("doctor", "--json", ranks=2)
    assert result.returncode == 0, result.stderr
    (node,) = json.loads(result.stdout)["nodes"]
    assert cpu_list(node["usable"]) == os.sched_getaffinity(0)
