"""The results of a profile: shares and speeds of each rank and of all, as JSON, as a table, as a timeline."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np

from distgpt.core.base.formatting import count
from distgpt.measure.profile.operations import BETWEEN, DATA, GPU_WAITS, ORDER, TRANSFER, WAIT, WORKERS
from distgpt.measure.profile.recorder import Account
from distgpt.show.page import terminal_table

MATMUL, MEMORY = "matmul", "memory"  # the peaks that a row is compared with
WITHOUT_PEAK = (DATA, TRANSFER)  # bound by something else

Row = dict[str, Any]
Event = dict[str, Any]

COLUMNS = ("operation", "share", "calls", "ms a step", "achieved", "of peak")
IN_CACHE = 1.05  # times the memory peak: above that, data came from a cache
STEPS = 0  # the timeline's thread for whole steps; workers come after it
SHORTEST_WAIT = 1e-6  # seconds


# Of one rank, as JSON: rank, workers, steps, step_s and its median, peaks, and times by ORDER: seconds of
# each worker, calls, FLOPs and bytes of a step.
RankProfile = dict[str, Any]


def _about(profile: RankProfile, on_gpu: bool) -> dict[str, Any]:
    """Return the part of profile.json that each rank has, and all ranks together: means of a step.

    The rows are of the kinds of operations that occurred, and one is of the rest of the step.
    """
    found = [_row(profile, *each) for each in zip(ORDER, *profile["times"], strict=True) if each[1]]
    between = profile["step_s"] - sum(row["ms"] for row in found) / 1000
    found.append(_row(profile, GPU_WAITS if on_gpu else BETWEEN, between))
    return {**{key: profile[key] for key in ("step_s", "step_s_median", "peaks")}, "rows": found}


def _together(ranks: Sequence[RankProfile]) -> RankProfile:
    """Return the mean of all ranks, per worker: ranks may have different numbers of workers."""
    keys = ("step_s", "step_s_median", "times")
    means = {key: np.mean([each[key] for each in ranks], axis=0).tolist() for key in keys}
    speeds = {key: fmean(each["peaks"][key] for each in ranks) for key in ("gflops", "gbytes_per_s")}
    return {**ranks[0], **means, "peaks": ranks[0]["peaks"] | speeds}


def _row(
    profile: RankProfile, name: str, seconds: float, calls: float = 0, flops: float = 0, moved: float = 0
) -> Row:
    """`seconds` of each worker; the speed is what all would reach together if they did nothing else."""
    row: Row = {"row": name, "share": seconds / profile["step_s"], "calls": calls, "ms": 1000 * seconds}
    row |= {"gflop": flops / 1e9, "gbytes": moved / 1e9, "gflops": None, "gbytes_per_s": None}
    row |= {"peak": None, "of_peak": None}
    if flops or moved:
        key, peak = ("gflops", MATMUL) if flops else ("gbytes_per_s", MEMORY)
        row[key] = (flops or moved) / seconds / 1e9
        if flops or name not in WITHOUT_PEAK:
            row |= {"peak": peak, "of_peak": row[key] / profile["peaks"][key]}
    return row


def result(ranks: Sequence[RankProfile], about: dict[str, Any]) -> dict[str, Any]:
    """Return profile.json. Times are means over ranks and steps; `gflops` sums over the ranks."""
    mean, on_gpu = _together(ranks), about["gpu"]
    gflop = float(np.sum([each["times"][2] for each in ranks])) / 1e9
    return {
        **about,
        "steps": mean["steps"],
        "tokens_per_s": about["tokens_per_step"] / mean["step_s"],
        "gflops": gflop / mean["step_s"],
        "of_peak": gflop / mean["step_s"] / len(ranks) / mean["peaks"]["gflops"],
        **_about(mean, on_gpu),
        "per_rank": [{"rank": each["rank"], **_about(each, on_gpu)} for each in ranks],
    }


def as_text(found: dict[str, Any]) -> str:
    """Format a profile for a terminal: what was measured, the table, the peaks, and the ranks if several."""
    lines = [_headline(found), "", terminal_table(COLUMNS, [_cells(row) for row in found["rows"]]), ""]
    lines.append(_peaks(found))
    if len(found["per_rank"]) > 1:
        lines += ["", _ranks(found["per_rank"])]
    return "\n".join(lines)


def _headline(found: dict[str, Any]) -> str:
    threads = f" of {count(found['threads'], 'thread')}" if found["threads"] else ""
    return (
        f"{count(found['steps'], 'step')} of {1000 * found['step_s']:,.1f} ms"
        f" ({found['tokens_per_s']:,.0f} tokens/s); stage {found['stage']},"
        f" {count(found['ranks'], 'rank')}{threads}; {found['parameters']:,} parameters, {found['dtype']}"
    )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    calls = f"{row['calls']:,.0f}" if row["calls"] else ""
    if row["gflops"]:
        speed = f"{row['gflops']:,.0f} GFLOP/s" if row["gflops"] >= 10 else f"{row['gflops']:.2f} GFLOP/s"
    else:
        speed = f"{row['gbytes_per_s']:,.1f} GB/s" if row["gbytes_per_s"] else ""
    return row["row"], f"{row['share']:.1%}", calls, f"{row['ms']:,.2f}", speed, _of_peak(row)


def _of_peak(row: dict[str, Any]) -> str:
    if row["of_peak"] is None:
        return ""
    if row["peak"] == MEMORY and row["of_peak"] > IN_CACHE:
        return "in cache"
    return f"{row['of_peak']:.0%} of {row['peak']}"


def _peaks(found: dict[str, Any]) -> str:
    peaks = found["peaks"]
    each = "each rank, all at once" if found["ranks"] > 1 else "measured here"
    by = f"Matmul by {found['matmul']}.\n" if found["matmul"] else ""
    return (
        f"Peaks ({each}): {MATMUL} {peaks['gflops']:,.0f} GFLOP/s in {peaks['dtype']},"
        f" {MEMORY} {peaks['gbytes_per_s']:,.1f} GB/s.\n"
        f"{by}The whole step: {found['gflops']:,.0f} GFLOP/s in matmuls, {found['of_peak']:.0%} of {MATMUL}."
    )


def _ranks(ranks: list[dict[str, Any]]) -> str:
    columns = ("rank", "ms a step", "waiting for ranks", "transfer", "waiting for workers", "matmul peak")
    table = []
    for each in ranks:
        shares = {row["row"]: f"{row['share']:.1%}" for row in each["rows"]}
        waits = (shares.get(name, "") for name in (WAIT, TRANSFER, WORKERS))
        peak = f"{each['peaks']['gflops']:,.0f} GFLOP/s"  # of several ranks, all measured it
        table.append((str(each["rank"]), f"{1000 * each['step_s']:,.1f}", *waits, peak))
    return terminal_table(columns, table)


def events(rank: int, steps: Sequence[Account], on_gpu: bool) -> list[Event]:
    """Return the timeline of one rank in the trace event format of Perfetto and chrome://tracing.

    A rank is a process, with a thread for each worker. Times are in microseconds.
    """
    workers = max(worker for step in steps for worker, *_ in step.spans) + 1
    threads = ["steps", *("GPU" if on_gpu else f"worker {worker}" for worker in range(workers))]
    named = [("process", STEPS, f"rank {rank}", rank)]
    named += [("thread", thread, name, thread) for thread, name in enumerate(threads)]
    found = [
        {"name": f"{what}_{kind}", "ph": "M", "pid": rank, "tid": thread, "args": {kind: value}}
        for what, thread, name, index in named
        for kind, value in (("name", name), ("sort_index", index))
    ]
    for step in steps:
        whole = (STEPS - 1, f"step {step.number + 1}", "step", 0.0, step.seconds)
        for worker, name, category, first, last in (whole, *step.spans):
            if name != "waits" or last - first > SHORTEST_WAIT:
                place = {"name": name, "cat": category, "ph": "X", "pid": rank, "tid": worker + 1}
                times = {"ts": round((step.begin + first) * 1e6, 3), "dur": round((last - first) * 1e6, 3)}
                found.append(place | times)
    return found
