"""What this machine and this launch can do: the facts of all ranks, a verdict on each stage, known traps."""

from __future__ import annotations

import json
from collections.abc import Iterable

from distgpt.comm.agree import gather_bytes, named_ranks
from distgpt.comm.api import Comm
from distgpt.comm.serial import SerialComm
from distgpt.errors import UsageError
from distgpt.machine.facts import (
    IGNORED,
    Facts,
    distant_mpi,
    foreign_launcher,
    launch,
    mpirun,
    of_rank,
    running_mpi,
)
from distgpt.machine.stages import opened

FEW = 0.5  # of a host's cores


def examine() -> tuple[Facts, Comm]:
    """All there is to tell, the same on all ranks. MPI starts in this process only under a launcher."""
    launched = launch()
    comm: Comm = SerialComm()
    if not launched["launcher"]:
        launched["mpirun"] = mpirun()
        mpi = distant_mpi()
    elif problem := foreign_launcher():
        mpi = {"problem": problem}
    else:
        try:
            comm = opened("mpi", None).comm
            mpi = running_mpi()
        except UsageError as error:
            mpi = {"problem": str(error)}
    ranks = [json.loads(facts) for facts in gather_bytes(comm, json.dumps(of_rank(comm)).encode())]
    stages = verdicts(launched, mpi, ranks)
    traps = warnings(launched, mpi, ranks)
    return {"launch": launched, "mpi": mpi, "ranks": ranks, "stages": stages, "warnings": traps}, comm


def verdicts(launched: Facts, mpi: Facts, ranks: list[Facts]) -> Facts:
    """For each stage whether it runs in this launch, what is missing if not, and what else to know."""
    processes = max(launched["processes"], len(ranks))
    several = f"launched as {processes} processes, which would all do the same work"
    alone = [_trouble(several, "use a stage with MPI, or run without mpirun")] if processes > 1 else []
    what, _, remedy = mpi["problem"].partition("; ")
    connected = [_trouble(what, remedy)] if what else []
    cpu = _over_ranks((rank, rank["compute"]["missing"]) for rank in ranks)
    gpu = _over_ranks((rank, rank["gpu"]["missing"]["float32"]) for rank in ranks)
    missing = {
        "serial": alone + cpu,
        "mpi": connected + cpu,
        "cuda": alone + gpu,
        "mpi-cuda": connected + gpu,
    }
    return {
        stage: {"runs": not troubles, "missing": troubles, "notes": _notes(stage, gpu, ranks)}
        for stage, troubles in missing.items()
    }


def _notes(stage: str, troubles: list[Facts], ranks: list[Facts]) -> list[Facts]:
    """What a GPU stage could have besides."""
    if stage not in ("cuda", "mpi-cuda") or troubles:
        return []
    return _over_ranks(
        (rank, rank["gpu"]["missing"]["bfloat16"] + rank["gpu"]["useful"][stage]) for rank in ranks
    )


def _over_ranks(found: Iterable[tuple[Facts, list[Facts]]]) -> list[Facts]:
    """Troubles that several ranks have are told once; `ranks` is left out where it is all of them."""
    owners: dict[tuple[str, str], list[int]] = {}
    count = 0
    for rank, troubles in found:
        count += 1
        for trouble in troubles:
            owners.setdefault((trouble["what"], trouble["remedy"]), []).append(rank["rank"])
    return [
        _trouble(what, remedy) | ({} if len(whose) == count else {"ranks": whose})
        for (what, remedy), whose in owners.items()
    ]


def _trouble(what: str, remedy: str) -> Facts:
    return {"what": what, "remedy": remedy}


def sentence(trouble: Facts) -> str:
    """A trouble on one line, with its ranks and its remedy."""
    return f"{where(trouble)}{trouble['what']}" + (f": {trouble['remedy']}" if trouble["remedy"] else "")


def where(trouble: Facts) -> str:
    return f"{named_ranks(trouble['ranks'])}: " if "ranks" in trouble else ""


