"""The doctor's report: the facts of all ranks, and what this launch can run by them (verdicts.py).

`distgpt doctor` prints them once for all ranks, as a page of 100 columns or as JSON.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from shutil import get_terminal_size
from textwrap import fill

from distgpt.cluster.affinity.machine import listed, read_machine
from distgpt.cluster.affinity.plan import recommended
from distgpt.cluster.jobs.launchers import distant_mpi, launch, mpirun, running_mpi, srun_ways
from distgpt.cluster.launch.environment import launched_rank
from distgpt.core.base.errors import UsageError, escape, print_lines
from distgpt.core.base.formatting import count, size
from distgpt.core.comm.agree import gather_bytes, shared
from distgpt.core.comm.api import Comm, SerialComm
from distgpt.core.comm.resources import granted_cores, usable_cores
from distgpt.core.cpu.stages import open_stage
from distgpt.measure.doctor.facts import Facts, of_rank
from distgpt.measure.doctor.verdicts import (
    hosts,
    is_refused_as_root,
    launch_lines,
    sentence,
    verdicts,
    warnings,
)

WIDTH, MARGIN = 100, 13  # of a page, and of its first column
MOST_HOSTS = 64

Rows = Iterable[tuple[str, str]]


def report(stage: str | None, as_json: bool) -> None:
    """Print the facts once for all ranks; a `stage` that cannot run in this launch is an error."""
    found, comm = examine()
    if (comm.rank if comm.size > 1 else launched_rank()) == 0:
        if as_json:
            print(json.dumps(found, indent=1))
        else:
            print_lines("\n".join(_lines(found)))
    if stage and not found["stages"][stage]["runs"]:
        reasons = "; ".join(map(sentence, found["stages"][stage]["missing"]))
        raise shared(UsageError(f"stage {stage!r} cannot run here: {reasons}"))


def examine() -> tuple[Facts, Comm]:
    """Collect all facts, the same on all ranks. MPI starts in this process only under a launcher."""
    launched = launch()
    comm: Comm = SerialComm()
    if not launched["launcher"]:
        mpi = distant_mpi()
        launched |= {"mpirun": mpirun(), "srun": srun_ways(), "as_root": is_refused_as_root()}
    else:
        try:
            comm = open_stage("mpi", None).comm
            mpi = running_mpi()
        except UsageError as error:
            mpi = {"problem": str(error)}
    ranks = [json.loads(facts) for facts in gather_bytes(comm, json.dumps(of_rank(comm)).encode())]
    found = {
        "launch": launched,
        "mpi": mpi,
        "node": node() if comm.size == 1 else None,
        "ranks": ranks,
        "stages": verdicts(launched, mpi, ranks),
        "warnings": warnings(launched, mpi, ranks),
    }
    return found, comm


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
        "slow": listed(cpu.number for cpu in machine.cpus if not cpu.fast),
        "doubts": list(machine.doubts),
        "suits": asdict(recommended(machine, granted=granted_cores().number)),
    }


def summary(node: Facts) -> str:
    if node["doubts"]:
        return f"its CPUs are not known: {'; '.join(node['doubts'])}"
    sizes = {"socket": "sockets", "NUMA region": "regions", "core": "cores", "CPU": "cpus"}
    parts = [count(node[key], what) for what, key in sizes.items()]
    return ", ".join(parts) + (f"; CPUs {node['slow']} are slow and stay idle" if node["slow"] else "")


def advice(node: Facts) -> str:
    """Describe how many ranks and threads suit a node, and how they are started."""
    ranks, threads, why = node["suits"].values()
    if ranks == 1:
        return f"a process of {count(threads, 'thread')} ({why}): distgpt train"
    # Open MPI binds each rank to one core by itself, and a launch that binds is obeyed.
    how = f"mpirun -n {ranks} distgpt train --stage mpi (Open MPI: mpirun --bind-to none -n {ranks} …)"
    return f"{ranks} ranks of {count(threads, 'thread')} ({why}): {how}"


# The page


def rows(pairs: Rows) -> Iterator[str]:
    """Format names and texts as lines of a page. A text is escaped, and wrapped without a cut."""
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
        yield "\nworth a look"
        yield from rows(("•", text) for text in found["warnings"])


def _machines(ranks: list[Facts]) -> Rows:
    for users in hosts(ranks)[:MOST_HOSTS]:
        first, memory = users[0], users[0]["memory"]
        cores = f"{first['cores']} of {first['cores_of_host']} cores"
        if limit := first["granted_cores"]["limit"]:
            granted = sum(rank["granted_cores"]["number"] for rank in users)
            cores += f", the time of {granted:.3g} by {limit}"
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
        yield "driver", f"{name}, runs CUDA up to {'.'.join(map(str, driver['cuda']))}"
    else:
        yield "driver", "no NVIDIA driver"
    packages = [f"{name} {version}" for name, version in gpu["packages"].items()]
    lacking = [f"no {name}" for name in LIBRARIES if name not in gpu["libraries"]]
    yield "for GPUs", ", ".join([*(packages or ["no packages"]), *gpu["libraries"], *lacking])
