"""The doctor's drawings of recorded nodes, and of this one."""

import json
import os

import pytest
from conftest import distgpt, needs_mpi
from trees import TREES, listed, sys_of

from distgpt.doctor import node as drawn
from distgpt.doctor import report, verdicts
from distgpt.layout.machine import Machine, cpu_list, read_machine


@pytest.fixture
def facts_of(monkeypatch):
    """Return what a rank on a recorded node would tell of it."""

    def facts(name, mask=None, host="n1", granted=0.0, first=True, bind="auto"):
        tree = TREES[name]
        cpus = tree.affinity if mask is None else cpu_list(mask)
        monkeypatch.setattr(drawn, "usable_cores", lambda: cpus)
        monkeypatch.setattr(drawn, "read_machine", lambda allowed: read_machine(sys_of(name), allowed))
        grant = {"number": granted or len(cpus), "limit": ""}
        node = drawn.of_host() if first else None
        return {"host": host, "cpus": listed(cpus), "granted_cores": grant, "node": node, "bind": bind}

    return facts


def alone(facts):
    (node,) = drawn.nodes([facts], launched=False)
    return node


def launched(*facts):
    (node,) = drawn.nodes([*facts], launched=True)
    return node


def ranks_in(node):
    return [row[-1] for row in drawn.rows(node)]


