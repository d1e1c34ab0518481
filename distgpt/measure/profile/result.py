"""What a profile found, of each rank and of all: shares, rates, and how near those come to the peaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from distgpt.measure.peaks import Peaks
from distgpt.measure.profile.operations import BETWEEN, DATA, GPU_WAITS, ORDER, TRANSFER
from distgpt.measure.profile.profiler import Profiler

PRODUCTS, MEMORY = "matmul", "memory"  # the peaks that a row may be held against
UNHELD = (DATA, TRANSFER)  # the speed of these is that of something else

LISTS = ("seconds", "calls", "flops", "bytes")

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RankProfile:
    """Means over the profiled steps of one rank; the lists are by ORDER."""

    rank: int
    workers: int
    steps: int
    step_s: float
    step_s_median: float
    peaks: Peaks | None  # None: it was interrupted before they were measured
    seconds: list[float]  # of workers
    calls: list[float]
    flops: list[float]
    bytes: list[float]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(found: dict[str, Any]) -> RankProfile:
        return RankProfile(**{**found, "peaks": found["peaks"] and Peaks(**found["peaks"])})


def of_rank(profiler: Profiler, rank: int, peaks: Peaks | None) -> RankProfile:
    """After at least one step."""
    steps = len(profiler.seconds)
    each = ((part / steps).tolist() for part in profiler.times.parts())
    mean = sum(profiler.seconds) / steps
    return RankProfile(rank, profiler.workers, steps, mean, median(profiler.seconds), peaks, *each)


def together(ranks: Sequence[RankProfile]) -> RankProfile:
    """The mean of all ranks, which do the same, as of one worker: they may have unlike numbers of them."""

    def mean(name: str) -> Any:
        return np.mean([getattr(each, name) for each in ranks], axis=0).tolist()

    means = {name: mean(name) for name in ("step_s", "step_s_median", *LISTS)}
    means["seconds"] = np.mean([np.array(each.seconds) / each.workers for each in ranks], axis=0).tolist()
    return replace(ranks[0], workers=1, peaks=_mean_peaks(ranks), **means)


def _mean_peaks(ranks: Sequence[RankProfile]) -> Peaks | None:
    known = [each.peaks for each in ranks if each.peaks]
    if not known:
        return None
    gflops, gbytes = np.mean([(each.gflops, each.gbytes_per_s) for each in known], axis=0).tolist()
    return Peaks(gflops, gbytes, known[0].dtype)


def rows(profile: RankProfile, on_gpu: bool) -> list[Row]:
    """One per kind of operation that there was, and one for what is left."""
    whole = profile.step_s
    lists = (getattr(profile, name) for name in LISTS)
    found = [
        _row(name, seconds / profile.workers, calls, flops, moved, profile)
        for name, seconds, calls, flops, moved in zip(ORDER, *lists, strict=True)
        if seconds
    ]
    between = whole - sum(row["ms"] for row in found) / 1000
    return [*found, _row(GPU_WAITS if on_gpu else BETWEEN, between, 0.0, 0.0, 0.0, profile)]


def _row(name: str, seconds: float, calls: float, flops: float, moved: float, profile: RankProfile) -> Row:
    """`seconds` of all workers; a rate is what they would reach together if they did nothing else."""
    row: Row = {"row": name, "share": seconds / profile.step_s, "calls": calls, "ms": 1000 * seconds}
    row |= {"gflop": flops / 1e9, "gbytes": moved / 1e9, "gflops": None, "gbytes_per_s": None}
    row |= {"peak": None, "of_peak": None}
    if flops:
        rate = row["gflops"] = flops / seconds / 1e9
        if profile.peaks:
            row |= {"peak": PRODUCTS, "of_peak": rate / profile.peaks.gflops}
    elif moved:
        rate = row["gbytes_per_s"] = moved / seconds / 1e9
        if name not in UNHELD and profile.peaks:
            row |= {"peak": MEMORY, "of_peak": rate / profile.peaks.gbytes_per_s}
    return row


def result(ranks: Sequence[RankProfile], about: dict[str, Any]) -> dict[str, Any]:
    """All of profile.json. Times are means over ranks and steps; `job` and `gflops` sum over the ranks.

    `ranks` are those who could still be asked, of about["ranks"]: of an interrupted run perhaps one alone.
    """
    mean = together(ranks)
    on_gpu = about["gpu"]
    gflop = sum(sum(each.flops) for each in ranks) / 1e9
    summed = zip(
        ORDER,
        *(
            np.sum([getattr(r, name) for r in ranks], axis=0).tolist()
            for name in ("seconds", "flops", "bytes")
        ),
        strict=True,
    )
    return {
        **about,
        "ranks_told": [each.rank for each in ranks],
        "steps": mean.steps,
        "step_s": mean.step_s,
        "step_s_median": mean.step_s_median,
        "tokens_per_s": about["tokens_per_step"] / mean.step_s,
        "gflops": gflop / mean.step_s,
        "of_peak": gflop / mean.step_s / (len(ranks) * mean.peaks.gflops) if mean.peaks else None,
        "peaks": mean.peaks and mean.peaks.as_dict(),
        "rows": rows(mean, on_gpu),
        "job": [
            {"row": name, "worker_s": seconds, "gflop": flops / 1e9, "gbytes": moved / 1e9}
            for name, seconds, flops, moved in summed
            if seconds
        ],
        "per_rank": [
            {
                "rank": each.rank,
                "step_s": each.step_s,
                "step_s_median": each.step_s_median,
                "peaks": each.peaks and each.peaks.as_dict(),
                "rows": rows(each, on_gpu),
            }
            for each in ranks
        ],
    }
