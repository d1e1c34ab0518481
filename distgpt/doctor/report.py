"""The doctor's report: the facts of all ranks, and what this launch can run by them (verdicts.py).

`distgpt doctor` prints them once for all ranks, as a page of 100 columns or as JSON.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from distgpt.core.base.errors import UsageError, escape, escape_lines
from distgpt.core.base.formatting import count, size, three_digits
from distgpt.core.comm.agree import gather_bytes, named_ranks, on_every_rank, shared
from distgpt.core.comm.api import Comm
from distgpt.core.comm.serial import SerialComm
from distgpt.core.cpu.stages import open_stage
from distgpt.doctor.facts import Facts, auto_dtype, matmuls, of_rank
from distgpt.doctor.launches import around, lines
from distgpt.doctor.node import advice, nodes, of_host, summary
from distgpt.doctor.verdicts import gpu_users, grouped, hosts, sentence, taken_gpu, verdicts, warnings
from distgpt.jobs.launchers import distant_mpi, launch, running_mpi
from distgpt.launch.environment import launched_rank
from distgpt.layout.bind import wanted

WIDTH = 100
MOST_ROWS = 64


def report(stage: str | None, as_json: bool) -> None:
    """Print the facts once for all ranks; a `stage` that cannot run in this launch is an error."""
    found, comm = examine(measured=True)
    if (comm.rank if comm.size > 1 else launched_rank()) == 0:
        if as_json:
            print(json.dumps(found, indent=1))
        else:
            show(found)
    if stage and not found["stages"][stage]["runs"]:
        reasons = "; ".join(map(sentence, found["stages"][stage]["missing"]))
        raise shared(UsageError(f"stage {stage!r} cannot run here: {reasons}"))


def examine(measured: bool = False) -> tuple[Facts, Comm]:
    """Collect all facts, the same on all ranks. MPI starts in this process only under a launcher.

    `measured`: among them how fast this rank's cores are, while those of the other ranks are at work too.
    """
    launched = launch()
    comm: Comm = SerialComm()
    if not launched["launcher"]:
        mpi = distant_mpi()
        launched |= around(mpi)
    else:
        try:
            comm = open_stage("mpi", None).comm
            mpi = running_mpi()
        except UsageError as error:
            mpi = {"problem": str(error)}
    mine = of_rank(comm)
    mine["node"] = None if comm.local_rank else of_host()
    mine["bind"] = on_every_rank(comm, wanted)
    if measured:
        mine["matmul"] = matmuls(comm, mine["compute"])
        mine["auto_dtype"] = auto_dtype()
    ranks = [json.loads(facts) for facts in gather_bytes(comm, json.dumps(mine).encode())]
    found = {
        "launch": launched,
        "mpi": mpi,
        "nodes": nodes(ranks, bool(launched["launcher"])),
        "ranks": ranks,
        "stages": verdicts(launched, mpi, ranks),
        "warnings": warnings(launched, mpi, ranks),
    }
    return found, comm


def show(found: Facts) -> None:
    """Print the page."""
    # Launchers give their ranks pipes, or terminals of no particular size.
    print_page(_parts(found), plain=bool(found["launch"]["launcher"]))


def _parts(found: Facts) -> Iterable[RenderableType]:
    ranks = found["ranks"]
    first = ranks[0]
    versions = first["versions"]
    where = escape(f" with Python {versions['python']} on {first['system']}")
    yield Text.assemble((f"distgpt {versions['distgpt']}", "bold"), where, "\n")
    yield indented(pairs([*_machines(ranks), *_software(found), *_gpu_software(first["gpu"])]))
    for node in found["nodes"]:
        names = f"{', '.join(node['hosts'])}: " if len(found["nodes"]) > 1 else ""
        lines = [("node", names + summary(node)), *(("", note) for note in node["notes"])]
        yield indented(pairs([*lines, ("best", advice(node))]))
    if len(ranks) > 1:
        yield indented(_rank_table(ranks))
    yield indented(_stages(found["stages"]))
    if found["warnings"]:
        yield "[yellow]worth a look"
        yield indented(pairs(("•", text) for text in found["warnings"]))


def _machines(ranks: list[Facts]) -> Iterable[tuple[str, str]]:
    all_hosts = hosts(ranks)
    for users in all_hosts[:MOST_ROWS]:
        first, memory = users[0], users[0]["memory"]
        cores = f"{first['cores']} of {first['cores_of_host']} cores"
        if memory["total"]:
            by = f" by {memory['limit']}" if memory["limit"] else ""
            cores += f", {size(memory['total'])} of memory{by} ({size(memory['available'])} free)"
        yield "host", f"{first['host']}: {first['cpu']}, {cores}"
        drivers = [rank["gpu"]["driver"] for rank in users if rank["gpu"]["driver"]]
        gpus = {gpu["uuid"]: gpu for driver in drivers for gpu in driver["gpus"]}.values()
        kinds = Counter((gpu["name"], gpu["memory"], *gpu["capability"]) for gpu in gpus)
        for (name, bytes_, major, minor), n in kinds.items():
            yield "", f"{n} × {name}, {size(bytes_)}, compute capability {major}.{minor}"
    if len(all_hosts) > MOST_ROWS:
        yield "", f"… and {len(all_hosts) - MOST_ROWS} more hosts"
    yield from _processors(ranks)


def _processors(ranks: list[Facts]) -> Iterable[tuple[str, str]]:
    """Yield each processor's features, and the kind and speed of its matmuls."""
    kinds = {(rank["cpu"], str(rank["features"])): rank for rank in ranks if rank["features"]["names"]}
    for rank in kinds.values():
        found = ", ".join(rank["features"]["names"])
        yield "CPU", f"{rank['cpu']}: {found}" if len(kinds) > 1 else found
        if rank["features"]["amx"]:
            yield "", f"AMX: {rank['features']['amx']}"
    for dtype in ranks[0].get("matmul", {}):  # where it was measured
        of_dtype = (rank["matmul"][dtype] for rank in ranks)
        for (how, problem), same in grouped(((of["how"], of["problem"]), of) for of in of_dtype).items():
            if how:  # otherwise nothing computes there, which the verdicts say
                yield dtype, f"{how}: " + (f"not measured ({problem})" if problem else _rates(same))
    if auto := ranks[0].get("auto_dtype"):
        yield "--dtype auto", f"on CPUs {auto}"


