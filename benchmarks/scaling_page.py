"""The tables and charts of scaling.py, for a terminal and for the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from charts import LineChart, line
from predictions import MOST_RANKS

from distgpt.core.base.formatting import count, duration
from distgpt.core.base.formatting import size as in_bytes
from distgpt.measure.bench.allreduce import left_out
from distgpt.measure.jobs import Row
from distgpt.show.page import Block, Column, Paragraph, Table, tabulated

TRUSTED = 0.1  # how far the model may be off for measured steps, for its predictions to be shown


def _by_the_model(row: Row) -> str:
    if row["shares_cores"]:
        return "–"
    predicted = row["predicted_step_s"]
    return f"{duration(predicted)} ({predicted / row['step_s'] - 1:+.0%})"


MEASURED: tuple[Column, ...] = (
    ("scaling", "mode", str),
    ("ranks", "", lambda row: f"{row['ranks']}{'*' if row['shares_cores'] else ''}"),
    ("batch", "batch", "{:,}".format),
    ("step", "step_s", duration),
    ("tokens/s", "tokens_per_s", "{:,.0f}".format),
    ("speed-up", "speedup", "{:.2f}".format),
    ("efficiency", "efficiency", "{:.0%}".format),
    ("the model says", "", _by_the_model),
)
PREDICTED: tuple[Column, ...] = (
    ("predicted", "mode", str),
    ("ranks", "ranks", "{:,}".format),
    ("step", "step_s", duration),
    ("of it sum", "", lambda row: f"{row['allreduce_s'] / row['step_s']:.0%}"),
    ("tokens/s", "tokens_per_s", "{:,.0f}".format),
    ("speed-up", "speedup", "{:,.1f}".format),
    ("efficiency", "efficiency", "{:.0%}".format),
)


BY_EXCHANGE = (
    "By --grad-sync, --gradient-dtype and --outer-every, at best: what overlaps costs nothing. Ranks of a"
    " host share its memory and its port. Local steps learn otherwise than steps together."
)


def by_exchange(rows: Sequence[Row]) -> tuple[Column, ...]:
    """Steps by the ways to exchange gradients, which all rows have."""
    ways = list(rows[0]["by_exchange"]) if rows else []

    def step(way: str) -> Callable[[Row], str]:
        return lambda row: duration(row["by_exchange"][way])

    return (
        ("predicted step", "mode", str),
        ("ranks", "ranks", "{:,}".format),
        *((way, "", step(way)) for way in ways),
    )


def shown(found: dict[str, Any]) -> dict[str, Any]:
    """The results, without predictions of a model that is wrong about what was measured."""
    if not _is_refuted(found):
        return found
    return found | {"predicted": [], "not_predicted": [], "takes_over": {}}


def _is_refuted(found: dict[str, Any]) -> bool:
    off = found.get("off_by")  # which older files lack
    return off is not None and off > TRUSTED


def checked(found: dict[str, Any]) -> list[str]:
    """Why predictions are withheld, or that nothing could be held against them."""
    load = ""
    if "load_before" in found:
        load = f"; the load was {found['load_before']:.1f} before, on {count(found['cores'], 'core')}"
    if _is_refuted(found):
        return [
            f"predictions are withheld: for steps that were measured the model is {found['off_by']:.0%} off, "
            f"more than {TRUSTED:.0%}{load}; run it again when nothing else runs"
        ]
    if found.get("off_by") is None:
        return [f"predictions are unchecked: no ranks were measured that have cores of their own{load}"]
    return [f"for steps that were measured the model is {found['off_by']:.0%} off at most{load}"]


def blocks(found: dict[str, Any]) -> list[Block]:
    what = f"{found['preset']}: {count(found['parameters'], 'parameter')}, {found['dtype']}"
    sentences = [*checked(found), *conclusions(shown(found))]
    return [
        Paragraph(f"{what}, {found['batch_size']:,} × {found['seq_len']:,} tokens."),
        *all_charts(found).values(),
        *tables(found),
        *(Paragraph(f"{said[0].upper()}{said[1:]}.") for said in sentences),
    ]


def tables(found: dict[str, Any]) -> list[Table]:
    note = f"{count(found['threads'], 'thread')} per rank in every run."
    if any(row["shares_cores"] for row in found["measured"]):
        note += (
            f" *: more threads than the {count(found['cores'], 'core')} of a host: "
            "they share cores, which is no scaling."
        )
    found = shown(found)
    several = [row for row in found["predicted"] if row["ranks"] > 1 and "by_exchange" in row]
    return [
        tabulated(MEASURED, found["measured"], "Measured", note),
        *(
            [tabulated(PREDICTED, found["predicted"], "Predicted, not measured", basis(found))]
            if found["predicted"]
            else []
        ),
        *(
            [tabulated(by_exchange(several), several, "Predicted by way of exchange", BY_EXCHANGE)]
            if several
            else []
        ),
    ]


def basis(found: dict[str, Any]) -> str:
    """What the predictions are made from, and what is missing."""
    summed = found["allreduce"]
    where = "one machine" if summed["nodes"] == 1 else f"{summed['nodes']} hosts"
    shared = ", which share cores" if summed["cores_per_rank"] < 1 else ""
    joined = "all ranks are assumed to be joined as these are"
    if found["network"] is not None:
        each = count(found["ranks_per_node"], "rank")
        joined = f"hosts of {each} are assumed to be joined by {found['network']}"
    sentences = [
        f"An α–β model of sums over {summed['ranks']} ranks on {where}{shared}, and steps of one rank; "
        f"{joined}, and nothing overlaps",
        f"The gradient has {in_bytes(found['gradient_bytes'])}",
        *left_out(summed),
    ]
    if found["not_predicted"]:
        ranks = ", ".join(f"{row['ranks']:,}" for row in found["not_predicted"])
        batch = count(found["batch_size"], "sequence")
        sentences.append(
            f"Strong scaling to {ranks} ranks is left out: a batch of {batch} cannot be cut for them"
        )
    return " ".join(f"{each}." for each in sentences)


def conclusions(found: dict[str, Any]) -> list[str]:
    """Where communication takes over, in a sentence for each kind of scaling."""
    sentences = []
    for mode, ranks in found["takes_over"].items():
        if ranks is not None:
            so = f"spend half of a step or more on the sum from {ranks:,} ranks on"
        elif mode == "strong":
            most = f"{found['batch_size']:,} ranks, which have one sequence each"
            so = f"compute for more than half of a step up to {most}"
        else:
            so = f"compute for more than half of a step on up to {MOST_RANKS:,} ranks"
        sentences.append(f"{mode}: predicted to {so}")
    return sentences


# -- charts


def all_charts(found: dict[str, Any]) -> dict[str, LineChart]:
    """Tokens per second by ranks of each kind of scaling, by the end of its file's name."""
    found, modes = shown(found), dict.fromkeys(row["mode"] for row in found["measured"])
    return {f"-{mode}": _chart(found, mode) for mode in modes if _uncrowded(found, mode)}


