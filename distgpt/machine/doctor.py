"""`distgpt doctor`: the diagnosis as a page of 100 columns or as JSON, told once for all ranks."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable

import click
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from distgpt.comm.agree import named_ranks, shared
from distgpt.comm.launched import launched_rank
from distgpt.errors import UsageError
from distgpt.gpu.probe import LIBRARIES
from distgpt.machine.diagnosis import examine, gpu_users, hosts, sentence, taken_gpu, where
from distgpt.machine.facts import Facts

WIDTH = 100
MOST_ROWS = 64


def consult(stage: str | None, as_json: bool) -> None:
    """Report once for all ranks; a `stage` that cannot run in this launch is an error."""
    report, comm = examine()
    if (comm.rank if comm.size > 1 else launched_rank()) == 0:
        if as_json:
            click.echo(json.dumps(report, indent=1))
        else:
            show(report)
    if stage and not report["stages"][stage]["runs"]:
        reasons = "; ".join(map(sentence, report["stages"][stage]["missing"]))
        raise shared(UsageError(f"stage {stage!r} cannot run here: {reasons}"))


def show(report: Facts) -> None:
    """Print the report."""
    # Launchers hand their ranks pipes, or terminals of no particular size.
    console = Console(highlight=False, force_terminal=False if report["launch"]["launcher"] else None)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDTH
    with console.capture() as page:
        for part in _parts(report):
            console.print(part)
    click.echo("\n".join(line.rstrip() for line in page.get().rstrip().splitlines()))


def _parts(report: Facts) -> Iterable[RenderableType]:
    ranks = report["ranks"]
    first = ranks[0]
    versions = first["versions"]
    yield f"[bold]distgpt {versions['distgpt']}[/] with Python {versions['python']} on {first['system']}\n"
    yield _indented(_pairs([*_machines(ranks), *_software(report), *_gpu_software(first["gpu"])]))
    if len(ranks) > 1:
        yield _indented(_rank_table(ranks))
    yield _indented(_stage_table(report["stages"]))
    if report["warnings"]:
        yield "[yellow]worth a look"
        yield _indented(_pairs(("•", text) for text in report["warnings"]))


def _indented(table: Table) -> Padding:
    return Padding(table, (0, 0, 1, 2))


def _pairs(rows: Iterable[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, text in rows:
        table.add_row(Text(name, "dim"), Text(text))
    return table


def _machines(ranks: list[Facts]) -> Iterable[tuple[str, str]]:
    all_hosts = hosts(ranks)
    for users in all_hosts[:MOST_ROWS]:
        first, memory = users[0], users[0]["memory"]
        cores = f"{first['cores']} of {first['cores_of_host']} cores"
        size = f", {_gigabytes(memory['total'])} of memory ({_gigabytes(memory['available'])} free)"
        yield "host", f"{first['host']}: {first['cpu']}, {cores}" + (size if memory["total"] else "")
        gpus = {gpu["uuid"]: gpu for rank in users for gpu in _gpus(rank)}
        for (name, bytes_, capability), count in Counter(map(_kind, gpus.values())).items():
            yield "", f"{count} × {name}, {_gigabytes(bytes_)}, compute capability {capability}"
    if len(all_hosts) > MOST_ROWS:
        yield "", f"… and {len(all_hosts) - MOST_ROWS} more hosts"


def _software(report: Facts) -> Iterable[tuple[str, str]]:
    launched, mpi, first = report["launch"], report["mpi"], report["ranks"][0]
    versions, compute = first["versions"], first["compute"]
    blas = f" with {compute['blas']}" if compute["blas"] else ""
    tuned = f", tuned for {compute['core']}" if compute["core"] else ""
    yield "NumPy", f"{versions.get('numpy', 'not installed')}{blas}{tuned}"
    yield "Numba", versions.get("numba", "not installed")
    if mpi["problem"]:
        yield "MPI", "not ready: see below"
    else:
        aware = {True: ", CUDA-aware", False: ", not CUDA-aware", None: ""}[mpi["cuda_aware"]]
        yield "MPI", f"{mpi['vendor']} {mpi['version']} through mpi4py {versions['mpi4py']}{aware}"
    if launched["launcher"]:
        yield "launch", f"{_processes(launched['processes'])} by {launched['launcher']}"
    elif launched["mpirun"]["path"]:
        vendor = launched["mpirun"]["vendor"]
        yield (
            "launch",
            f"on its own; mpirun is {launched['mpirun']['path']}" + (f" ({vendor})" if vendor else ""),
        )
    else:
        yield "launch", "on its own; there is no mpirun"


def _gpu_software(gpu: Facts) -> Iterable[tuple[str, str]]:
    if driver := gpu["driver"]:
        runs = f"runs CUDA up to {'.'.join(map(str, driver['cuda']))}"
        yield "driver", f"NVIDIA {driver['release']}, {runs}" if driver["release"] else f"NVIDIA, {runs}"
    else:
        yield "driver", "no NVIDIA driver"
    packages = [f"{name} {version}" for name, version in gpu["packages"].items()]
    yield "for GPUs", ", ".join(packages) or "no packages"
    lacking = ", ".join(name for name in LIBRARIES if name not in gpu["libraries"])
    found = ", ".join(gpu["libraries"]) or "no libraries"
    yield "", found + (f"; not found: {lacking}" if lacking else "")


def _rank_table(ranks: list[Facts]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for heading in ("rank", "local", "cores"):
        table.add_column(heading, justify="right")
    table.add_column("host")
    table.add_column("GPU")
    users = gpu_users(ranks)
    for rank in ranks[:MOST_ROWS]:
        gpu = taken_gpu(rank)
        takes = "none"
        if gpu:
            others = [other for other in users[rank["host"], gpu["uuid"]] if other != rank["rank"]]
            takes = f"{rank['gpu']['takes']}: {gpu['name']}" + (
                f", with {named_ranks(others)}" if others else ""
            )
        cells = (rank["rank"], rank["local_rank"], f"{rank['core_share']:.3g}", rank["host"], takes)
        table.add_row(*(Text(str(cell)) for cell in cells))
    if len(ranks) > MOST_ROWS:
        table.add_row("…", "", "", f"and {len(ranks) - MOST_ROWS} more: --json tells all")
    return table


def _stage_table(stages: Facts) -> Table:
    table = Table.grid(padding=(0, 2))
    told: dict[str, list[Facts]] = {}
    for name, verdict in stages.items():
        troubles = verdict["missing"]
        same = next((other for other, its in told.items() if troubles and its == troubles), None)
        told[name] = troubles
        runs = Text("runs", "green") if verdict["runs"] else Text("cannot run", "red")
        text = Text(f"as {same}") if same else Text("\n").join(map(_lines, troubles + verdict["notes"]))
        table.add_row(Text(name, "bold"), runs, text)
    return table


def _lines(trouble: Facts) -> Text:
    text = Text(f"{where(trouble)}{trouble['what']}")
    if trouble["remedy"]:
        text.append(f"\n→ {trouble['remedy']}", "cyan")
    return text


def _gpus(rank: Facts) -> list[Facts]:
    driver = rank["gpu"]["driver"]
    return list(driver["gpus"]) if driver else []


def _kind(gpu: Facts) -> tuple[str, int, str]:
    return gpu["name"], gpu["memory"], ".".join(map(str, gpu["capability"]))


def _processes(n: int) -> str:
    return "1 process" if n == 1 else f"{n} processes"


def _gigabytes(bytes_: int) -> str:
    return f"{bytes_ / 2**30:.3g} GiB"
