"""The tables and charts of `distgpt bench scaling`, for a terminal and for the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distgpt.measure.bench.allreduce import left_out
from distgpt.measure.bench.alphabeta import AlphaBeta, Regime
from distgpt.measure.bench.forecast import MOST_RANKS
from distgpt.measure.bench.results import Columns, Row, tabulated
from distgpt.show.charts import LineChart, Series
from distgpt.show.page import Block, Paragraph, Table
from distgpt.show.tables import terminal_table, wrapped
from distgpt.units import count, duration
from distgpt.units import size as in_bytes

MEASURED: Columns = {
    "scaling": lambda row: str(row["mode"]),
    "ranks": lambda row: f"{row['ranks']}{'*' if row['shares_cores'] else ''}",
    "batch": lambda row: f"{row['batch']:,}",
    "step": lambda row: duration(row["step_s"]),
    "tokens/s": lambda row: f"{row['tokens_per_s']:,.0f}",
    "speed-up": lambda row: f"{row['speedup']:.2f}",
    "efficiency": lambda row: f"{row['efficiency']:.0%}",
    "the model says": lambda row: _by_the_model(row),
}
PREDICTED: Columns = {
    "predicted": lambda row: str(row["mode"]),
    "ranks": lambda row: f"{row['ranks']:,}",
    "step": lambda row: duration(row["step_s"]),
    "of it sum": lambda row: f"{row['allreduce_s'] / row['step_s']:.0%}",
    "tokens/s": lambda row: f"{row['tokens_per_s']:,.0f}",
    "speed-up": lambda row: f"{row['speedup']:,.1f}",
    "efficiency": lambda row: f"{row['efficiency']:.0%}",
}


def _by_the_model(row: Row) -> str:
    if row["shares_cores"]:
        return "–"
    predicted = row["predicted_step_s"]
    return f"{duration(predicted)} ({predicted / row['step_s'] - 1:+.0%})"


def text(found: dict[str, Any]) -> str:
    """For a terminal."""
    lines = []
    for table in tables(found):
        lines += [terminal_table(table.columns, table.rows), wrapped(table.note), ""]
    return "\n".join([*lines, *map(wrapped, conclusions(found))])


def blocks(found: dict[str, Any]) -> list[Block]:
    """For the report."""
    what = f"{found['preset']}: {count(found['parameters'], 'parameter')}, {found['dtype']}"
    return [
        Paragraph(f"{what}, {found['batch_size']:,} × {found['seq_len']:,} tokens."),
        *charts(found).values(),
        efficiency(found),
        *tables(found),
        *(Paragraph(f"{sentence[0].upper()}{sentence[1:]}.") for sentence in conclusions(found)),
        fitted(found),
    ]


def tables(found: dict[str, Any]) -> list[Table]:
    threads = count(found["threads"], "thread")
    note = f"{threads} per rank in every run."
    if any(row["shares_cores"] for row in found["measured"]):
        note += (
            f" *: more threads than the {count(found['cores'], 'core')} of a host: "
            "they share cores, which is no scaling."
        )
    return [
        tabulated(MEASURED, found["measured"], "Measured", note),
        tabulated(PREDICTED, found["predicted"], "Predicted, not measured", basis(found)),
    ]


def basis(found: dict[str, Any]) -> str:
    """What the predictions are made from."""
    summed = found["allreduce"]
    here = "on one machine" if summed["nodes"] == 1 else f"on {summed['nodes']} hosts"
    crowded = summed["cores_per_rank"] < 1
    among = f"{summed['ranks']} ranks {here}{', which share cores' if crowded else ''}"
    models = f"An α–β model of sums over {among}, and steps of one rank"
    if found["network"] is None:
        joined = "all ranks are assumed to be joined as these are"
    else:
        each = count(found["ranks_per_node"], "rank")
        joined = f"hosts of {each} are assumed to be joined by {found['network']}"
    size = f"The gradient has {in_bytes(found['gradient_bytes'])}."
    lacks = [f"{text}." for text in (*left_out(summed), *_impossible(found))]
    return " ".join([f"{models}; {joined}, and nothing overlaps. {size}", *lacks])


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
    sentences = []
    for mode, ranks in found["takes_over"].items():
        if ranks is not None:
            sentences.append(
                f"{mode}: predicted to spend half of a step or more on the sum from {ranks:,} ranks on"
            )
        elif mode == "strong":
            most = f"{found['batch_size']:,} ranks, which have one sequence each"
            sentences.append(f"strong: predicted to compute for more than half of a step up to {most}")
        else:
            sentences.append(
                f"weak: predicted to compute for more than half of a step on up to {MOST_RANKS:,} ranks"
            )
    return sentences


def all_charts(found: dict[str, Any]) -> dict[str, LineChart]:
    """All charts by the ends of their files' names."""
    return {f"-{mode}": chart for mode, chart in (charts(found) | {"efficiency": efficiency(found)}).items()}