def warnings(launched: Facts, mpi: Facts, ranks: list[Facts]) -> list[str]:
    """Traps that a run would fall into without a word."""
    return [
        *_foreign_mpirun(launched, mpi),
        *_differences(ranks),
        *(warning for host in hosts(ranks) for warning in _cores(launched, host)),
        *_shared_gpus(ranks),
        *_settings(ranks),
    ]


def _foreign_mpirun(launched: Facts, mpi: Facts) -> Iterable[str]:
    command = launched.get("mpirun", {})
    if not command.get("vendor") or "vendor" not in mpi:
        return
    if (command["vendor"] == "Open MPI") != (mpi["vendor"] == "Open MPI"):
        yield (
            f"{command['path']} belongs to {command['vendor']}, but mpi4py to {mpi['vendor']}: "
            f"jobs need the mpirun of {mpi['vendor']}"
        )


def _differences(ranks: list[Facts]) -> Iterable[str]:
    for name in ranks[0]["versions"]:
        owners: dict[str, list[int]] = {}
        for rank in ranks:
            owners.setdefault(rank["versions"].get(name, "missing"), []).append(rank["rank"])
        if len(owners) > 1:
            each = ", ".join(f"{version} on {named_ranks(whose)}" for version, whose in owners.items())
            yield f"the ranks do not have the same {name}: {each}"


def _cores(launched: Facts, ranks: list[Facts]) -> Iterable[str]:
    first = ranks[0]
    used = sum(rank["core_share"] for rank in ranks)
    who = f"{named_ranks([rank['rank'] for rank in ranks])} on {first['host']}"
    if any(rank["core_share"] < 1 - 1e-6 for rank in ranks):
        yield f"{who} share {used:.3g} cores: more ranks than cores only slow each other down"
    elif launched["launcher"] and used <= FEW * first["cores_of_host"]:
        yield (
            f"{who} may use {used:.3g} of {first['cores_of_host']} cores: if the others are yours too, tell "
            "the launcher (Open MPI: --bind-to none, srun: --cpus-per-task)"
        )
    if first["core_quota"] and first["core_quota"] < used - 1e-6:
        each = max(1, int(first["core_quota"] / len(ranks)))
        quota = f"{first['core_quota']:.3g}"
        yield f"{who} see {used:.3g} cores but get the time of {quota}: use --threads {each}"


def _shared_gpus(ranks: list[Facts]) -> Iterable[str]:
    by_number = {rank["rank"]: rank for rank in ranks}
    for (host, _), users in gpu_users(ranks).items():
        gpu = taken_gpu(by_number[users[0]])
        if gpu and len(users) > 1:
            name = f"{gpu['name']} and its memory"
            yield f"{named_ranks(users)} on {host} share one {name}: start one rank per GPU"


def _settings(ranks: list[Facts]) -> Iterable[str]:
    values = {key: value for rank in ranks for key, value in rank["environment"].items()}
    if core := values.get("OPENBLAS_CORETYPE"):
        yield (
            f"OPENBLAS_CORETYPE={core} chooses the BLAS kernels in place of the processor: unset it, unless "
            "you measured that it helps"
        )
    if ignored := [f"{key}={values[key]}" for key in IGNORED if values.get(key)]:
        yield f"{', '.join(ignored)} will be ignored: distgpt has threads of its own, counted by --threads"


def hosts(ranks: list[Facts]) -> list[list[Facts]]:
    """The ranks of each host."""
    by_host: dict[str, list[Facts]] = {}
    for rank in ranks:
        by_host.setdefault(rank["host"], []).append(rank)
    return list(by_host.values())


def taken_gpu(rank: Facts) -> Facts | None:
    """The GPU that this rank takes in a GPU stage."""
    taken = rank["gpu"]["takes"]
    gpu: Facts | None = None if taken is None else rank["gpu"]["driver"]["gpus"][taken]
    return gpu


def gpu_users(ranks: list[Facts]) -> dict[tuple[str, str], list[int]]:
    """(host, uuid) of each GPU that is taken → the ranks that take it."""
    users: dict[tuple[str, str], list[int]] = {}
    for rank in ranks:
        if gpu := taken_gpu(rank):
            users.setdefault((rank["host"], gpu["uuid"]), []).append(rank["rank"])
    return users
