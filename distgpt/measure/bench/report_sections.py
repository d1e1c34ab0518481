"""What a report shows of each kind of result: tables as on the terminal, and charts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distgpt.measure.bench import allreduce_page, forward_page, scaling_page
from distgpt.show.charts import Bar, BarChart, LineChart, Series
from distgpt.show.page import Block, Paragraph, Table
from distgpt.units import count

Result = dict[str, Any]


def forward(found: Result) -> list[Block]:
    rows = found["rows"]
    note = "*: in proportion from a part of the names." if _partly(rows) else ""
    blocks: list[Block] = [chart for _, chart in forward_page.charts(found)]
    if not blocks:
        blocks += _speedups(rows)
    blocks.append(Table(forward_page.COLUMNS, forward_page.cells(rows), "Mean loss over all names", note))
    if found.get("ablation"):
        blocks.append(_ablation(found["ablation"]))
    return blocks


def _partly(rows: list[Result]) -> bool:
    return any(row["measured"] < row["names"] for row in rows)


def _speedups(rows: list[Result]) -> list[Block]:
    """Bars for each preset that was also measured one name at a time."""
    charts: list[Block] = []
    for preset in dict.fromkeys(row["preset"] for row in rows):
        own = [row for row in rows if row["preset"] == preset and row["speedup"]]
        if len(own) < 2:
            continue
        bars = [
            Bar(f"{row['method']}, {row['dtype']}", row["speedup"], f"{forward_page.times(row)} ×")
            for row in own
        ]
        best = max(own, key=lambda row: float(row["speedup"]))
        times = f"{forward_page.times(best)} times as fast as serial"
        told = f"The fastest, {best['method']} in {best['dtype']}, is {times}."
        charts.append(BarChart(f"{preset}: speed-up over one name at a time", told, "times as fast", bars))
    return charts


def _ablation(rows: list[Result]) -> Block:
    bars = [
        Bar(
            f"{row['preset']}: {'batched' if row['batched'] else 'one at a time'}, {row['dtype']}",
            row["speedup"],
            f"{forward_page.times(row)} × ({row['seconds']:,.3g} s)",
        )
        for row in rows
    ]
    best = max(rows, key=lambda row: float(row["speedup"]))
    how = "batched" if best["batched"] else "one at a time"
    times = f"{forward_page.times(best)} times as fast as the plain way"
    told = f"On one thread; {how} in {best['dtype']} is {times}."
    return BarChart("What batches and single precision bring", told, "times as fast", bars)


# What a row of training may tell, as its column: the heading, and the text of a value.
_TRAINING: dict[str, tuple[str, Callable[[Any], str]]] = {
    "who": ("who", str),
    "preset": ("preset", str),
    "stage": ("stage", str),
    "dtype": ("dtype", str),
    "ranks": ("ranks", str),
    "threads": ("threads", str),
    "tokens_per_s": ("tokens/s", lambda value: f"{value:,.0f}"),
    "step_s_median": ("step", allreduce_page.duration),
    "mfu": ("of the peak", lambda value: f"{value:.0%}"),
    "peak_memory": ("memory", lambda value: _memory(value)),
    "first_loss": ("first loss", lambda value: f"{value:.3f}"),
    "final_loss": ("last loss", lambda value: f"{value:.3f}"),
}


def _memory(value: Any) -> str:
    return allreduce_page.byte_count(sum(value) if isinstance(value, list) else value)


def train(found: Result) -> list[Block]:
    rows = found["rows"]
    keys = [key for key in _TRAINING if any(row.get(key) is not None for row in rows)]
    cells = [["" if row.get(key) is None else _TRAINING[key][1](row[key]) for key in keys] for row in rows]
    bars = [
        Bar(", ".join(str(row[key]) for key in ("who", "stage") if row.get(key)), row["tokens_per_s"])
        for row in rows
    ]
    best = max(rows, key=lambda row: float(row["tokens_per_s"]))
    told = f"The fastest, {best['who']}, trains on {best['tokens_per_s']:,.0f} tokens a second."
    notes = []
    if found.get("peak_gflops"):
        notes.append(f"The peak: {found['peak_gflops']:,.0f} GFLOP/s in matrix products.")
    if found.get("ratio"):
        several = ", ".join(f"{ratio:.2f}" for ratio in found["ratios"])
        notes.append(f"Pairs of runs in turn: {several} × PyTorch, in the middle {found['ratio']:.2f}.")
    table = Table([_TRAINING[key][0] for key in keys], cells, "Training", " ".join(notes))
    return [BarChart("Tokens per second", told, "tokens/s", bars), table]


def scaling(found: Result) -> list[Block]:
    what = f"{found['preset']}: {count(found['parameters'], 'parameter')}, {found['dtype']}"
    blocks: list[Block] = [Paragraph(f"{what}, {found['batch_size']:,} × {found['seq_len']:,} tokens.")]
    blocks += [*scaling_page.charts(found).values(), scaling_page.efficiency(found)]
    blocks += scaling_page.tables(found)
    blocks += [Paragraph(f"{text[0].upper()}{text[1:]}.") for text in scaling_page.conclusions(found)]
    blocks.append(_model(found))
    return blocks


def _model(found: Result) -> Block:
    """The table that the predictions come from, and how well they meet it."""
    model, summed = scaling_page.model_of(found), found["allreduce"]
    name = summed["rows"][0]["algorithm"]
    sizes = [row["bytes"] for row in summed["rows"]]
    measured = [row["seconds"] * 1e6 for row in summed["rows"]]
    told = [model.seconds(model.ranks, size) * 1e6 for size in sizes]
    worst = model.worst_error([(row["bytes"], row["seconds"]) for row in summed["rows"]])
    return LineChart(
        f"The α–β model's sums over {count(model.ranks, 'rank')}",
        f"Measured times by size and the fitted model, which is off by {worst:.0%} at most.",
        "bytes",
        "microseconds",
        [Series(name, sizes, measured), Series("fitted", sizes, told, dashed=True)],
        log_x=True,
        log_y=True,
    )


def allreduce(found: Result) -> list[Block]:
    rows = allreduce_page.cells(found)
    note = " ".join(f"{text}." for text in allreduce_page.left_out(found))
    table = Table(allreduce_page.COLUMNS, rows, allreduce_page.heading(found), note)
    return [allreduce_page.chart(found), allreduce_page.bandwidth(found), table]
