"""`distgpt bench forward`: what it measures, tells, draws and leaves."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distgpt.comm.launched import launched_as
from distgpt.config.presets import preset
from distgpt.errors import UsageError
from distgpt.files import atomic_file
from distgpt.machine.launchers import Launcher, find_launcher
from distgpt.machine.stages import opened
from distgpt.measure.bench.failing import check_gpu
from distgpt.measure.bench.forward import Job, measure
from distgpt.measure.bench.methods import STAGE_OF
from distgpt.measure.bench.results import memory, prepare, save
from distgpt.measure.bench.study import (
    SERIES,
    Contest,
    Row,
    ablation,
    check_dtypes,
    dtypes_of,
    possible,
    scaled,
    study,
)
from distgpt.measure.bench.study_published import NAMES
from distgpt.measure.peer.running import torch_version
from distgpt.model.counts import parameters
from distgpt.model.model import Architecture
from distgpt.show.charts import LineChart, Series, standalone
from distgpt.show.tables import terminal_table
from distgpt.units import count

COLUMNS = (
    "preset",
    "method",
    "dtype",
    "ranks × threads",
    "seconds",
    "× serial",
    "names/s",
    "peak MB",
    "published s",
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The command line."""

    presets: Sequence[str]
    names: int | None
    methods: Sequence[str]
    dtypes: Sequence[str]
    ranks: int
    hostfile: Path | None
    launcher: str | None
    threads: int
    repeats: int
    patience: float
    peer: str | None
    sweep: str | None
    with_ablation: bool


def bench(wanted: Wanted, measure_only: bool, out: Path, as_json: bool) -> None:
    if measure_only or launched_as() > 1:
        _measure(wanted)
        return
    presets, name = _presets(wanted)
    contest = _contest(wanted)
    prepare(out)
    rows = study(contest, presets, wanted.names, wanted.sweep)
    parts = []
    if wanted.with_ablation:
        for each in presets:
            parts += ablation(contest, each, wanted.names or NAMES[each])
    found: dict[str, Any] = {"rows": rows, "sweep": wanted.sweep, "ablation": parts}
    print(json.dumps(found) if as_json else page(found), flush=True)
    path = save(out, "forward", name, found)
    for end, chart in charts(found):
        with atomic_file(path.with_name(f"{path.stem}{end}.svg")) as file:
            file.write(standalone(chart).encode())
    _say(f"written to {path}")


def _presets(wanted: Wanted) -> tuple[Sequence[str], str]:
    """Those to measure, and a name for the results."""
    if wanted.sweep in SERIES:
        presets = wanted.presets or SERIES[wanted.sweep]
        return presets, wanted.sweep
    presets = wanted.presets or ("S",)
    if wanted.sweep == "input" and len(presets) > 1:
        raise UsageError("--sweep input is over the names of one --preset")
    return presets, "-".join((*presets, wanted.sweep)) if wanted.sweep else "-".join(presets)


def _contest(wanted: Wanted) -> Contest:
    """Refuses what cannot be measured here, before anything is."""
    peer, launcher = wanted.peer or sys.executable, _launcher(wanted)
    asked_for_torch = wanted.peer is not None or any(method.startswith("torch") for method in wanted.methods)
    if asked_for_torch and torch_version(peer) is None:
        raise UsageError(f"--peer {Path(peer).name} cannot import torch: name a Python that can")
    methods = wanted.methods or possible(peer, launcher)
    check_dtypes(methods, wanted.dtypes, bool(wanted.methods))
    for method in wanted.methods:
        for dtype in dtypes_of(method, wanted.dtypes):
            check_gpu(STAGE_OF.get(method, ""), dtype, wanted.launcher, wanted.hostfile)
    return Contest(
        methods,
        wanted.dtypes,
        wanted.ranks,
        wanted.threads,
        wanted.repeats,
        wanted.patience,
        peer,
        launcher,
        _say,
        chosen=bool(wanted.methods),
    )


def _launcher(wanted: Wanted) -> Launcher | None:
    """None where there is none, and none is needed."""
    try:
        return find_launcher(wanted.launcher, wanted.hostfile)
    except UsageError:
        needed = any(STAGE_OF.get(method, "").startswith("mpi") for method in wanted.methods)
        if needed or wanted.launcher or wanted.hostfile:
            raise
        return None


