"""The doctor's lines about recorded nodes, and about this one."""

import json

import pytest
from distgpt.cluster.affinity.machine import read_machine
from distgpt.core.comm.resources import Cores
from distgpt.measure.doctor import report
from trees import TREES, sys_of


@pytest.fixture
def node_of(monkeypatch):
    """Return the facts of a recorded node."""

    def node(name, granted=0.0):
        cpus = TREES[name].affinity
        monkeypatch.setattr(report, "usable_cores", lambda: cpus)
        monkeypatch.setattr(report, "granted_cores", lambda: Cores(granted or len(cpus)))
        monkeypatch.setattr(report, "read_machine", lambda allowed: read_machine(sys_of(name), allowed))
        return json.loads(json.dumps(report.node()))

    return node


@pytest.mark.parametrize("name", TREES)
def test_a_node_is_counted_as_a_person_counts_it(name, node_of, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    node, seen = node_of(name), TREES[name].seen
    counted = node["cpus"], node["cores"], node["sockets"], node["regions"]
    assert counted == (seen.cpus, seen.cores, seen.sockets, max(1, seen.regions))
    page = "\n".join(report.rows([("node", report.summary(node)), ("best", report.advice(node))]))
    lines = page.splitlines()
    assert len(lines) <= 6 and max(map(len, lines)) <= 80


def test_the_advice_fits_the_node(node_of):
    archer2 = report.advice(node_of("archer2"))
    assert "mpirun -n 8 " in archer2 and "16 threads" in archer2
    assert "--bind-to none -n 8 …" in archer2  # what Open MPI needs
    laptop = node_of("alder lake")
    assert laptop["suits"]["threads"] == 6 and "are slow and stay idle" in report.summary(laptop)
    assert node_of("container", granted=0.5)["suits"]["threads"] == 1
    assert report.summary(node_of("cascade lake")) == "2 sockets, 2 NUMA regions, 48 cores, 96 CPUs"
