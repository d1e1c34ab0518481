"""The nodes of a launch: how many sockets, NUMA regions and cores they have, and which launch suits them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, astuple, replace

from distgpt.cluster.affinity.bind import about
from distgpt.cluster.affinity.machine import Cpu, Machine, cpu_list, listed, read_machine
from distgpt.cluster.affinity.plan import Rank, blocks, place_of, recommended
from distgpt.core.base.formatting import count
from distgpt.core.comm.resources import usable_cores
from distgpt.measure.doctor.facts import Facts
from distgpt.measure.doctor.verdicts import grouped, hosts


def of_host() -> Facts | None:
    """Describe this host's CPUs, ready for JSON; None where no Linux tells of them."""
    if sys.platform != "linux":
        return None
    machine = read_machine(allowed=usable_cores())
    return {"cpus": [astuple(cpu) for cpu in machine.cpus], "doubts": list(machine.doubts)}


def nodes(ranks: list[Facts], launched: bool) -> list[Facts]:
    """Return the nodes of these ranks, with what a run would note of where they run; of equal nodes, one."""
    found = []
    for users in hosts(ranks):
        if users[0]["node"] is None:
            continue
        here = [_rank(rank) for rank in users]
        cpus = tuple(Cpu(*each) for each in users[0]["node"]["cpus"])
        allowed = frozenset(cpu for rank in here for cpu in rank.cpus)
        machine = Machine(cpus, allowed, tuple(users[0]["node"]["doubts"]))
        node = {
            "sockets": len({cpu.socket for cpu in cpus}),
            "regions": len({cpu.region for cpu in cpus}),
            "cores": len({cpu.core for cpu in cpus}),
            "cpus": len(cpus),
            "usable": listed(allowed),
            "slow": listed(cpu.number for cpu in cpus if not cpu.fast),
            "doubts": list(machine.doubts),
            "notes": _notes(machine, here) if launched else [],
            "suits": asdict(
                recommended(machine, granted=sum(rank["granted_cores"]["number"] for rank in users))
            ),
        }
        found.append((json.dumps(node), users[0]["host"]))
    return [{"hosts": names, **json.loads(node)} for node, names in grouped(found).items()]


def _rank(rank: Facts) -> Rank:
    threads = max(1, int(rank["granted_cores"]["number"] + 1e-6))
    return Rank(rank["host"], tuple(sorted(cpu_list(rank["cpus"]))), threads, rank["bind"])


def _notes(machine: Machine, here: Sequence[Rank]) -> list[str]:
    """Return what a run of these ranks would note of where they run."""
    first = here[0]
    own = replace(machine, allowed=frozenset(first.cpus))
    place = place_of(own, here, 0) if all(rank.bind == "auto" for rank in here) else None
    block = place.block if place else next(iter(blocks(own, 1)), None)
    seats = len(block.seats) if block else 0
    mine = replace(first, threads=min(first.threads, seats))
    return list(about(own, [mine, *here[1:]], place))


def summary(node: Facts) -> str:
    """Describe a node in a line."""
    if node["doubts"]:
        return f"its CPUs are not known: {'; '.join(node['doubts'])}"
    parts = [
        count(node["sockets"], "socket"),
        count(node["regions"], "NUMA region"),
        count(node["cores"], "core"),
    ]
    if node["cpus"] > node["cores"]:
        parts.append(count(node["cpus"], "CPU"))
    if node["slow"]:
        parts.append(f"of which CPUs {node['slow']} are slow and left idle")
    return ", ".join(parts)


def advice(node: Facts) -> str:
    """Describe how many ranks and threads suit a node, and how they are started."""
    ranks, threads, why = node["suits"].values()
    if ranks == 1:
        return f"a process of {count(threads, 'thread')} ({why}): distgpt train"
    each = count(threads, "thread")
    # Open MPI binds each rank to one core by itself, and a launch that binds is obeyed.
    how = f"mpirun -n {ranks} distgpt train --stage mpi (Open MPI: mpirun --bind-to none -n {ranks} …)"
    return f"{ranks} ranks of {each} ({why}): {how}"