def _measure(wanted: Wanted) -> None:
    """As these ranks, one method: rank 0 prints what was found."""
    methods = wanted.methods or (["mpi"] if launched_as() > 1 else ["batched"])
    presets = wanted.presets or ("S",)
    several = [what for what in (presets, methods, wanted.dtypes) if len(what) > 1]
    if several or wanted.sweep or wanted.with_ablation:
        raise UsageError("launched as one job, bench forward measures one preset, method and dtype: name one")
    (name,), (method,), (dtype,) = presets, methods, wanted.dtypes
    stage = opened(STAGE_OF.get(method, "serial"), wanted.threads or None)
    names = wanted.names or NAMES[name]
    job = Job(name, method, names, dtype, wanted.threads, wanted.repeats, wanted.patience)
    found = measure(job, stage)
    if stage.comm.rank == 0:
        print(json.dumps(found))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# -- what is told


def page(found: dict[str, Any]) -> str:
    tables = [terminal_table(COLUMNS, cells(found["rows"]))]
    if found["ablation"]:
        rows = [
            [r["preset"], "batched" if r["batched"] else "one at a time", r["dtype"], _seconds(r), times(r)]
            for r in found["ablation"]
        ]
        tables.append(terminal_table(("preset", "names", "dtype", "seconds", "× plain"), rows))
    notes = [
        f"{r['preset']}, {r['method']}: in proportion from {r['measured']:,} of {count(r['names'], 'name')}"
        for r in [*found["rows"], *found["ablation"]]
        if scaled(r)
    ]
    if notes:
        notes.append("* in proportion, or compared with what is")
    if any(r["method"].startswith("torch") for r in found["rows"]):
        notes.append("torch keeps the memory it has freed, which makes it faster and larger")
    if any(r["published_s"] for r in found["rows"]):
        notes.append(
            "published: seconds of the study on its own machine, with its own PyTorch, C++ (serial) and CUDA"
        )
    return "\n\n".join([*tables, *(["\n".join(notes)] if notes else [])])


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """The study's table; a star marks what rests on a part of the names."""
    return [
        [
            r["preset"],
            r["method"],
            r["dtype"],
            f"{r['ranks']} × {r['threads']}",
            _seconds(r),
            times(r),
            f"{r['names'] / r['seconds']:,.0f}" + "*" * scaled(r),
            memory(r),
            f"{r['published_s']:,.2f}" if r["published_s"] else "",
        ]
        for r in rows
    ]


def _seconds(r: Row) -> str:
    return _number(r["seconds"], 3) + "*" * scaled(r)


def times(r: Row) -> str:
    """How many times as fast as the plain way, if that was measured."""
    return _number(r["speedup"], 2) + "*" * r.get("speedup_scaled", False) if r["speedup"] else ""


def _number(value: float, digits: int) -> str:
    """Small ones with that many digits that count."""
    return f"{value:,.1f}" if value >= 10 else f"{value:#.{digits}g}"


def charts(found: dict[str, Any]) -> list[tuple[str, LineChart]]:
    """Of a sweep: seconds by size. What comes behind the file's name, and the chart."""
    if found["sweep"] is None:
        return []
    by_names = found["sweep"] == "input"
    lines: dict[str, list[tuple[float, float]]] = {}
    in_proportion = {who(r) for r in found["rows"] if scaled(r)}
    for r in found["rows"]:
        size = r["names"] if by_names else model_size(r["preset"])
        lines.setdefault(who(r), []).append((size, r["seconds"]))
    presets = ", ".join(dict.fromkeys(r["preset"] for r in found["rows"]))
    over = "names" if by_names else "parameters"
    several = not by_names and len({r["names"] for r in found["rows"]}) > 1
    grows = ", more names for larger models" if several else ""
    text = f"Seconds for the mean loss over all names, by the number of {over}{grows}; presets {presets}."
    if in_proportion:
        text += " Dashed and with a star: some of its sizes were measured on a part of the names only."
    chart = LineChart(
        title=f"Forward pass: seconds over {over}{grows}",
        description=text,
        x_label=over,
        y_label="seconds",
        series=[_line(name, sorted(points), name in in_proportion) for name, points in lines.items()],
        log_x=True,
        log_y=True,
    )
    return [("", chart)]


def _line(name: str, points: Sequence[tuple[float, float]], in_part: bool) -> Series:
    return Series(name + " *" * in_part, [x for x, _ in points], [y for _, y in points], dashed=in_part)


def who(r: Row) -> str:
    return f"{r['method']}, {r['dtype']}"


def model_size(name: str) -> int:
    return parameters(Architecture(preset(name).model)).total