def _rates(found: list[Facts]) -> str:
    """Return how fast these ranks multiply, all at the same time."""
    rates = [each["gflops"] for each in found]
    together = f"{three_digits(sum(rates))} GFLOP/s"
    if len(rates) == 1:
        return f"{together} with {count(found[0]['threads'], 'thread')}"
    each = " to ".join(dict.fromkeys(three_digits(rate) for rate in (min(rates), max(rates))))
    return f"{together} by {len(rates)} ranks, {each} each"


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
        if mpi.get("library"):
            yield "", f"from {mpi['library']}"
    if launched["launcher"]:
        yield "launch", f"{count(launched['processes'], 'process')} by {launched['launcher']}"
    elif where := launched["mpirun"]["path"]:
        vendor = launched["mpirun"]["vendor"]
        yield "launch", f"a single process; mpirun is {where}" + (f" ({vendor})" if vendor else "")
    else:
        yield "launch", "a single process; there is no mpirun"
    for i, line in enumerate(lines(launched, mpi)):
        yield ("" if i else "start ranks"), line


def _gpu_software(gpu: Facts) -> Iterable[tuple[str, str]]:
    from distgpt.gpu.probe import LIBRARIES

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
    table = headed("rank", "local", "cores", left=("host", "GPU"))
    users = gpu_users(ranks)
    for rank in ranks[:MOST_ROWS]:
        takes = "none"
        if gpu := taken_gpu(rank):
            others = [other for other in users[rank["host"], gpu["uuid"]] if other != rank["rank"]]
            takes = f"{rank['gpu']['takes']}: {gpu['name']}"
            takes += f", with {named_ranks(others)}" if others else ""
        share = f"{rank['core_share']:.3g}"
        table.add_row(*cells(rank["rank"], rank["local_rank"], share, rank["host"], takes))
    if len(ranks) > MOST_ROWS:
        table.add_row("…", "", "", f"and {len(ranks) - MOST_ROWS} more: --json lists all")
    return table


def _stages(stages: Facts) -> Table:
    """Tabulate for each stage a verdict and sentences, where an arrow begins what to do."""
    table = grid(3)
    shown: dict[str, list[Facts]] = {}
    for name, verdict in stages.items():
        troubles = verdict["missing"]
        same = next((other for other, theirs in shown.items() if troubles and theirs == troubles), None)
        shown[name] = troubles
        sentences = [f"as {same}"] if same else [sentence(t, "\n→ ") for t in troubles + verdict["notes"]]
        text = Text("\n".join(map(escape_lines, sentences)))
        text.highlight_regex("→ .*", "cyan")
        runs = Text("runs", "green") if verdict["runs"] else Text("cannot run", "red")
        table.add_row(Text(name, "bold"), runs, text)
    return table


# The parts of pages, which that of hosts (hosts.py) has too.


def print_page(parts: Iterable[RenderableType], plain: bool = False) -> None:
    """Print these; `plain`: as if there were no terminal."""
    console = Console(highlight=False, force_terminal=False if plain else None)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDTH
    with console.capture() as page:
        for part in parts:
            console.print(part)
    print("\n".join(line.rstrip() for line in page.get().rstrip().splitlines()))


def indented(part: RenderableType) -> Padding:
    return Padding(part, (0, 0, 1, 2))


def grid(columns: int) -> Table:
    """Nothing in it is cut: a word that does not fit is broken."""
    table = Table.grid(padding=(0, 2))
    for _ in range(columns):
        table.add_column(overflow="fold")
    return table


def pairs(rows: Iterable[tuple[str, str]]) -> Table:
    table = grid(2)
    for name, text in rows:
        table.add_row(Text(name, "dim"), Text(escape(text)))
    return table


def headed(*right: str, left: tuple[str, ...] = ()) -> Table:
    """A table with these headings: first those of columns of numbers, then those of words."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for heading in (*right, *left):
        table.add_column(heading, justify="left" if heading in left else "right", overflow="fold")
    return table


def cells(*values: object) -> list[Text]:
    return [Text(escape(str(value))) for value in values]
