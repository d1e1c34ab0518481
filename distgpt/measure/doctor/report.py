"""The report of `distgpt doctor`: facts about all ranks, and the stages that this launch can run.

It is printed once for all ranks, as a page of 100 columns or as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from shutil import get_terminal_size
from textwrap import fill
from typing import Any

from distgpt.cluster.affinity.machine import read_machine
from distgpt.cluster.affinity.plan import recommended
from distgpt.cluster.jobs.launchers import distant_mpi, is_of_family, mpirun, running_mpi
from distgpt.cluster.launch.environment import HELP, MPIS, launched_as, launched_rank, launcher_name
from distgpt.core.base.errors import UsageError, escape, print_lines
from distgpt.core.base.formatting import count, in_runs, size
from distgpt.core.comm.agree import collective_error, gather, named_ranks
from distgpt.core.comm.api import Comm, SerialComm
from distgpt.core.comm.resources import granted_cores, usable_cores
from distgpt.core.config import ON_GPU, STAGES, WITH_MPI
from distgpt.core.cpu.stages import NOT_KEPT, open_stage
from distgpt.measure.doctor.facts import Facts, of_rank

WIDTH, MARGIN = 100, 13  # columns of a page, and of its first column
MOST_HOSTS = 64
FEW = 0.5  # fraction of a host's CPUs; with SMT, a rank per core may have one of its two CPUs
AS_ROOT = "--allow-run-as-root"
# Either of these pairs lets Open MPI start as root; the second since 5.0.
ROOT = tuple((f"{name}_ALLOW_RUN_AS_ROOT", f"{name}_ALLOW_RUN_AS_ROOT_CONFIRM") for name in ("OMPI", "PRTE"))

Rows = Iterable[tuple[str, str]]


def report(stage: str | None, as_json: bool) -> None:
    """Print the facts once for all ranks. Raise an error if `stage` cannot run in this launch."""
    result, comm = examine()
    if (comm.rank if comm.size > 1 else launched_rank()) == 0:
        if as_json:
            print(json.dumps(result, indent=1))
        else:
            print_lines("\n".join(_lines(result)))
    if stage and not result["stages"][stage]["runs"]:
        reasons = "; ".join(map(sentence, result["stages"][stage]["missing"]))
        raise collective_error(UsageError(f"stage {stage!r} cannot run here: {reasons}"))


def examine() -> tuple[Facts, Comm]:
    """Collect all facts, the same on all ranks. MPI starts in this process only under a launcher."""
    launched: Facts = {"launcher": launcher_name(), "processes": launched_as()}
    comm: Comm = SerialComm()
    if not launched["launcher"]:
        mpi = distant_mpi()
        launched |= {"mpirun": mpirun(), "as_root": is_refused_as_root()}
    else:
        try:
            comm = open_stage("mpi", None).comm
            mpi = running_mpi()
        except UsageError as error:
            mpi = {"problem": str(error)}
    ranks = gather(comm, of_rank(comm))
    result = {
        "launch": launched,
        "mpi": mpi,
        "node": node() if comm.size == 1 else None,
        "ranks": ranks,
        "stages": verdicts(launched, mpi, ranks),
        "warnings": warnings(launched, mpi, ranks),
    }
    return result, comm


# This node: sockets, NUMA regions and cores, and which launch suits it


def node() -> Facts | None:
    """Describe the CPUs that this process may use; None if the system is not Linux."""
    if sys.platform != "linux":
        return None
    machine = read_machine(allowed=usable_cores())
    return {
        "sockets": len({cpu.socket for cpu in machine.cpus}),
        "regions": len({cpu.region for cpu in machine.cpus}),
        "cores": len({cpu.core for cpu in machine.cpus}),
        "cpus": len(machine.cpus),
        "slow": in_runs(cpu.number for cpu in machine.cpus if not cpu.fast),
        "doubts": list(machine.doubts),
        "suits": asdict(recommended(machine, granted=granted_cores().number)),
    }


def summary(node: Facts) -> str:
    if node["doubts"]:
        return f"unknown CPUs: {'; '.join(node['doubts'])}"
    sizes = {"socket": "sockets", "NUMA region": "regions", "core": "cores", "CPU": "cpus"}
    parts = [count(node[key], what) for what, key in sizes.items()]
    return ", ".join(parts) + (f"; CPUs {node['slow']} are slow and stay idle" if node["slow"] else "")


def advice(node: Facts) -> str:
    """Describe how many ranks and threads suit a node, and how to start them."""
    ranks, threads, why = node["suits"].values()
    if ranks == 1:
        return f"one process with {count(threads, 'thread')} ({why}): distgpt train"
    # By default Open MPI binds each rank to one core, and distgpt keeps a launcher's binding.
    how = f"mpirun -n {ranks} distgpt train --stage mpi (Open MPI: mpirun --bind-to none -n {ranks} …)"
    return f"{ranks} ranks with {count(threads, 'thread')} each ({why}): {how}"


# Verdicts on each stage, launch lines and warnings, from the facts of all ranks


def verdicts(launched: Facts, mpi: Facts, ranks: list[Facts]) -> Facts:
    """Return for each stage whether it runs in this launch, missing requirements, and improvements."""
    processes = max(launched["processes"], len(ranks))
    several = f"launched as {processes} processes, which would all do the same work"
    remedy = "use a stage with MPI, or run without mpirun"
    alone = [{"what": several, "remedy": remedy}] if processes > 1 else []
    what, _, remedy = mpi["problem"].partition("; ")
    connected = [{"what": what, "remedy": remedy}] if what else []
    result = {}
    for stage in STAGES:
        gpu = [rank["gpu"] for rank in ranks] if stage in ON_GPU else []
        lacking = [each["missing"]["float32"] for each in gpu] or [
            rank["compute"]["missing"] for rank in ranks
        ]
        missing = (connected if stage in WITH_MPI else alone) + _over_ranks(ranks, lacking)
        notes = [] if any(lacking) else _over_ranks(ranks, [each["missing"]["bfloat16"] for each in gpu])
        result[stage] = {"runs": not missing, "missing": missing, "notes": notes}
    return result


def _over_ranks(ranks: list[Facts], troubles: list[list[Facts]]) -> list[Facts]:
    """Report a problem that multiple ranks share once; omit `ranks` if all have it."""
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
    """Group values by key, in order of arrival."""
    groups: dict[Any, list[Any]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def sentence(trouble: Facts) -> str:
    """Format a problem as one line, with its ranks and its fix."""
    ranks = f"{named_ranks(trouble['ranks'])}: " if "ranks" in trouble else ""
    return f"{ranks}{trouble['what']}" + (f": {trouble['remedy']}" if trouble["remedy"] else "")


def hosts(ranks: list[Facts]) -> list[list[Facts]]:
    return list(grouped((rank["host"], rank) for rank in ranks).values())


# Launches


def is_refused_as_root(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether Open MPI's mpirun would not start for this user."""
    return os.geteuid() == 0 and not any(all(map(environ.get, pair)) for pair in ROOT)


