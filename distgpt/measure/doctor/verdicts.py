"""Verdicts on each stage, launch lines and warnings, from the facts of all ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from distgpt.cluster.jobs.launchers import is_of_family
from distgpt.cluster.launch.environment import HELP, MPIS
from distgpt.core.comm.agree import named_ranks
from distgpt.core.config import ON_GPU, STAGES, WITH_MPI
from distgpt.core.cpu.stages import NOT_KEPT
from distgpt.measure.doctor.facts import Facts

FEW = 0.5  # of a host's CPUs: with SMT, a rank on each core may have one of its two
AS_ROOT = "--allow-run-as-root"
# By each of these pairs Open MPI may be asked to start as root; the latter since 5.0.
ROOT = tuple((f"{name}_ALLOW_RUN_AS_ROOT", f"{name}_ALLOW_RUN_AS_ROOT_CONFIRM") for name in ("OMPI", "PRTE"))


def verdicts(launched: Facts, mpi: Facts, ranks: list[Facts]) -> Facts:
    """For each stage: whether it runs in this launch, and what is missing for it, or for bfloat16."""
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
        missing = (connected if stage in WITH_MPI else alone) + _over_ranks(ranks, lacking)
        notes = [] if any(lacking) else _over_ranks(ranks, [each["missing"]["bfloat16"] for each in gpu])
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


def sentence(trouble: Facts) -> str:
    """A trouble on one line, with its ranks and its remedy."""
    ranks = f"{named_ranks(trouble['ranks'])}: " if "ranks" in trouble else ""
    return f"{ranks}{trouble['what']}" + (f": {trouble['remedy']}" if trouble["remedy"] else "")


def hosts(ranks: list[Facts]) -> list[list[Facts]]:
    """Group the ranks by host."""
    return list(grouped((rank["host"], rank) for rank in ranks).values())


# Launches


def is_refused_as_root(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether Open MPI's mpirun would not start for this user."""
    return os.geteuid() == 0 and not any(all(map(environ.get, pair)) for pair in ROOT)


def launch_lines(launched: Facts, mpi: Facts) -> list[str]:
    """Return lines that start several ranks with this MPI, the likeliest first."""
    known = MPIS.get(mpi.get("vendor", ""))
    if launched["launcher"] or known is None:
        return []
    by_srun = [known.srun_line(launched["srun"])] if {*known.srun} & {*launched["srun"]} else []
    by_mpirun = []
    if is_of_family(launched["mpirun"]["vendor"], mpi["vendor"]):
        is_root = mpi["vendor"] == "Open MPI" and launched["as_root"]
        by_mpirun = [f"{launched['mpirun']['path']}{f' {AS_ROOT}' * is_root}"]
    return [f"{start} -n 2 distgpt train --stage mpi" for start in by_srun + by_mpirun]


def foreign_mpirun(command: Facts, mpi: Facts) -> list[str]:
    """Report an mpirun of another MPI than mpi4py's."""
    if not command["vendor"] or "vendor" not in mpi or is_of_family(command["vendor"], mpi["vendor"]):
        return []
    vendors = f"belongs to {command['vendor']}, but mpi4py to {mpi['vendor']}"
    return [f"{command['path']} {vendors}: jobs need the mpirun of {mpi['vendor']}"]


def _launch(launched: Facts, mpi: Facts) -> Iterable[str]:
    if launched["launcher"] or "vendor" not in mpi:
        return
    yield from foreign_mpirun(launched["mpirun"], mpi)
    if launched["mpirun"]["path"] is None:
        yield f"there is no mpirun in PATH ({HELP})"
    if launched["as_root"] and launched["mpirun"]["vendor"] == "Open MPI":
        yield f"Open MPI's mpirun does not start for root: be another user, or add {AS_ROOT}"


# Warnings


def warnings(launched: Facts, mpi: Facts, ranks: list[Facts]) -> list[str]:
    """List what would slow a run down or spoil it without an error."""
    parts = [_launch(launched, mpi), _differences(ranks), _cores(launched, ranks), _gpus(ranks)]
    return [text for part in (*parts, _loops(ranks), _settings(ranks)) for text in part]


def _differences(ranks: list[Facts]) -> Iterable[str]:
    for name in ranks[0]["versions"]:
        owners = grouped((rank["versions"].get(name, "missing"), rank["rank"]) for rank in ranks)
        if len(owners) > 1:
            each = ", ".join(f"{version} on {named_ranks(whose)}" for version, whose in owners.items())
            yield f"the ranks have different versions of {name}: {each}"


def _cores(launched: Facts, ranks: list[Facts]) -> Iterable[str]:
    for users in hosts(ranks):
        used, of_host = sum(rank["core_share"] for rank in users), users[0]["cores_of_host"]
        who = f"{named_ranks([rank['rank'] for rank in users])} on {users[0]['host']}"
        if any(rank["core_share"] < 1 - 1e-6 for rank in users):
            yield f"{who} share {used:.3g} cores: more ranks than cores only slow each other down"
        elif launched["launcher"] and used < FEW * of_host:
            yield (
                f"{who} may use {used:.3g} of {of_host} cores: to use more of them, ask "
                "the launcher (Open MPI: --bind-to none, srun: --cpus-per-task)"
            )


def _gpus(ranks: list[Facts]) -> Iterable[str]:
    taken = [
        ((rank["host"], gpu["uuid"], gpu["name"]), rank["rank"])
        for rank in ranks
        if (number := rank["gpu"]["takes"]) is not None and (gpu := rank["gpu"]["driver"]["gpus"][number])
    ]
    for (host, _, name), users in grouped(taken).items():
        if len(users) > 1:
            yield f"{named_ranks(users)} on {host} share one {name} and its memory: start one rank per GPU"


def _loops(ranks: list[Facts]) -> Iterable[str]:
    lost = [rank["rank"] for rank in ranks if not (rank["compute"]["loops"] or rank["compute"]["missing"])]
    if lost:
        yield NOT_KEPT if len(lost) == len(ranks) else f"{named_ranks(lost)}: {NOT_KEPT}"
    for path in dict.fromkeys(path for rank in ranks for path in rank["compute"]["unused"]):
        yield (
            f"{path} is not used: it is of another version, damaged, or others may write to it; "
            "whoever owns this installation rebuilds it with distgpt compile"
        )


def _settings(ranks: list[Facts]) -> Iterable[str]:
    cores = {rank["environment"].get("OPENBLAS_CORETYPE") for rank in ranks} - {None, ""}
    for core in sorted(cores):
        yield (
            f"OPENBLAS_CORETYPE={core} overrides the BLAS kernels of this processor: unset it, unless "
            "you measured that it helps"
        )
