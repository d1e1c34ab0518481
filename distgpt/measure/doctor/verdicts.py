"""Verdicts on each stage, and warnings, from the facts of all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from distgpt.cluster.affinity.machine import Cpu, cpu_list
from distgpt.core.base.formatting import count
from distgpt.core.comm.agree import named_ranks
from distgpt.core.config import ON_GPU, STAGES, WITH_MPI
from distgpt.core.cpu.stages import NOT_KEPT
from distgpt.measure.doctor.facts import IGNORED, Facts
from distgpt.measure.doctor.launches import traps

FEW = 0.5  # of a host's cores


def verdicts(launched: Facts, mpi: Facts, ranks: list[Facts]) -> Facts:
    """For each stage: whether it runs in this launch, what is missing if not, and what would improve it."""
    processes = max(launched["processes"], len(ranks))
    several = f"launched as {processes} processes, which would all do the same work"
    remedy = "use a stage with MPI, or run without mpirun"
    alone = [{"what": several, "remedy": remedy}] if processes > 1 else []
    what, _, remedy = mpi["problem"].partition("; ")
    connected = [{"what": what, "remedy": remedy}] if what else []
    found = {}
    for stage in STAGES:
        gpu = [rank["gpu"] for rank in ranks] if stage in ON_GPU else []
        lacking = [each["missing"]["float32"] for each in gpu] or [
            rank["compute"]["missing"] for rank in ranks
        ]
        useful = [each["missing"]["bfloat16"] + each["useful"][stage] for each in gpu]
        missing = (connected if stage in WITH_MPI else alone) + _over_ranks(ranks, lacking)
        notes = [] if any(lacking) else _over_ranks(ranks, useful)
        found[stage] = {"runs": not missing, "missing": missing, "notes": notes}
    return found


def _over_ranks(ranks: list[Facts], troubles: list[list[Facts]]) -> list[Facts]:
    """Report a trouble of several ranks once; leave `ranks` out where it is all of them."""
    owners = grouped(
        ((each["what"], each["remedy"]), rank["rank"])
        for rank, of_rank in zip(ranks, troubles, strict=False)
        for each in of_rank
    )
    return [
        {"what": what, "remedy": remedy} | ({} if len(whose) == len(ranks) else {"ranks": whose})
        for (what, remedy), whose in owners.items()
    ]


def grouped(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, list[Any]]:
    """All values of each key, in the order of their arrival."""
    groups: dict[Any, list[Any]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def sentence(trouble: Facts, arrow: str = ": ") -> str:
    """A trouble on one line, with its ranks and, behind the arrow, its remedy."""
    ranks = f"{named_ranks(trouble['ranks'])}: " if "ranks" in trouble else ""
    return f"{ranks}{trouble['what']}" + (f"{arrow}{trouble['remedy']}" if trouble["remedy"] else "")


def warnings(launched: Facts, mpi: Facts, ranks: list[Facts]) -> list[str]:
    """List what would slow a run down or spoil it without an error."""
    return [
        *traps(launched, mpi),
        *_differences(ranks),
        *(warning for host in hosts(ranks) for warning in _cores(launched, host)),
        *_shared_gpus(ranks),
        *_not_kept(ranks),
        *_unused_loops(ranks),
        *_settings(ranks),
    ]


def _differences(ranks: list[Facts]) -> Iterable[str]:
    for name in ranks[0]["versions"]:
        owners = grouped((rank["versions"].get(name, "missing"), rank["rank"]) for rank in ranks)
        if len(owners) > 1:
            each = ", ".join(f"{version} on {named_ranks(whose)}" for version, whose in owners.items())
            yield f"the ranks have different versions of {name}: {each}"


def _cores(launched: Facts, ranks: list[Facts]) -> Iterable[str]:
    first = ranks[0]
    used = sum(rank["core_share"] for rank in ranks)
    may, of_host = _reach(ranks)
    who = f"{named_ranks([rank['rank'] for rank in ranks])} on {first['host']}"
    if any(rank["core_share"] < 1 - 1e-6 for rank in ranks):
        yield f"{who} share {used:.3g} cores: more ranks than cores only slow each other down"
    elif launched["launcher"] and may <= FEW * of_host:
        yield (
            f"{who} may use {may:.3g} of {of_host} cores: to use more of them, ask "
            "the launcher (Open MPI: --bind-to none, srun: --cpus-per-task)"
        )
    if limit := first["granted_cores"]["limit"]:
        numbers = [rank["granted_cores"]["number"] for rank in ranks]
        threads = f"{count(max(1, int(min(numbers))), 'thread')}" + " each" * (len(ranks) > 1)
        time = f"the time of {sum(numbers):.3g}"
        yield f"{who}: {used:.3g} cores, but {limit} grants {time}: a run takes {threads}"


def _reach(ranks: list[Facts]) -> tuple[float, int]:
    """Return how many cores of a host its ranks may use, of how many: not CPUs, of which SMT makes more."""
    first, node = ranks[0], ranks[0].get("node")
    if not node or node["doubts"]:
        return sum(rank["core_share"] for rank in ranks), first["cores_of_host"]
    cpus = [Cpu(*each) for each in node["cpus"]]
    usable = {cpu for rank in ranks for cpu in cpu_list(rank["cpus"])}
    cores = {cpu.core for cpu in cpus}
    return len({cpu.core for cpu in cpus if cpu.number in usable}), len(cores)


def _shared_gpus(ranks: list[Facts]) -> Iterable[str]:
    names = {gpu["uuid"]: gpu["name"] for rank in ranks if (gpu := taken_gpu(rank))}
    for (host, uuid), users in gpu_users(ranks).items():
        if len(users) > 1:
            what = f"{names[uuid]} and its memory"
            yield f"{named_ranks(users)} on {host} share one {what}: start one rank per GPU"


def _not_kept(ranks: list[Facts]) -> Iterable[str]:
    without = [
        [{"what": NOT_KEPT, "remedy": ""}]
        if not rank["compute"]["loops"] and not rank["compute"]["missing"]
        else []
        for rank in ranks
    ]
    yield from map(sentence, _over_ranks(ranks, without))


def _unused_loops(ranks: list[Facts]) -> Iterable[str]:
    for path in dict.fromkeys(path for rank in ranks for path in rank["compute"]["unused"]):
        yield (
            f"{path} is not used: it is of another version, damaged, or others may write to it; "
            "whoever owns this installation rebuilds it with distgpt compile"
        )


def _settings(ranks: list[Facts]) -> Iterable[str]:
    values = {key: value for rank in ranks for key, value in rank["environment"].items()}
    if core := values.get("OPENBLAS_CORETYPE"):
        yield (
            f"OPENBLAS_CORETYPE={core} overrides the BLAS kernels of this processor: unset it, unless "
            "you measured that it helps"
        )
    if ignored := [f"{key}={values[key]}" for key in IGNORED if values.get(key)]:
        yield f"{', '.join(ignored)} will be ignored: distgpt has its own threads, set with --threads"


def hosts(ranks: list[Facts]) -> list[list[Facts]]:
    """Group the ranks by host."""
    return list(grouped((rank["host"], rank) for rank in ranks).values())


def taken_gpu(rank: Facts) -> Facts | None:
    """Return the GPU that this rank takes in a GPU stage."""
    taken = rank["gpu"]["takes"]
    gpu: Facts | None = None if taken is None else rank["gpu"]["driver"]["gpus"][taken]
    return gpu


def gpu_users(ranks: list[Facts]) -> dict[tuple[str, str], list[int]]:
    """(host, uuid) of each GPU that is taken → the ranks that take it."""
    return grouped(((rank["host"], gpu["uuid"]), rank["rank"]) for rank in ranks if (gpu := taken_gpu(rank)))
