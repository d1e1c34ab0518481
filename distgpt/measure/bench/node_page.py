"""The page of `distgpt bench node`, its verdict on bits, and its figures by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distgpt.core.base.formatting import count, duration
from distgpt.core.base.formatting import size as in_bytes
from distgpt.measure.bench import allreduce
from distgpt.measure.compare.agreement import TOLERANCES, relative
from distgpt.show.charts import LineChart, line
from distgpt.show.page import Block, Column, KeyValues, Paragraph, Section, Verdict, html, tabulated

Row = dict[str, Any]
# Of the fixed run (node_jobs.py) after its steps, on a Zen 4, and the hash of its weights there. Other
# processors multiply in another order: their losses agree within rounding, and their bits need not.
RECORDED_LOSS = 2.968637704849243
RECORDED_WEIGHTS = "e700302a274718c73b6cb19598f2fca842f1ed42eb1fd1069339b68ac4b20b93"
TOLERANCE = TOLERANCES["float32"]
NO_TIME = "no time was left"
NO_BITS = "bits were not compared"
MORE_TIME = (
    "Give more --minutes to measure these, too. The first run on a machine also compiles kernels: the next is"
    " faster."
)


# -- bits


def judged(rows: Sequence[Row]) -> Row | None:
    """Return whether all runs have the same bits, and the loss that was recorded; None without runs."""
    if not rows:
        return None
    first = rows[0]
    others = [row for row in rows if (row["losses"], row["weights"]) != (first["losses"], first["weights"])]
    loss = first["losses"][-1]
    apart = relative(loss, RECORDED_LOSS)
    places = [_place(row) for row in rows]
    if others:
        which = ", ".join(map(_place, others))
        verdict = f"losses or weights on {which} (ranks × threads) are other ones than on {places[0]}"
    elif apart > TOLERANCE:
        verdict = (
            f"the loss is {loss:.7g}, further from the recorded {RECORDED_LOSS:.7g} than rounding explains"
        )
    else:
        alike = (
            "the recorded bits"
            if first["weights"] == RECORDED_WEIGHTS
            else f"within {apart:.1e} of the record"
        )
        same = f"the same bits on {', '.join(places)} (ranks × threads)" if len(rows) > 1 else "one run"
        verdict = f"{same}; loss {loss:.7g}, {alike} (tolerance {TOLERANCE:.0e})"
    return {
        "right": not others and apart <= TOLERANCE,
        "verdict": verdict,
        "is_recorded": first["weights"] == RECORDED_WEIGHTS,
        "loss": loss,
        "apart": apart,
        "weights": first["weights"],
        "places": places,
    }


def _place(row: Row) -> str:
    hosts = f" on {count(row['hosts'], 'host')} of the hostfile" if "of_hostfile" in row else ""
    return f"{row['ranks']} × {row['threads']}{hosts}"


# -- figures


def figures(found: Row) -> dict[str, dict[str, object]]:
    """Return the figures that a site follows over time, by stable names: a value and a unit each."""
    every: dict[str, dict[str, object]] = {}

    def add(name: str, value: float | None, unit: str) -> None:
        if value is not None:
            every[name] = {"value": value, "unit": unit}

    most = found["node"]["threads"]
    for row in found["peaks"]:
        if row["threads"] == most:
            add(f"peak_{row['dtype']}", row["gflops"], "GFLOP/s")
            if row["dtype"] == found["dtype"]:
                add("memory", row["gbytes_per_s"], "GB/s")
    for row in found["training"]:
        place = "" if (row["ranks"], row["threads"]) == (1, most) else f"_{row['ranks']}x{row['threads']}"
        name = f"train_{row['preset']}_{row['dtype']}{place}{_hosts_in_name(row)}"
        add(name, row["tokens_per_s"], "tokens/s")
        add(f"{name}_energy", row.get("joules_per_token"), "J/token")
    for sums in found["exchange"]:
        # By the fastest way, which a run takes. Of sizes for which time ran out some ways are missing.
        sizes = by_size(sums)
        whole = [size for size, own in sizes.items() if len(own) == max(map(len, sizes.values()))]
        fastest = max(row["bytes_per_s"] for row in sizes[max(whole)].values())
        add(f"sum_{sums['ranks']}_ranks", fastest / 1e9, "GB/s")
    if disk := found["disk"]:
        add("checkpoint_write", disk["write_bytes_per_s"] / 1e9, "GB/s")
        add("checkpoint_read", disk["read_bytes_per_s"] / 1e9, "GB/s")
    for row in found["generation"]:
        add(f"generate_{row['requests']}", row["whole"], "tokens/s")
    return every


def _hosts_in_name(row: Row) -> str:
    """Return what tells hosts of the hostfile from this node; names with several are older than the mark."""
    return f"_{count(row['hosts'], 'host').replace(' ', '_')}" if _is_of_hosts(row) else ""


def _is_of_hosts(row: Row) -> bool:
    return "of_hostfile" in row or row["hosts"] > 1


def by_size(sums: Row) -> dict[int, dict[str, Row]]:
    """Return the sums over ranks by size, and then by algorithm."""
    found: dict[int, dict[str, Row]] = {}
    for row in sums["rows"]:
        found.setdefault(row["bytes"], {})[row["algorithm"]] = row
    return found


# -- the page

PEAKS: tuple[Column, ...] = (
    ("threads", "threads", str),
    ("dtype", "dtype", str),
    ("matmul, GFLOP/s", "gflops", "{:,.0f}".format),
    ("memory, GB/s", "gbytes_per_s", "{:,.1f}".format),
)
MEASURED: tuple[Column, ...] = (
    ("tokens a step", "", lambda row: f"{row['batch_size'] * row['seq_len']:,}"),
    ("step", "step_s", duration),
    ("steps", "steps", str),
    ("tokens/s", "tokens_per_s", "{:,.0f}".format),
    ("mJ/token", "joules_per_token", lambda joules: f"{1e3 * joules:.3g}"),
)
TRAINING: tuple[Column, ...] = (
    ("preset", "preset", str),
    ("dtype", "dtype", str),
    *MEASURED,
)
SCALING: tuple[Column, ...] = (
    ("hosts", "", lambda row: str(row["hosts"]) if _is_of_hosts(row) else "this node"),
    ("ranks", "ranks", str),
    ("threads each", "threads", str),
    *MEASURED,
    ("× one core", "times", "{:.2f}".format),
)
GENERATION: tuple[Column, ...] = (
    ("requests", "requests", str),
    ("dtype", "dtype", str),
    ("prefill, tokens/s", "prefill", "{:,.0f}".format),
    ("decode, tokens/s", "decode", "{:,.1f}".format),
    ("whole, tokens/s", "whole", "{:,.1f}".format),
)
DISK: tuple[Column, ...] = (
    ("checkpoint", "bytes", in_bytes),
    ("written in", "write_s", duration),
    ("GB/s", "write_bytes_per_s", allreduce.gigabytes),
    ("read in", "read_s", duration),
    ("GB/s read", "read_bytes_per_s", allreduce.gigabytes),
)


def scaled(found: Row) -> list[Row]:
    """Return the rows of the model that cores, ranks and hosts are compared by, from one core on."""
    rows = [r for r in found["training"] if (r["preset"], r["dtype"]) == (found["model"], found["dtype"])]
    rows.sort(key=lambda row: (_is_of_hosts(row), row["hosts"], row["ranks"] * row["threads"], row["ranks"]))
    one = next((r["tokens_per_s"] for r in rows if r["ranks"] * r["threads"] == 1), None)
    return [row | ({"times": row["tokens_per_s"] / one} if one else {}) for row in rows]


def chart(rows: Sequence[Row]) -> LineChart | None:
    """Draw tokens/s over cores, of one process, of ranks and of hosts; None for one number of cores."""
    here = [row for row in rows if not _is_of_hosts(row)]
    ways = {
        "one process": [row for row in here if row["ranks"] == 1],
        "ranks": [row for row in here if row["ranks"] > 1],
        "hosts of the hostfile": [row for row in rows if _is_of_hosts(row)],
    }
    points = {
        name: [(row["ranks"] * row["threads"], row["tokens_per_s"]) for row in own]
        for name, own in ways.items()
        if own
    }
    if len({x for own in points.values() for x, _ in own}) < 2:
        return None
    series = [line(name, own) for name, own in points.items()]
    most = max(x for own in points.values() for x, _ in own)
    if one := dict(points.get("one process", ())).get(1):
        series.append(line("one core times as many", [(1, one), (most, one * most)], dashed=True))
    fastest = max(y for own in points.values() for _, y in own)
    about = f"Up to {fastest:,.0f} tokens a second on up to {count(most, 'core')}."
    return LineChart("Cores and ranks", about, "cores", "tokens per second", series, log_x=True, log_y=True)


def exchanged(sums: Row) -> list[Block]:
    """Return a table with a line for each size and a column for each algorithm, and the same drawn."""
    algorithms = list(dict.fromkeys(row["algorithm"] for row in sums["rows"]))
    lines = [
        {"bytes": size, **{name: row["seconds"] for name, row in own.items()}}
        | {"fastest": max(row["bytes_per_s"] for row in own.values())}
        for size, own in by_size(sums).items()
    ]
    columns: tuple[Column, ...] = (
        ("array", "bytes", in_bytes),
        *[(name, name, duration) for name in algorithms],
        ("GB/s of the fastest", "fastest", allreduce.gigabytes),
    )
    missing = allreduce.left_out(sums)
    table = tabulated(columns, lines, allreduce.heading(sums), unknown="–")
    return [table, allreduce.time_chart(sums), *map(Paragraph, missing)]


def sections(found: Row) -> list[Section]:
    """Return the parts of the page that have something to show."""
    node, bits = found["node"], found["bits"]
    energy = found["energy"]
    read = f"counters of {' and '.join(energy)}, whoever uses them" if isinstance(energy, list) else energy
    where = (
        f"{count(node['sockets'], 'socket')}, {count(node['regions'], 'NUMA region')},"
        f" {count(node['cores'], 'core')}, {count(node['cpus'], 'CPU')}, {in_bytes(node['memory_bytes'])}"
    )
    facts = KeyValues([("node", where), ("chosen type", found["dtype"]), ("energy", read)])
    rows = scaled(found)
    drawn = chart(rows)
    whole = 1, node["threads"]
    here = [r for r in found["training"] if (r["ranks"], r["threads"]) == whole and not _is_of_hosts(r)]
    note = "Each core has two sequences of 256 tokens, so that a step takes about as long on any number."
    lacked_time = any(row["why"] == NO_TIME for row in found["left_out"])
    columns: tuple[Column, ...] = (("part", "part", str), ("what", "what", str), ("why", "why", str))
    left = tabulated(columns, found["left_out"], "Not measured", MORE_TIME if lacked_time else "")
    every: list[tuple[str, list[Block]]] = [
        ("The node", [facts]),
        ("Right bits", [Verdict(bits["right"], bits["verdict"]) if bits else Verdict(False, NO_BITS)]),
        ("Peaks", [tabulated(PEAKS, found["peaks"])] if found["peaks"] else []),
        ("Training", [tabulated(TRAINING, here)] if here else []),
        (
            "Cores, ranks, hosts",
            [
                tabulated(SCALING, rows, f"{found['model']} in {found['dtype']}", note),
                *([drawn] if drawn else []),
            ]
            if len(rows) > 1
            else [],
        ),
        ("Exchange", [block for sums in found["exchange"] for block in exchanged(sums)]),
        ("Disk", [tabulated(DISK, [found["disk"]])] if found["disk"] else []),
        ("Generation", [tabulated(GENERATION, found["generation"])] if found["generation"] else []),
        ("Left out", [left] if found["left_out"] else [Paragraph("Nothing was left out.")]),
    ]
    return [Section(title, own) for title, own in every if own]


def blocks(found: Row) -> list[Block]:
    """Return what a terminal shows."""
    return [block for section in sections(found) for block in section.blocks]


def page(found: Row) -> str:
    """Render the page of a result that was read from its file, with the environment."""
    about = found["environment"]
    lead = f"{about['processor']}, {count(about['cores'], 'core')}; {about['system']}; {about['date']}."
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    time = f"{found['minutes']:g} minutes asked for, {duration(found['seconds'])} taken"
    return html("distgpt on a node", lead, sections(found), f"distgpt bench node: {time}. {versions}.")
