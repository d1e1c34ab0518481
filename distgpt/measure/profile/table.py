"""A profile as text for a terminal."""

from __future__ import annotations

from typing import Any

from distgpt.comm.agree import named_ranks
from distgpt.measure.profile.operations import TRANSFER, WAIT, WORKERS
from distgpt.measure.profile.result import MEMORY, PRODUCTS
from distgpt.show.tables import terminal_table
from distgpt.units import count

COLUMNS = ("operation", "share", "calls", "ms a step", "achieved", "of peak")
IN_CACHE = 1.05  # of what memory delivers: more has not come from there
ABOVE = 1.05  # of what products reach: more can't be


def as_text(found: dict[str, Any]) -> str:
    """What was measured, the table, what it is held against, and the ranks where there are several."""
    lines = [_headline(found), "", terminal_table(COLUMNS, [_cells(row) for row in found["rows"]]), ""]
    lines.append(_peaks(found))
    if len(found["per_rank"]) > 1:
        lines += ["", _ranks(found["per_rank"])]
    return "\n".join(lines)


def _headline(found: dict[str, Any]) -> str:
    told, of_all = found["ranks_told"], found["ranks"]
    alone = f": {named_ranks(told)} of {of_all} alone" if len(told) < of_all else ""
    interrupted = f"interrupted{alone}; " if found.get("interrupted") else ""
    threads = f" of {count(found['threads'], 'thread')}" if found["threads"] else ""
    return (
        f"{interrupted}{count(found['steps'], 'step')} of {1000 * found['step_s']:,.1f} ms"
        f" ({found['tokens_per_s']:,.0f} tokens/s); stage {found['stage']},"
        f" {count(found['ranks'], 'rank')}{threads}; {found['parameters']:,} parameters, {found['dtype']}"
    )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    calls = f"{row['calls']:,.0f}" if row["calls"] else ""
    if row["gflops"]:
        rate = f"{row['gflops']:,.0f} GFLOP/s" if row["gflops"] >= 10 else f"{row['gflops']:.2f} GFLOP/s"
    else:
        rate = f"{row['gbytes_per_s']:,.1f} GB/s" if row["gbytes_per_s"] else ""
    return row["row"], f"{row['share']:.1%}", calls, f"{row['ms']:,.2f}", rate, _of_peak(row)


def _of_peak(row: dict[str, Any]) -> str:
    if row["of_peak"] is None:
        return ""
    if row["peak"] == MEMORY and row["of_peak"] > IN_CACHE:
        return "in cache"
    return f"{row['of_peak']:.0%} of {row['peak']}"


def _peaks(found: dict[str, Any]) -> str:
    peaks = found["peaks"]
    told = found["ranks_told"]
    alone = named_ranks(told) if len(told) < found["ranks"] else ""
    part = f"The part of {alone}" if alone else "The whole step"
    speed = f"{part}: {found['gflops']:,.0f} GFLOP/s in products"
    if peaks is None:
        return f"{speed}. Peaks are measured at the end: there are none of an interrupted run."
    each = f"{alone or 'each rank'}, all at once" if found["ranks"] > 1 else "measured here"
    above = any(row["peak"] == PRODUCTS and row["of_peak"] > ABOVE for row in found["rows"])
    disturbed = "\nA row above its peak means that this machine had other work while the peak was measured."
    return (
        f"Peaks ({each}): {PRODUCTS} {peaks['gflops']:,.0f} GFLOP/s in {peaks['dtype']},"
        f" {MEMORY} {peaks['gbytes_per_s']:,.1f} GB/s.\n"
        f"{speed}, {found['of_peak']:.0%} of {PRODUCTS}." + disturbed * above
    )


def _ranks(ranks: list[dict[str, Any]]) -> str:
    columns = ("rank", "ms a step", "waiting for ranks", "transfer", "waiting for workers", "matmul peak")
    table = []
    for each in ranks:
        shares = {row["row"]: f"{row['share']:.1%}" for row in each["rows"]}
        waits = (shares.get(name, "") for name in (WAIT, TRANSFER, WORKERS))
        peak = f"{each['peaks']['gflops']:,.0f} GFLOP/s"  # all were asked, so all have measured it
        table.append((str(each["rank"]), f"{1000 * each['step_s']:,.1f}", *waits, peak))
    return terminal_table(columns, table)
