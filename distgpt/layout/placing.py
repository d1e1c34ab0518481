"""The ranks of a job agree where each of them runs, and claim the cores before other jobs of the host do.

A rank alone on a node whose cores are all alike needs none of this (bind.py).
"""

from __future__ import annotations

import json
import platform
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from distgpt.core.base.system import boot_id
from distgpt.core.comm.agree import gather_texts
from distgpt.core.comm.api import Comm
from distgpt.layout.claims import Claim, claimed
from distgpt.layout.machine import Machine
from distgpt.layout.places import Place, Rank, about, place_of

TAKEN = "another job of distgpt on this host runs on the same cores: threads are bound to none of them"
BOUND_TO_TAKEN = (
    "another job of distgpt on this host was bound to the same cores, so that both are slower: bind them to"
    " different ones, or leave both unbound (mpirun -bind-to none)"
)


@dataclass(frozen=True, slots=True)
class Placing:
    """Where a rank runs, its claim on the cores there, and on rank 0 lines about it."""

    place: Place | None  # None: it runs where its launch lets it run
    claim: Claim | None
    lines: list[str]


def placed(
    comm: Comm, machine: Machine, cpus: Sequence[int], threads: int, threads_given: bool, bind: str
) -> Placing:
    """Return where this rank runs. `cpus`: those it may bind itself to; none: it cannot. Collective."""
    own = Rank(_host(), tuple(cpus), threads, bind, secrets.token_hex(4))
    ranks = [_rank(text) for text in gather_texts(comm, json.dumps(asdict(own)))]
    here = [i for i, rank in enumerate(ranks) if rank.host == own.host]
    of_host = [ranks[i] for i in here]
    place = None
    if cpus and all(rank.bind == "auto" for rank in of_host):
        place = place_of(machine, of_host, here.index(comm.rank))
    claim, refusal = _claimed(comm, machine, place, ranks[0].job)
    try:
        refusals = gather_texts(comm, refusal)
    except BaseException:  # an interrupt, after which a notebook goes on
        if claim:
            claim.give_up()
        raise
    lines = [refusals[i] for i in here if refusals[i]][:1]
    kept = None if lines else place
    if lines and claim:
        claim.give_up()
        claim = None
    if here[0] == comm.rank:  # each host is described once
        return Placing(
            kept, claim, _merged(comm, lines or list(about(machine, of_host, place, threads_given)))
        )
    return Placing(kept, claim, _merged(comm, None))


def _claimed(comm: Comm, machine: Machine, place: Place | None, job: str) -> tuple[Claim | None, str]:
    """Claim the cores of a place; return why it cannot be taken, "" if it can. Collective."""
    needed = {cpu.core for cpu in machine.usable if place and cpu.number in place.block.seats}
    claim, failure, taken = None, "", frozenset[int]()
    try:
        if place and (place.binds or place.seats):
            claim = Claim(job, comm.rank, needed)
    except OSError as error:
        failure = str(error.strerror or error)  # Python's own have no number
    comm.barrier()  # all ranks have claimed before one of them looks
    try:
        taken = claimed(job) if claim else taken
    except OSError as error:
        failure = str(error.strerror or error)  # Python's own have no number
    if place and taken & needed:
        return claim, TAKEN if place.binds or comm.size == 1 else BOUND_TO_TAKEN
    if failure:
        failure = f"jobs of this host cannot see each other ({failure}): threads are bound to no cores"
    return claim, failure


def _host() -> str:
    return boot_id() or platform.node()  # hosts of one kernel, as containers are, share its CPUs


def _rank(text: str) -> Rank:
    found = json.loads(text)
    return Rank(**{**found, "cpus": tuple(found["cpus"])})


def _merged(comm: Comm, lines: list[str] | None) -> list[str]:
    """Return on rank 0 the lines of all hosts, each once. `lines`: a host's, None on its other ranks."""
    hosts = [text for text in map(json.loads, gather_texts(comm, json.dumps(lines))) if text is not None]
    found = Counter(line for host in hosts for line in host)
    where = {line: f"on {many} of {len(hosts)} hosts: " * (many < len(hosts)) for line, many in found.items()}
    return [] if comm.rank else [where[line] + line for line in found]
