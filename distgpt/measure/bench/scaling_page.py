"""The tables and charts of `distgpt bench scaling`, for a terminal and for a report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distgpt.measure.bench.allreduce_page import byte_count, duration, left_out
from distgpt.measure.bench.alphabeta import AlphaBeta, Regime
from distgpt.measure.bench.scaling import MOST_RANKS
from distgpt.show.charts import LineChart, Series
from distgpt.show.page import Table
from distgpt.units import count

MEASURED = ("scaling", "ranks", "batch", "step", "tokens/s", "speed-up", "efficiency", "the model says")
PREDICTED = ("predicted", "ranks", "step", "of it sum", "tokens/s", "speed-up", "efficiency")


def tables(found: dict[str, Any]) -> list[Table]:
    threads = count(found["threads"], "thread")
    note = f"{threads} per rank in every run."
    if any(row["shares_cores"] for row in found["measured"]):
        note += (
            f" *: more threads than the {count(found['cores'], 'core')} of a host: "
            "they share cores, which is no scaling."
        )
    return [
        Table(MEASURED, [_measured(row) for row in found["measured"]], "Measured", note),
        Table(
            PREDICTED,
            [_predicted(row) for row in found["predicted"]],
            "Predicted, not measured",
            basis(found),
        ),
    ]


def _measured(row: dict[str, Any]) -> list[str]:
    told = row["predicted_step_s"]
    said = "–" if row["shares_cores"] else f"{duration(told)} ({told / row['step_s'] - 1:+.0%})"
    return [
        row["mode"],
        f"{row['ranks']}{'*' if row['shares_cores'] else ''}",
        f"{row['batch']:,}",
        duration(row["step_s"]),
        f"{row['tokens_per_s']:,.0f}",
        f"{row['speedup']:.2f}",
        f"{row['efficiency']:.0%}",
        said,
    ]


def _predicted(row: dict[str, Any]) -> list[str]:
    return [
        row["mode"],
        f"{row['ranks']:,}",
        duration(row["step_s"]),
        f"{row['allreduce_s'] / row['step_s']:.0%}",
        f"{row['tokens_per_s']:,.0f}",
        f"{row['speedup']:,.1f}",
        f"{row['efficiency']:.0%}",
    ]


def basis(found: dict[str, Any]) -> str:
    """What the predictions stand on."""
    summed = found["allreduce"]
    here = "on one machine" if summed["nodes"] == 1 else f"on {summed['nodes']} hosts"
    crowded = summed["cores_per_rank"] < 1
    among = f"{summed['ranks']} ranks {here}{', which share cores' if crowded else ''}"
    told = f"An α–β model of sums over {among}, and steps of one rank"
    if found["network"] is None:
        joined = "all ranks are taken to be joined as these are"
    else:
        each = count(found["ranks_per_node"], "rank")
        joined = f"hosts of {each} are taken to be joined by {found['network']}"
    size = f"The gradient has {byte_count(found['gradient_bytes'])}."
    lacks = [f"{text}." for text in (*left_out(summed), *_impossible(found))]
    return " ".join([f"{told}; {joined}, and nothing overlaps. {size}", *lacks])


def _impossible(found: dict[str, Any]) -> list[str]:
    ranks = [f"{row['ranks']:,}" for row in found["not_predicted"]]
    if not ranks:
        return []
    batch = count(found["batch_size"], "sequence")
    return [
        f"Strong scaling to {', '.join(ranks)} ranks is left out: a batch of {batch} cannot be cut for them"
    ]


def conclusions(found: dict[str, Any]) -> list[str]:
    """Where communication takes over, in a sentence for each kind of scaling."""
    told = []
    for mode, ranks in found["takes_over"].items():
        if ranks is not None:
            told.append(
                f"{mode}: predicted to spend half of a step or more on the sum from {ranks:,} ranks on"
            )
        elif mode == "strong":
            most = f"{found['batch_size']:,} ranks, which have one sequence each"
            told.append(f"strong: predicted to compute for more than half of a step up to {most}")
        else:
            told.append(
                f"weak: predicted to compute for more than half of a step on up to {MOST_RANKS:,} ranks"
            )
    return told


def charts(found: dict[str, Any]) -> dict[str, LineChart]:
    """For each kind of scaling tokens per second by ranks: measured, predicted, and what would be ideal."""
    every = {mode: _chart(found, mode) for mode in modes(found)}
    return {mode: chart for mode, chart in every.items() if chart is not None}


def modes(found: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["mode"] for row in found["measured"]))


def efficiency(found: dict[str, Any]) -> LineChart:
    """Of all kinds of scaling in one picture, where it can be told how much is lost."""
    series = []
    for mode in modes(found):
        rows = _honest(found, mode)
        series.append(
            Series(
                f"{mode}, measured", [row["ranks"] for row in rows], [100 * row["efficiency"] for row in rows]
            )
        )
        series += [
            _dashed(f"{mode}, {name}", [(ranks, 100 * speedup / ranks) for ranks, speedup in points])
            for name, points in _predictions(found, mode).items()
        ]
    lowest = min(found["predicted"] or found["measured"], key=lambda row: float(row["efficiency"]))
    told_of = "predicted" if found["predicted"] else "measured"
    return LineChart(
        "Efficiency: speed-up by ranks",
        f"At the least {lowest['efficiency']:.0%}, {told_of}: {lowest['mode']} on {lowest['ranks']:,} ranks.",
        "ranks",
        "percent",
        series,
        log_x=True,
    )


def _honest(found: dict[str, Any], mode: str) -> list[dict[str, Any]]:
    """Measured where every thread had a core."""
    return [row for row in found["measured"] if row["mode"] == mode and not row["shares_cores"]]


def _predictions(found: dict[str, Any], mode: str) -> dict[str, list[tuple[int, float]]]:
    """Ranks and speed-ups by what predicts them: a model of these ranks, or of a network that was named."""
    near = [
        (row["ranks"], row["speedup"] * row["step_s"] / row["predicted_step_s"])
        for row in _honest(found, mode)
    ]
    far = [(row["ranks"], row["speedup"]) for row in found["predicted"] if row["mode"] == mode]
    if found["network"] is None:
        return {"predicted": sorted({*near, *far})}
    here = {"predicted for these ranks": near} if near else {}
    over = {f"predicted over {found['network']}": [(1, 1.0), *far]} if far else {}
    return {**here, **over}


def _dashed(name: str, points: Sequence[tuple[int, float]]) -> Series:
    return Series(name, [x for x, _ in points], [y for _, y in points], dashed=True)


def _chart(found: dict[str, Any], mode: str) -> LineChart | None:
    honest = _honest(found, mode)
    if not honest:
        return None
    far = [row for row in found["predicted"] if row["mode"] == mode]
    most = max(row["ranks"] for row in (*honest, *far))
    alone = honest[0]["tokens_per_s"] / honest[0]["speedup"]
    batch = "the whole batch stays the same" if mode == "strong" else "each rank's batch stays the same"
    series = [
        Series("measured", [row["ranks"] for row in honest], [row["tokens_per_s"] for row in honest]),
        *(
            _dashed(name, [(ranks, alone * speedup) for ranks, speedup in points])
            for name, points in _predictions(found, mode).items()
        ),
        _dashed("ideal", [(1, alone), (most, alone * most)]),
    ]
    reached, last = honest[-1]["speedup"], count(honest[-1]["ranks"], "rank")
    told = f"Measured: {reached:.2f} times one rank's speed on {last}."
    if far:
        told += f" Predicted: {far[-1]['speedup']:,.1f} times on {count(far[-1]['ranks'], 'rank')}."
    return LineChart(
        f"{mode.capitalize()} scaling: {batch}",
        told,
        "ranks",
        "tokens per second",
        series,
        log_x=True,
        log_y=True,
    )


def model_of(found: dict[str, Any]) -> AlphaBeta:
    """The fitted model, as a result's file keeps it."""
    model = found["model"]
    return AlphaBeta(tuple(Regime(**each) for each in model["regimes"]), model["ranks"], model["piece"])
