"""The page of a hostfile: what each launcher reads on its lines, what its hosts have, and what to do."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from distgpt.doctor.facts import Facts
from distgpt.doctor.page import MOST_ROWS, advice, cells, headed, indented, pairs
from distgpt.doctor.verdicts import grouped
from distgpt.formatting import count, duration, numbered
from distgpt.jobs.hostfile import LAUNCHERS

MOST_NAMED = 4  # hosts in a sentence
MOST_TROUBLES = 12  # of a launcher, or of all hosts


def parts(found: Facts, narrow: bool) -> Iterable[RenderableType]:
    hosts = found["hosts"]
    ranks = sum(host["ranks"] for host in hosts)
    what = f"{count(len(hosts), 'host')}, {count(ranks, 'rank')}"
    yield Text.assemble(*cells(found["hostfile"]), ": ", (what, "bold"), "\n")
    if found["lines"]:
        yield indented(_line_table(found["lines"]))
    if any(host.get("facts") and not host["here"] for host in hosts):
        yield indented(_host_table(hosts))
        yield indented(pairs(_processors_of(hosts)))
    yield indented(advice(_verdicts(found), narrow))
    if found["warnings"]:
        yield "[yellow]worth a look"
        yield indented(pairs(("•", text) for text in _some(found["warnings"])))


def _line_table(lines: list[Facts]) -> Table:
    """How many ranks each launcher would start."""
    table = headed("line", *LAUNCHERS, left=("text",))
    for line in lines[:MOST_ROWS]:
        read = [_ranks_read(line, line["read_by"].get(launcher)) for launcher in LAUNCHERS]
        table.add_row(*cells(line["line"], *read, line["text"].strip()))
    if len(lines) > MOST_ROWS:
        table.add_row("…", "", "", "", f"and {len(lines) - MOST_ROWS} more: --json lists all")
    return table


def _ranks_read(line: Facts, reading: Facts | None) -> str:
    if line["problem"] or reading is None or reading["trouble"]:
        return "no"
    return "cores" if reading["ranks"] is None else str(reading["ranks"])


def _host_table(hosts: list[Facts]) -> Table:
    table = headed(
        "ranks", "cores", "ssh", "clock", left=("host", "distgpt", "Python", "NumPy", "Numba", "MPI")
    )
    for host in hosts[:MOST_ROWS]:
        if facts := host.get("facts"):
            ssh, clock = (
                ("here", "") if host["here"] else (duration(host["ssh_s"]), f"{host['clock_s']:+.2f} s")
            )
            versions = (
                facts["versions"].get(name, "missing") for name in ("distgpt", "python", "numpy", "numba")
            )
            mpi = facts["mpi"] if facts["works"] else "does not work"
            table.add_row(*cells(host["ranks"], facts["cores"], ssh, clock, host["host"], *versions, mpi))
        else:
            table.add_row(*cells(host["ranks"], "", "no", "", host["host"], *[""] * 5))
    if len(hosts) > MOST_ROWS:
        table.add_row("…", "", "", "", f"and {len(hosts) - MOST_ROWS} more: --json lists all", *[""] * 5)
    return table


def _processors_of(hosts: list[Facts]) -> Iterable[tuple[str, str]]:
    told = [host for host in hosts if host.get("facts")]
    for processor, names in grouped((host["facts"]["cpu"], host["host"]) for host in told).items():
        yield "CPU", processor if len(names) == len(told) else f"{processor}: {_named(names)}"


def _verdicts(found: Facts) -> Iterable[tuple[str, Text, list[str]]]:
    for launcher, verdict in found["launchers"].items():
        name = f"{launcher}, here" if launcher == found["installed"] else launcher
        if verdict["reads"]:
            yield name, Text("reads it", "green"), [f"→ {verdict['command']}"]
        else:
            yield name, Text("does not", "red"), _advice(verdict["missing"])
    read = [trouble for verdict in found["launchers"].values() for trouble in verdict["missing"]]
    if others := [trouble for trouble in found["missing"] if trouble not in read]:
        yield "the job", Text("cannot run", "red"), _advice(others)
    elif found["hosts"] and all(host.get("facts") for host in found["hosts"]):
        yield "the hosts", Text("are ready", "green"), []


def _advice(troubles: list[Facts]) -> list[str]:
    return _some([said(each, "\n→ ") for each in troubles])


def _some(texts: list[str]) -> list[str]:
    more = [f"… and {len(texts) - MOST_TROUBLES} more: --json lists all"] if texts[MOST_TROUBLES:] else []
    return texts[:MOST_TROUBLES] + more


def _named(hosts: list[str]) -> str:
    return ", ".join(hosts[:MOST_NAMED]) + (
        f" and {len(hosts) - MOST_NAMED} more" if hosts[MOST_NAMED:] else ""
    )


def said(trouble: Facts, arrow: str = ": ") -> str:
    """A trouble on one line, with its lines or hosts and, behind the arrow, its remedy."""
    if hosts := trouble.get("hosts"):
        where = f"{_named(hosts)}: "
    else:
        where = f"{numbered('line', trouble['lines'])}: " if trouble.get("lines") else ""
    return f"{where}{trouble['what']}" + (f"{arrow}{trouble['remedy']}" if trouble["remedy"] else "")
