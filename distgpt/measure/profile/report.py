"""The results of a profile: shares and speeds of each rank and of all, as JSON, as a table, as a timeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from distgpt.core.base.formatting import count
from distgpt.core.comm.agree import named_ranks
from distgpt.measure.doctor.speed import Peaks
from distgpt.measure.profile.operations import BETWEEN, DATA, GPU_WAITS, ORDER, TRANSFER, WAIT, WORKERS
from distgpt.measure.profile.recorder import NOBODY, Account, Lane
from distgpt.show.page import terminal_table

MATMUL, MEMORY = "matmul", "memory"  # the peaks that a row is compared with
WITHOUT_PEAK = (DATA, TRANSFER)  # bound by something else

Row = dict[str, Any]
Event = dict[str, Any]

COLUMNS = ("operation", "share", "calls", "ms a step", "achieved", "of peak")
IN_CACHE = 1.05  # times the memory peak: above that, data came from a cache
DISTURBED = 1.05  # times the matmul peak: above that, the peak was measured too low
STEPS = 0  # the timeline's thread for whole steps; workers come after it
SHORTEST_WAIT = 1e-6  # seconds


@dataclass(frozen=True, slots=True)
class RankProfile:
    """Means over the profiled steps of one rank."""

    rank: int
    workers: int
    steps: int
    step_s: float
    step_s_median: float
    peaks: Peaks | None  # None: it was interrupted before they were measured
    times: list[list[float]]  # by ORDER: seconds of each worker, calls, FLOPs, bytes

    @staticmethod
    def from_dict(found: dict[str, Any]) -> RankProfile:
        return RankProfile(**{**found, "peaks": found["peaks"] and Peaks(**found["peaks"])})

    def about(self, on_gpu: bool) -> dict[str, Any]:
        """Return the part of profile.json that each rank has, and all ranks together."""
        times = {"step_s": self.step_s, "step_s_median": self.step_s_median}
        return {**times, "peaks": self.peaks and asdict(self.peaks), "rows": rows(self, on_gpu)}


def together(ranks: Sequence[RankProfile]) -> RankProfile:
    """Return the mean of all ranks, per worker: ranks may have different numbers of workers."""
    keys = ("step_s", "step_s_median", "times")
    means = {key: np.mean([getattr(each, key) for each in ranks], axis=0).tolist() for key in keys}
    known = [(each.peaks.gflops, each.peaks.gbytes_per_s, each.peaks.dtype) for each in ranks if each.peaks]
    if not known:
        return replace(ranks[0], peaks=None, **means)
    gflops, gbytes, (dtype, *_) = zip(*known, strict=True)
    peaks = Peaks(float(np.mean(gflops)), float(np.mean(gbytes)), dtype)
    return replace(ranks[0], peaks=peaks, **means)


def rows(profile: RankProfile, on_gpu: bool) -> list[Row]:
    """Return a row per kind of operation that occurred, and one for the rest of the step."""
    found = [_row(profile, *each) for each in zip(ORDER, *profile.times, strict=True) if each[1]]
    between = profile.step_s - sum(row["ms"] for row in found) / 1000
    return [*found, _row(profile, GPU_WAITS if on_gpu else BETWEEN, between)]


def _row(
    profile: RankProfile,
    name: str,
    seconds: float,
    calls: float = 0.0,
    flops: float = 0.0,
    moved: float = 0.0,
) -> Row:
    """`seconds` of each worker; the speed is what all would reach together if they did nothing else."""
    row: Row = {"row": name, "share": seconds / profile.step_s, "calls": calls, "ms": 1000 * seconds}
    row |= {"gflop": flops / 1e9, "gbytes": moved / 1e9, "gflops": None, "gbytes_per_s": None}
    row |= {"peak": None, "of_peak": None}
    if flops:
        speed = row["gflops"] = flops / seconds / 1e9
        if profile.peaks:
            row |= {"peak": MATMUL, "of_peak": speed / profile.peaks.gflops}
    elif moved:
        speed = row["gbytes_per_s"] = moved / seconds / 1e9
        if name not in WITHOUT_PEAK and profile.peaks:
            row |= {"peak": MEMORY, "of_peak": speed / profile.peaks.gbytes_per_s}
    return row


def result(ranks: Sequence[RankProfile], about: dict[str, Any]) -> dict[str, Any]:
    """Return profile.json. Times are means over ranks and steps; `job` and `gflops` sum over the ranks.

    `ranks` are those that reported, of about["ranks"]: of an interrupted run perhaps rank 0 alone.
    """
    mean, on_gpu = together(ranks), about["gpu"]
    seconds = np.sum([np.array(each.times[0]) * each.workers for each in ranks], axis=0).tolist()
    _, _, flops, moved = np.sum([each.times for each in ranks], axis=0).tolist()
    gflop = sum(flops) / 1e9
    return {
        **about,
        "ranks_told": [each.rank for each in ranks],
        "steps": mean.steps,
        "tokens_per_s": about["tokens_per_step"] / mean.step_s,
        "gflops": gflop / mean.step_s,
        "of_peak": gflop / mean.step_s / (len(ranks) * mean.peaks.gflops) if mean.peaks else None,
        **mean.about(on_gpu),
        "job": [
            {"row": name, "worker_s": seconds, "gflop": flops / 1e9, "gbytes": moved / 1e9}
            for name, seconds, flops, moved in zip(ORDER, seconds, flops, moved, strict=True)
            if seconds
        ],
        "per_rank": [{"rank": each.rank, **each.about(on_gpu)} for each in ranks],
    }


def as_text(found: dict[str, Any]) -> str:
    """Format a profile for a terminal: what was measured, the table, the peaks, and the ranks if several."""
    lines = [_headline(found), "", terminal_table(COLUMNS, [_cells(row) for row in found["rows"]]), ""]
    lines.append(_peaks(found))
    if len(found["per_rank"]) > 1:
        lines += ["", _ranks(found["per_rank"])]
    return "\n".join(lines)


def _headline(found: dict[str, Any]) -> str:
    reported, of_all = found["ranks_told"], found["ranks"]
    alone = f": {named_ranks(reported)} of {of_all} alone" if len(reported) < of_all else ""
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
    told = found["ranks_told"]
    part = "The whole step" if len(told) == found["ranks"] else f"The part of {named_ranks(told)}"
    speed = f"{part}: {found['gflops']:,.0f} GFLOP/s in matmuls"
    if peaks is None:
        return f"{speed}. Peaks are measured at the end, so an interrupted run has none."
    each = "each rank, all at once" if found["ranks"] > 1 else "measured here"
    above = any(row["peak"] == MATMUL and row["of_peak"] > DISTURBED for row in found["rows"])
    disturbed = "\nA row above its peak means that this machine was busy while the peak was measured."
    by = f"Matmul by {found['matmul']}.\n" if found["matmul"] else ""
    return (
        f"Peaks ({each}): {MATMUL} {peaks['gflops']:,.0f} GFLOP/s in {peaks['dtype']},"
        f" {MEMORY} {peaks['gbytes_per_s']:,.1f} GB/s.\n"
        f"{by}{speed}, {found['of_peak']:.0%} of {MATMUL}." + disturbed * above
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

    A rank is a process, with a thread for each worker.
    """
    workers = max((len(step.lanes) for step in steps), default=1)
    threads = ["steps", *("GPU" if on_gpu else f"worker {worker}" for worker in range(workers))]
    named = [("process", STEPS, f"rank {rank}", rank)]
    named += [("thread", thread, name, thread) for thread, name in enumerate(threads)]
    found = [
        {"name": f"{what}_{kind}", "ph": "M", "pid": rank, "tid": thread, "args": {kind: value}}
        for what, thread, name, index in named
        for kind, value in (("name", name), ("sort_index", index))
    ]
    for step in steps:
        found.append(_span(rank, STEPS, f"step {step.number + 1}", "step", step.begin, step.seconds))
        for thread, lane in enumerate(step.lanes, 1):
            found += _of_worker(rank, thread, lane, step.begin)
    return found


def _of_worker(rank: int, thread: int, lane: Lane, begin: float) -> Iterator[Event]:
    spans = zip(lane.names, lane.rows.tolist(), lane.begins.tolist(), lane.ends.tolist(), strict=True)
    for name, row, first, last in spans:
        if row != NOBODY:
            yield _span(rank, thread, name, ORDER[row], begin + first, last - first)
    for first, last in lane.waits:
        if last - first > SHORTEST_WAIT:
            yield _span(rank, thread, "waits", WORKERS, begin + first, last - first)


def _span(rank: int, thread: int, name: str, category: str, begin: float, seconds: float) -> Event:
    """Times in microseconds."""
    place = {"name": name, "cat": category, "ph": "X", "pid": rank, "tid": thread}
    return place | {"ts": round(begin * 1e6, 3), "dur": round(seconds * 1e6, 3)}