def launch_lines(launched: Facts, mpi: Facts) -> list[str]:
    """Return a command line that starts two ranks with this MPI, if the local mpirun belongs to this MPI."""
    if launched["launcher"] or mpi.get("vendor") not in MPIS:
        return []
    if not is_of_family(launched["mpirun"]["vendor"], mpi["vendor"]):
        return []
    as_root = f" {AS_ROOT}" * (mpi["vendor"] == "Open MPI" and launched["as_root"])
    return [f"{launched['mpirun']['path']}{as_root} -n 2 distgpt train --stage mpi"]


def foreign_mpirun(command: Facts, mpi: Facts) -> list[str]:
    """Report an mpirun of a different MPI than mpi4py's."""
    if not command["vendor"] or "vendor" not in mpi or is_of_family(command["vendor"], mpi["vendor"]):
        return []
    vendors = f"belongs to {command['vendor']}, but mpi4py to {mpi['vendor']}"
    return [f"{command['path']} {vendors}; jobs require the mpirun of {mpi['vendor']}"]


def launch_problems(launched: Facts, mpi: Facts) -> Iterable[str]:
    if launched["launcher"] or "vendor" not in mpi:
        return
    yield from foreign_mpirun(launched["mpirun"], mpi)
    if launched["mpirun"]["path"] is None:
        yield f"mpirun not found in PATH ({HELP})"
    if launched["as_root"] and launched["mpirun"]["vendor"] == "Open MPI":
        yield f"Open MPI's mpirun does not start as root; use another user, or add {AS_ROOT}"


# Warnings


def warnings(launched: Facts, mpi: Facts, ranks: list[Facts]) -> list[str]:
    """List problems that would slow a run down or harm it without an error."""
    parts = [launch_problems(launched, mpi), _differences(ranks), _cores(launched, ranks), _gpus(ranks)]
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
            yield f"{who} share {used:.3g} cores; start at most one rank per core"
        elif launched["launcher"] and used < FEW * of_host:
            yield (
                f"{who} may use {used:.3g} of {of_host} cores; to use more, change "
                "the launch (Open MPI: --bind-to none, srun: --cpus-per-task)"
            )


def _gpus(ranks: list[Facts]) -> Iterable[str]:
    taken = [
        ((rank["host"], gpu["uuid"], gpu["name"]), rank["rank"])
        for rank in ranks
        if (number := rank["gpu"]["takes"]) is not None and (gpu := rank["gpu"]["driver"]["gpus"][number])
    ]
    for (host, _, name), users in grouped(taken).items():
        if len(users) > 1:
            yield f"{named_ranks(users)} on {host} share one {name} and its memory; start one rank per GPU"


def _loops(ranks: list[Facts]) -> Iterable[str]:
    lost = [rank["rank"] for rank in ranks if not (rank["compute"]["loops"] or rank["compute"]["missing"])]
    if lost:
        yield NOT_KEPT if len(lost) == len(ranks) else f"{named_ranks(lost)}: {NOT_KEPT}"