@pytest.mark.parametrize("name", TREES)
def test_a_drawing_has_twenty_lines_of_eighty_columns(name, facts_of, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    node = alone(facts_of(name))
    report.print_page([report.indented(report._node(node, named=False))])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 20 and max(map(len, lines)) <= 80
    cores = "".join(ranks_in(node)).replace(" ", "")
    assert len(cores) == TREES[name].seen.cores


@pytest.mark.parametrize("name", TREES)
def test_what_is_sent_between_ranks_describes_the_whole_node(name, facts_of):
    facts = json.loads(json.dumps(facts_of(name)))
    sent = drawn._machine(facts["node"], TREES[name].affinity)
    there = read_machine(sys_of(name), TREES[name].affinity)
    assert sent == Machine(there.cpus, there.allowed, there.doubts)


def test_a_process_that_nothing_launched_sees_what_suits_its_node(facts_of):
    regions = [("0" if i < 4 else "1", str(i), f"{16 * i}-{16 * i + 15}") for i in range(8)]
    expected = [(*place, " ".join([str(i) * 4] * 4)) for i, place in enumerate(regions)]
    archer2 = alone(facts_of("archer2"))
    assert list(drawn.rows(archer2)) == expected
    assert "--bind-to none -n 8 …" in drawn.advice(archer2)  # what Open MPI needs
    assert "mpirun -n 8 " in drawn.advice(archer2) and "16 threads" in drawn.advice(archer2)
    dell = list(drawn.rows(alone(facts_of("cascade lake"))))
    assert dell == [("0", "0", "0-46:2", "0" * 24), ("1", "1", "1-47:2", "1" * 24)]
    assert ranks_in(alone(facts_of("alder lake"))) == [
        "000000~~~~~~~~"
    ]  # one thread a core, none on slow ones
    assert ranks_in(alone(facts_of("holes"))) == ["0000...0"]
    assert ranks_in(alone(facts_of("offline"))) == ["0000000", "1111111-"]  # equal parts
    assert ranks_in(alone(facts_of("container", granted=0.5))) == ["0-------"]
    genoa = list(drawn.rows(alone(facts_of("genoa"))))
    assert [row[0] for row in genoa] == ["0", "", "", "1", "", ""]
    assert genoa[1][-1] == " ".join(["0" * 8] * 4)


def test_ranks_are_drawn_where_their_launch_puts_them(facts_of):
    """In blocks where they share a mask, in their own masks otherwise; those that share a core are marked."""
    free = [facts_of("big.LITTLE", first=i == 0) for i in range(2)]
    assert ranks_in(launched(*free)) == ["~~~~0011"]
    masks = ("0,2,4,48,50,52", "1,3")
    bound = [facts_of("cascade lake", mask, first=i == 0) for i, mask in enumerate(masks)]
    assert ranks_in(launched(*bound)) == ["000" + "." * 21, "11" + "." * 22]
    few = [facts_of("holes", mask, granted=1, first=i == 0) for i, mask in enumerate(("0-3", "0-3,7"))]
    assert ranks_in(launched(*few)) == ["!!!!...1"]
    assert "2 ranks" in launched(*few)["notes"][0]
    crowd = [facts_of("virtual", first=i == 0) for i in range(3)]
    assert ranks_in(launched(*crowd)) == ["!", "!"]  # no rank has a core of its own
    regions = [f"{16 * i}-{16 * i + 15}" for i in range(8)]
    bound = launched(*(facts_of("archer2", mask, first=mask == "0-15") for mask in regions))
    assert ranks_in(bound) == ranks_in(alone(facts_of("archer2")))
    (note,) = bound["notes"]
    assert "16 cores in one NUMA region" in note
    few = launched(*(facts_of("archer2", mask, granted=4, first=mask == "0-15") for mask in regions))
    assert ranks_in(few)[0] == "0000 ---- ---- ----"  # as many threads as are granted


def test_ranks_that_nothing_binds_are_not_drawn_as_if_they_sat(facts_of):
    off = launched(*(facts_of("archer2", first=i == 0, bind="off") for i in range(8)))
    assert set("".join(ranks_in(off))) == {"!", " "}  # each may run on every core
    few = launched(*(facts_of("archer2", granted=4, first=i == 0) for i in range(8)))
    for node in (off, few, alone(facts_of("alder lake")), launched(facts_of("alder lake"))):
        assert "the rank that it would suit" in drawn.legend(node)
    bound = launched(*(facts_of("archer2", granted=16, first=i == 0) for i in range(8)))
    assert "whose thread runs there" in drawn.legend(bound)


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


def test_nodes_that_are_alike_are_drawn_once(facts_of):
    ranks = [facts_of("archer2", host="n1"), facts_of("archer2", host="n2"), facts_of("grace", host="n3")]
    two = drawn.nodes(ranks, launched=True)
    assert [node["hosts"] for node in two] == [["n1", "n2"], ["n3"]]
    assert drawn.nodes([{**ranks[0], "node": None}], launched=True) == []  # no Linux


def test_a_node_of_many_regions_is_cut_short(facts_of):
    node = alone(facts_of("archer2"))
    many = {**node, "regions": [region for region in node["regions"] for _ in range(3)]}
    assert len(list(drawn.rows(many))) == 16 and "8 more" in drawn.legend(many)


def test_a_node_that_contradicts_itself_is_not_drawn(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(drawn, "read_machine", lambda allowed: read_machine(tmp_path, allowed))
    told = {"host": "n1", "granted_cores": {"number": 2.0, "limit": ""}, "bind": "auto"}
    monkeypatch.setattr(drawn, "usable_cores", lambda: {0, 1})
    node = alone({**told, "cpus": "0-1", "node": drawn.of_host()})
    report.print_page([report._node(node, named=False)])
    page = capsys.readouterr().out
    assert str(tmp_path) in page and "region" not in page.replace("NUMA region", "")
    assert "2 threads" in page
    first, second = ({**told, "cpus": cpu, "node": None} for cpu in "01")
    monkeypatch.setattr(drawn, "usable_cores", lambda: {0})
    bound = launched({**first, "node": drawn.of_host()}, second)  # whose CPU is not known
    assert bound["doubts"] and bound["seats"] == ["0", ""]


@needs_mpi
def test_the_doctor_draws_this_node_once_for_its_ranks():
    usable = os.sched_getaffinity(0)
    for bind in ("auto", "off"):
        result = distgpt("doctor", "--json", ranks=2, env={"DISTGPT_BIND": bind})
        assert result.returncode == 0, result.stderr
        (node,) = json.loads(result.stdout)["nodes"]
        assert cpu_list(node["cpus"]) == usable
        if len(usable) > 1:
            first, second = map(cpu_list, node["seats"])
            assert first and second and first | second <= usable
            assert bool(first & second) == (bind == "off")