def charts(found: dict[str, Any]) -> dict[str, LineChart]:
    """For each kind of scaling tokens per second by ranks: measured, predicted and ideal."""
    every = {mode: _chart(found, mode) for mode in modes(found)}
    return {mode: chart for mode, chart in every.items() if chart is not None}


def modes(found: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["mode"] for row in found["measured"]))


def efficiency(found: dict[str, Any]) -> LineChart:
    """All kinds of scaling in one chart."""
    series = []
    for mode in modes(found):
        rows = _uncrowded(found, mode)
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
    how = "predicted" if found["predicted"] else "measured"
    return LineChart(
        "Efficiency: speed-up by ranks",
        f"At the least {lowest['efficiency']:.0%}, {how}: {lowest['mode']} on {lowest['ranks']:,} ranks.",
        "ranks",
        "percent",
        series,
        log_x=True,
    )


def _uncrowded(found: dict[str, Any], mode: str) -> list[dict[str, Any]]:
    """The measured rows with a core for every thread."""
    return [row for row in found["measured"] if row["mode"] == mode and not row["shares_cores"]]


def _predictions(found: dict[str, Any], mode: str) -> dict[str, list[tuple[int, float]]]:
    """Ranks and speed-ups by what predicts them: a model of these ranks, or of a named network."""
    near = [
        (row["ranks"], row["speedup"] * row["step_s"] / row["predicted_step_s"])
        for row in _uncrowded(found, mode)
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
    uncrowded = _uncrowded(found, mode)
    if not uncrowded:
        return None
    far = [row for row in found["predicted"] if row["mode"] == mode]
    most = max(row["ranks"] for row in (*uncrowded, *far))
    alone = uncrowded[0]["tokens_per_s"] / uncrowded[0]["speedup"]
    batch = "the whole batch stays the same" if mode == "strong" else "each rank's batch stays the same"
    series = [
        Series("measured", [row["ranks"] for row in uncrowded], [row["tokens_per_s"] for row in uncrowded]),
        *(
            _dashed(name, [(ranks, alone * speedup) for ranks, speedup in points])
            for name, points in _predictions(found, mode).items()
        ),
        _dashed("ideal", [(1, alone), (most, alone * most)]),
    ]
    reached, last = uncrowded[-1]["speedup"], count(uncrowded[-1]["ranks"], "rank")
    description = f"Measured: {reached:.2f} times one rank's speed on {last}."
    if far:
        description += f" Predicted: {far[-1]['speedup']:,.1f} times on {count(far[-1]['ranks'], 'rank')}."
    return LineChart(
        f"{mode.capitalize()} scaling: {batch}",
        description,
        "ranks",
        "tokens per second",
        series,
        log_x=True,
        log_y=True,
    )


def fitted(found: dict[str, Any]) -> LineChart:
    """The sums that the predictions are made from, and the model fitted to them."""
    fields, rows = found["model"], found["allreduce"]["rows"]
    model = AlphaBeta(tuple(Regime(**each) for each in fields["regimes"]), fields["ranks"], fields["piece"])
    sizes = [row["bytes"] for row in rows]
    worst = model.worst_error([(row["bytes"], row["seconds"]) for row in rows])
    return LineChart(
        f"The α–β model's sums over {count(model.ranks, 'rank')}",
        f"Measured times by size and the fitted model, which is off by {worst:.0%} at most.",
        "bytes",
        "microseconds",
        [
            Series(rows[0]["algorithm"], sizes, [row["seconds"] * 1e6 for row in rows]),
            _dashed("fitted", [(size, model.seconds(model.ranks, size) * 1e6) for size in sizes]),
        ],
        log_x=True,
        log_y=True,
    )