def _settings(ranks: list[Facts]) -> Iterable[str]:
    cores = {rank["environment"].get("OPENBLAS_CORETYPE") for rank in ranks} - {None, ""}
    for core in sorted(cores):
        yield (
            f"OPENBLAS_CORETYPE={core} overrides the BLAS kernels of this processor; unset it, unless "
            "it is faster"
        )


# The page


def rows(pairs: Rows) -> Iterator[str]:
    """Format pairs of name and text as lines of a page. Text is escaped, and wrapped without truncation."""
    width = min(WIDTH, get_terminal_size((WIDTH, 24)).columns)
    for name, text in pairs:
        yield fill(
            f"  {name:<{MARGIN}}{escape(text)}",
            width,
            subsequent_indent=" " * (MARGIN + 2),
            break_on_hyphens=False,
        )


def _lines(found: Facts) -> Iterator[str]:
    first = found["ranks"][0]
    versions = first["versions"]
    yield f"distgpt {versions['distgpt']} with Python {versions['python']} on {first['system']}\n"
    for part in (_machines(found["ranks"]), _software(found), _gpu_software(first["gpu"])):
        yield from rows(part)
    if node := found["node"]:
        yield from rows([("node", summary(node)), ("best", advice(node))])
    yield ""
    for stage, verdict in found["stages"].items():
        reasons = [sentence(each) for each in verdict["missing"] or verdict["notes"]]
        words = "runs" if verdict["runs"] else "cannot run"
        yield from rows([(stage, f"{words}{': ' * bool(reasons)}{'; '.join(reasons)}")])
    if found["warnings"]:
        yield "\nwarnings"
        yield from rows(("•", text) for text in found["warnings"])


def _machines(ranks: list[Facts]) -> Rows:
    for users in hosts(ranks)[:MOST_HOSTS]:
        first, memory = users[0], users[0]["memory"]
        cores = f"{first['cores']} of {first['cores_of_host']} cores"
        if limit := first["granted_cores"]["limit"]:
            granted = sum(rank["granted_cores"]["number"] for rank in users)
            cores += f", limited to the time of {granted:.3g} by {limit}"
        by = f" by {memory['limit']}" if memory["limit"] else ""
        cores += f", {size(memory['total'])} of memory{by} ({size(memory['available'])} free)"
        yield "host", f"{first['host']}: {first['cpu']}, {cores}"
        drivers = [rank["gpu"]["driver"] for rank in users if rank["gpu"]["driver"]]
        gpus = {gpu["uuid"]: gpu for driver in drivers for gpu in driver["gpus"]}.values()
        kinds = Counter((gpu["name"], gpu["memory"], *gpu["capability"]) for gpu in gpus)
        for (name, bytes_, major, minor), n in kinds.items():
            yield "", f"{n} × {name}, {size(bytes_)}, compute capability {major}.{minor}"
    if ranks[0]["auto_dtype"]:
        yield "--dtype auto", f"on CPUs {ranks[0]['auto_dtype']}"


def _software(found: Facts) -> Rows:
    launched, mpi, first = found["launch"], found["mpi"], found["ranks"][0]
    versions, compute = first["versions"], first["compute"]
    blas = f" with {compute['blas']}" if compute["blas"] else ""
    tuned = f", tuned for {compute['core']}" if compute["core"] else ""
    yield "NumPy", f"{versions.get('numpy', 'not installed')}{blas}{tuned}"
    loops = f", compiled loops in {compute['loops']}" if compute["loops"] else ""
    yield "Numba", versions.get("numba", "not installed") + loops
    if mpi["problem"]:
        yield "MPI", "not ready: see below"
    else:
        library = f", from {mpi['library']}" if mpi.get("library") else ""
        yield "MPI", f"{mpi['vendor']} {mpi['version']} through mpi4py {versions['mpi4py']}{library}"
    if launched["launcher"]:
        yield "launch", f"{count(launched['processes'], 'process')} by {launched['launcher']}"
    elif where := launched["mpirun"]["path"]:
        vendor = launched["mpirun"]["vendor"]
        yield "launch", f"a single process; mpirun is {where}" + (f" ({vendor})" if vendor else "")
    else:
        yield "launch", "a single process; there is no mpirun"
    for line in launch_lines(launched, mpi):
        yield "start ranks", line


def _gpu_software(gpu: Facts) -> Rows:
    from distgpt.gpu.probe import LIBRARIES

    if driver := gpu["driver"]:
        name = f"NVIDIA {driver['release']}".rstrip()
        yield "driver", f"{name}, supports CUDA up to {'.'.join(map(str, driver['cuda']))}"
    else:
        yield "driver", "no NVIDIA driver"
    packages = [f"{name} {version}" for name, version in gpu["packages"].items()]
    lacking = [f"no {name}" for name in LIBRARIES if name not in gpu["libraries"]]
    yield "for GPUs", ", ".join([*(packages or ["no packages"]), *gpu["libraries"], *lacking])