def _uncrowded(found: dict[str, Any], mode: str) -> list[Row]:
    """The measured rows with a core for every thread."""
    return [row for row in found["measured"] if row["mode"] == mode and not row["shares_cores"]]


def _predictions(found: dict[str, Any], mode: str) -> dict[str, list[tuple[int, float]]]:
    """Ranks and speed-ups by what predicts them: a model of these ranks, or of a named network."""
    near = [
        (row["ranks"], row["speedup"] * row["step_s"] / row["predicted_step_s"])
        for row in _uncrowded(found, mode)
    ]
    far = [(row["ranks"], row["speedup"]) for row in found["predicted"] if row["mode"] == mode]
    lines = {"predicted": sorted({*near, *far})}
    if found["network"] is not None:
        over = [(1, 1.0), *far] if far else []
        lines = {"predicted for these ranks": near, f"predicted over {found['network']}": over}
    return {name: points for name, points in lines.items() if points}


def _chart(found: dict[str, Any], mode: str) -> LineChart:
    near = _uncrowded(found, mode)
    far = [row for row in found["predicted"] if row["mode"] == mode]
    most = max(row["ranks"] for row in (*near, *far))
    alone = near[0]["tokens_per_s"] / near[0]["speedup"]
    series = [line("measured", [(row["ranks"], row["tokens_per_s"]) for row in near])]
    for name, points in _predictions(found, mode).items():
        series.append(line(name, [(ranks, alone * speedup) for ranks, speedup in points], dashed=True))
    series.append(line("ideal", [(1, alone), (most, alone * most)], dashed=True))
    last = count(near[-1]["ranks"], "rank")
    description = f"Measured: {near[-1]['speedup']:.2f} times one rank's speed on {last}."
    if far:
        description += f" Predicted: {far[-1]['speedup']:,.1f} times on {count(far[-1]['ranks'], 'rank')}."
    batch = "the whole batch" if mode == "strong" else "each rank's batch"
    title = f"{mode.capitalize()} scaling: {batch} stays the same"
    return LineChart(title, description, "ranks", "tokens per second", series, log_x=True, log_y=True)
