"""What this machine and this launch can run: the facts of all ranks, a verdict on each stage, warnings.

`distgpt doctor` prints them once for all ranks, as a page of 100 columns or as JSON.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from distgpt.comm.agree import gather_bytes, named_ranks, shared
from distgpt.comm.api import Comm
from distgpt.comm.launched import launched_rank
from distgpt.comm.serial import SerialComm
from distgpt.errors import UsageError, lines, printable
from distgpt.gpu.probe import LIBRARIES
from distgpt.machine.facts import IGNORED, Facts, of_rank
from distgpt.machine.launchers import distant_mpi, launch, mpirun, running_mpi
from distgpt.machine.stages import NOT_KEPT, ON_GPU, STAGES, WITH_MPI, open_stage
from distgpt.units import count, size

FEW = 0.5  # of a host's cores
WIDTH = 100
NARROW = 60  # from here on advice has lines of its own, so that its commands are not broken
MOST_ROWS = 64


def report(stage: str | None, as_json: bool) -> None:
    """Print the facts once for all ranks; a `stage` that cannot run in this launch is an error."""
    found, comm = examine()
    if (comm.rank if comm.size > 1 else launched_rank()) == 0:
        if as_json:
            print(json.dumps(found, indent=1))
        else:
            show(found)
    if stage and not found["stages"][stage]["runs"]:
        reasons = "; ".join(map(sentence, found["stages"][stage]["missing"]))
        raise shared(UsageError(f"stage {stage!r} cannot run here: {reasons}"))


def examine() -> tuple[Facts, Comm]:
    """Collect all facts, the same on all ranks. MPI starts in this process only under a launcher."""
    launched = launch()
    comm: Comm = SerialComm()
    if not launched["launcher"]:
        launched["mpirun"] = mpirun()
        mpi = distant_mpi()
    else:
        try:
            comm = open_stage("mpi", None).comm
            mpi = running_mpi()
        except UsageError as error:
            mpi = {"problem": str(error)}
    ranks = [json.loads(facts) for facts in gather_bytes(comm, json.dumps(of_rank(comm)).encode())]
    stages = verdicts(launched, mpi, ranks)
    traps = warnings(launched, mpi, ranks)
    return {"launch": launched, "mpi": mpi, "ranks": ranks, "stages": stages, "warnings": traps}, comm


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
    owners = _grouped(
        ((each["what"], each["remedy"]), rank["rank"])
        for rank, of_rank in zip(ranks, troubles, strict=False)
        for each in of_rank
    )
    return [
        {"what": what, "remedy": remedy} | ({} if len(whose) == len(ranks) else {"ranks": whose})
        for (what, remedy), whose in owners.items()
    ]


def _grouped(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, list[Any]]:
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
    """What would slow a run down or spoil it without an error."""
    return [
        *_foreign_mpirun(launched, mpi),
        *_differences(ranks),
        *(warning for host in hosts(ranks) for warning in _cores(launched, host)),
        *_shared_gpus(ranks),
        *_not_kept(ranks),
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
        owners = _grouped((rank["versions"].get(name, "missing"), rank["rank"]) for rank in ranks)
        if len(owners) > 1:
            each = ", ".join(f"{version} on {named_ranks(whose)}" for version, whose in owners.items())
            yield f"the ranks have different versions of {name}: {each}"


def _cores(launched: Facts, ranks: list[Facts]) -> Iterable[str]:
    first = ranks[0]
    used = sum(rank["core_share"] for rank in ranks)
    who = f"{named_ranks([rank['rank'] for rank in ranks])} on {first['host']}"
    if any(rank["core_share"] < 1 - 1e-6 for rank in ranks):
        yield f"{who} share {used:.3g} cores: more ranks than cores only slow each other down"
    elif launched["launcher"] and used <= FEW * first["cores_of_host"]:
        yield (
            f"{who} may use {used:.3g} of {first['cores_of_host']} cores: to use more of them, ask "
            "the launcher (Open MPI: --bind-to none, srun: --cpus-per-task)"
        )
    if first["core_quota"] and first["core_quota"] < used - 1e-6:
        threads = max(1, int(first["core_quota"] / len(ranks)))
        quota = f"{first['core_quota']:.3g}"
        yield f"{who} see {used:.3g} cores but get the time of {quota}: use --threads {threads}"


def _shared_gpus(ranks: list[Facts]) -> Iterable[str]:
    names = {gpu["uuid"]: gpu["name"] for rank in ranks if (gpu := taken_gpu(rank))}
    for (host, uuid), users in gpu_users(ranks).items():
        if len(users) > 1:
            what = f"{names[uuid]} and its memory"
            yield f"{named_ranks(users)} on {host} share one {what}: start one rank per GPU"


def _not_kept(ranks: list[Facts]) -> Iterable[str]:
    without = [
        rank["rank"] for rank in ranks if not rank["compute"]["loops"] and not rank["compute"]["missing"]
    ]
    if without:
        yield f"{named_ranks(without)}: {NOT_KEPT}"


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
    """The ranks of each host."""
    return list(_grouped((rank["host"], rank) for rank in ranks).values())


def taken_gpu(rank: Facts) -> Facts | None:
    """The GPU that this rank takes in a GPU stage."""
    taken = rank["gpu"]["takes"]
    gpu: Facts | None = None if taken is None else rank["gpu"]["driver"]["gpus"][taken]
    return gpu


def gpu_users(ranks: list[Facts]) -> dict[tuple[str, str], list[int]]:
    """(host, uuid) of each GPU that is taken → the ranks that take it."""
    return _grouped(((rank["host"], gpu["uuid"]), rank["rank"]) for rank in ranks if (gpu := taken_gpu(rank)))


def show(found: Facts) -> None:
    """Print the page."""
    # Launchers give their ranks pipes, or terminals of no particular size.
    console = Console(highlight=False, force_terminal=False if found["launch"]["launcher"] else None)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDTH
    with console.capture() as page:
        for part in _parts(found, console.width < NARROW):
            console.print(part)
    print("\n".join(line.rstrip() for line in page.get().rstrip().splitlines()))


def _parts(found: Facts, narrow: bool) -> Iterable[RenderableType]:
    ranks = found["ranks"]
    first = ranks[0]
    versions = first["versions"]
    where = printable(f" with Python {versions['python']} on {first['system']}")
    yield Text.assemble((f"distgpt {versions['distgpt']}", "bold"), where, "\n")
    yield _indented(_pairs([*_machines(ranks), *_software(found), *_gpu_software(first["gpu"])]))
    if len(ranks) > 1:
        yield _indented(_rank_table(ranks))
    yield _indented(_stages(found["stages"], narrow))
    if found["warnings"]:
        yield "[yellow]worth a look"
        yield _indented(_pairs(("•", text) for text in found["warnings"]))


def _indented(part: RenderableType) -> Padding:
    return Padding(part, (0, 0, 1, 2))


def _pairs(rows: Iterable[tuple[str, str]]) -> Table:
    table = _grid(2)
    for name, text in rows:
        table.add_row(Text(name, "dim"), Text(printable(text)))
    return table


def _grid(columns: int) -> Table:
    """Nothing in it is cut: a word that does not fit is broken."""
    table = Table.grid(padding=(0, 2))
    for _ in range(columns):
        table.add_column(overflow="fold")
    return table


def _machines(ranks: list[Facts]) -> Iterable[tuple[str, str]]:
    all_hosts = hosts(ranks)
    for users in all_hosts[:MOST_ROWS]:
        first, memory = users[0], users[0]["memory"]
        cores = f"{first['cores']} of {first['cores_of_host']} cores"
        if memory["total"]:
            cores += f", {size(memory['total'])} of memory ({size(memory['available'])} free)"
        yield "host", f"{first['host']}: {first['cpu']}, {cores}"
        drivers = [rank["gpu"]["driver"] for rank in users if rank["gpu"]["driver"]]
        gpus = {gpu["uuid"]: gpu for driver in drivers for gpu in driver["gpus"]}.values()
        kinds = Counter((gpu["name"], gpu["memory"], *gpu["capability"]) for gpu in gpus)
        for (name, bytes_, major, minor), n in kinds.items():
            yield "", f"{n} × {name}, {size(bytes_)}, compute capability {major}.{minor}"
    if len(all_hosts) > MOST_ROWS:
        yield "", f"… and {len(all_hosts) - MOST_ROWS} more hosts"


def _software(found: Facts) -> Iterable[tuple[str, str]]:
    launched, mpi, first = found["launch"], found["mpi"], found["ranks"][0]
    versions, compute = first["versions"], first["compute"]
    blas = f" with {compute['blas']}" if compute["blas"] else ""
    tuned = f", tuned for {compute['core']}" if compute["core"] else ""
    yield "NumPy", f"{versions.get('numpy', 'not installed')}{blas}{tuned}"
    yield "Numba", versions.get("numba", "not installed")
    if compute["loops"]:
        yield "", f"compiled loops in {compute['loops']}"
    if mpi["problem"]:
        yield "MPI", "not ready: see below"
    else:
        aware = {True: ", CUDA-aware", False: ", not CUDA-aware", None: ""}[mpi["cuda_aware"]]
        yield "MPI", f"{mpi['vendor']} {mpi['version']} through mpi4py {versions['mpi4py']}{aware}"
    if launched["launcher"]:
        yield "launch", f"{count(launched['processes'], 'process')} by {launched['launcher']}"
    elif where := launched["mpirun"]["path"]:
        vendor = launched["mpirun"]["vendor"]
        yield "launch", f"a single process; mpirun is {where}" + (f" ({vendor})" if vendor else "")
    else:
        yield "launch", "a single process; there is no mpirun"


def _gpu_software(gpu: Facts) -> Iterable[tuple[str, str]]:
    if driver := gpu["driver"]:
        name = f"NVIDIA {driver['release']}".rstrip()
        yield "driver", f"{name}, runs CUDA up to {'.'.join(map(str, driver['cuda']))}"
    else:
        yield "driver", "no NVIDIA driver"
    packages = [f"{name} {version}" for name, version in gpu["packages"].items()]
    yield "for GPUs", ", ".join(packages) or "no packages"
    lacking = ", ".join(name for name in LIBRARIES if name not in gpu["libraries"])
    found = ", ".join(gpu["libraries"]) or "no libraries"
    yield "", found + (f"; not found: {lacking}" if lacking else "")


def _rank_table(ranks: list[Facts]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for heading in ("rank", "local", "cores", "host", "GPU"):
        table.add_column(heading, justify="left" if heading in ("host", "GPU") else "right", overflow="fold")
    users = gpu_users(ranks)
    for rank in ranks[:MOST_ROWS]:
        takes = "none"
        if gpu := taken_gpu(rank):
            others = [other for other in users[rank["host"], gpu["uuid"]] if other != rank["rank"]]
            takes = f"{rank['gpu']['takes']}: {gpu['name']}"
            takes += f", with {named_ranks(others)}" if others else ""
        cells = (rank["rank"], rank["local_rank"], f"{rank['core_share']:.3g}", rank["host"], takes)
        table.add_row(*(Text(printable(str(cell))) for cell in cells))
    if len(ranks) > MOST_ROWS:
        table.add_row("…", "", "", f"and {len(ranks) - MOST_ROWS} more: --json lists all")
    return table


def _stages(stages: Facts, narrow: bool) -> RenderableType:
    table, parts = _grid(3), list[RenderableType]()
    shown: dict[str, list[Facts]] = {}
    for name, verdict in stages.items():
        troubles = verdict["missing"]
        same = next((other for other, theirs in shown.items() if troubles and theirs == troubles), None)
        shown[name] = troubles
        runs = Text("runs", "green") if verdict["runs"] else Text("cannot run", "red")
        advice = [lines(sentence(each, "\n→ ")) for each in troubles + verdict["notes"]]
        text = Text(f"as {same}" if same else "\n".join(advice))
        text.highlight_regex("→ .*", "cyan")
        table.add_row(Text(name, "bold"), runs, text)
        parts.append(Text.assemble((name, "bold"), "  ", runs))
        parts += [Padding(text, (0, 0, 0, 2))] if text.plain else []
    return Group(*parts) if narrow else table
