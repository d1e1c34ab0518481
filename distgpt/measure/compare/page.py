"""A comparison for people: its tables, once for both, on standard output and in one HTML file with charts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from distgpt.core.config import STAGES
from distgpt.doctor.verdicts import sentence
from distgpt.measure import published
from distgpt.measure.compare.agreement import MEASURED, Comparison, failure
from distgpt.measure.compare.stages import Measured
from distgpt.measure.compare.workload import NEW_TOKENS
from distgpt.show.charts import Bar, BarChart, LineChart, Series
from distgpt.show.page import (
    Block,
    Column,
    KeyValues,
    Paragraph,
    Section,
    Table,
    Texts,
    Verdict,
    html,
    tabulated,
    terminal,
)

PARTS = ("start and saving", "training", "start for inference", "inference")
SECONDS = {"training": "train_s", "inference": "seconds"}
NONE = "–"
NOTHING = "(nothing to be seen: only spaces and line breaks)"
MEDIAN_NOTE = "Tokens/s are those of the median training step: train s also holds the first, slower ones."


def render_terminal(comparison: Comparison) -> str:
    """Render the whole result as text of 100 columns."""
    tables = agreement(comparison), died(comparison), cannot_run(comparison)
    wrote = [(f"Written by {who} after the text's first tokens", text) for who, text in texts(comparison)]
    workload = Paragraph(comparison.options.workload.sentence())
    parts = (_times(comparison), [losses(comparison)], tables, [Texts(wrote)], [_result(comparison)])
    return terminal([workload, *(block for part in parts for block in part)])


def render_html(comparison: Comparison) -> str:
    workload, where = comparison.options.workload, comparison.environment
    cores = f"{where['cores']} cores of {where['processor']}"
    gpus = f", {', '.join(where['gpus'])}" if where["gpus"] else ""
    wrote = texts(comparison)
    tables = (agreement(comparison), died(comparison), cannot_run(comparison))
    written = Texts([("all were given", comparison.opening.prompt), *wrote])
    sections = [
        Section("Verdict", [_result(comparison), *(table for table in tables if table.rows)]),
        Section("Time", list(_times(comparison))),
        Section("Losses", [_loss_chart(comparison), losses(comparison)]),
        Section("What they wrote", [written] if wrote else [written, Paragraph("No stage got so far.")]),
        Section("How it was measured", _method(comparison)),
    ]
    lead = f"{workload.sentence()}, then {NEW_TOKENS} tokens written greedily"
    lead = lead[0].upper() + lead[1:]
    return html("The same job in every stage", f"{lead}. {cores}{gpus}, {where['date'][:10]}.", sections)


def _result(comparison: Comparison) -> Block:
    passed, verdict = comparison.passed, comparison.verdict()
    return Paragraph(verdict) if passed is None else Verdict(passed, verdict)


# -- sections


def _times(comparison: Comparison) -> Iterable[Block]:
    yield runtimes(comparison)
    base = serial(comparison)
    for part in SECONDS:
        found = [(stage.stage, speed_up(stage, base, part)) for stage in comparison.measured]
        bars = [Bar(stage, value, f"{value:.2f} ×") for stage, value in found if value is not None]
        if len(bars) > 1:
            yield _bars(f"Speed-up of {part} over serial, here", "times as fast as serial", bars)
    phases = [(stage.stage, _phases(stage)) for stage in comparison.measured if stage.training]
    if phases:
        bars = [Bar(stage, values, f"{sum(values):.1f} s") for stage, values in phases]
        yield _bars("Time per phase", "seconds", bars, PARTS)
    if comparison.options.workload.is_projects:
        yield published_runtimes(comparison)


def _bars(title: str, unit: str, bars: list[Bar], parts: Sequence[str] = ()) -> BarChart:
    return BarChart(title, "; ".join(f"{bar.label} {bar.text}" for bar in bars) + ".", unit, bars, parts)


def _phases(stage: Measured) -> list[float]:
    found = []
    for part, key in SECONDS.items():
        taken = getattr(stage, part)
        found += [taken["process_s"] - taken[key], taken[key]] if taken else [0.0, 0.0]
    return found


def _loss_chart(comparison: Comparison) -> LineChart:
    is_projects = comparison.options.workload.is_projects
    series = []
    for stage in (stage for stage in comparison.measured if stage.losses):
        known = [float("nan") if loss is None else loss for loss in stage.losses]
        series.append(Series(stage.stage, range(len(known)), known))
    for name in STAGES if is_projects else ():
        y = [row[name] for row in published.LOSSES.values()]
        series.append(Series(f"published {name}", list(published.LOSSES), y, dashed=True))
    ends = ", ".join(f"{one.name} from {one.y[0]:.3f} to {one.y[-1]:.3f}" for one in series)
    return LineChart("Loss", f"{ends}.", "epoch" if is_projects else "steps done", "loss", series)


def _method(comparison: Comparison) -> list[Block]:
    opening, where = comparison.opening, comparison.environment
    shape = comparison.options.workload.run.model
    dtype, on_gpus = comparison.options.dtype_of("serial"), comparison.options.gpu_dtype
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    facts = {
        "command": where["command"],
        "model": f"{opening.parameters:,} parameters, {shape.n_layer} layers, {shape.n_embd} wide",
        "text": f"{opening.corpus_tokens:,} tokens, vocabulary {opening.vocabulary:,}",
        "number format": dtype if dtype == on_gpus else f"{dtype}, on GPUs {on_gpus}",
        "processor": f"{where['processor']}, {where['cores']} of {where['cores_of_host']} cores",
        "GPUs": ", ".join(where["gpus"]) or "none",
        "system": where["system"],
        "software": f"{versions}; {where['blas']}",
        "date": where["date"],
        "sources": where.get("commit", "an installed package"),
    }
    return [
        Paragraph(
            "Each stage trains in a fresh process with the same seed, text and global batches, then another"
            " process lets the trained model write. The commands, as one would type them:"
        ),
        Texts([(stage.stage, "\n\n".join(stage.commands)) for stage in comparison.measured]),
        KeyValues(list(facts.items())),
    ]


def texts(comparison: Comparison) -> list[tuple[str, str]]:
    """Return the text of each stage; stages that wrote the same share an entry."""
    found: dict[str, list[str]] = {}
    for stage in comparison.measured:
        if stage.inference is not None:
            found.setdefault(stage.inference["text"], []).append(stage.stage)
    return [(", ".join(stages), text if text.strip() else NOTHING) for text, stages in found.items()]


# -- times


def _megabytes(count: float) -> str:
    return f"{count / 1e6:,.0f}"


TIMES: tuple[Column, ...] = (
    ("train s", "train_s", "{:,.2f}".format),
    ("× serial", "training_up", "{:.2f}".format),
    ("infer s", "infer_s", "{:,.2f}".format),
    ("× serial", "inference_up", "{:.2f}".format),
)
RUNTIMES: tuple[Column, ...] = (
    *((key, key, str) for key in ("stage", "ranks", "threads")),
    *TIMES,
    ("tokens/s", "tokens_per_s", "{:,.0f}".format),
    ("MB all", "peak_memory", lambda ranks: _megabytes(sum(ranks))),
    ("MB rank", "peak_memory", lambda ranks: _megabytes(max(ranks))),
    ("whole s", "process_s", "{:.1f}".format),
    ("GPU MB", "peak_gpu_memory", lambda ranks: _megabytes(sum(ranks))),
)
PUBLISHED: tuple[Column, ...] = (
    ("stage", "stage", str),
    *TIMES,
    ("tokens/s", "tokens_per_s", "{:,.1f}".format),
    ("here ×", "here", "{:,.0f}".format),
)


def runtimes(comparison: Comparison) -> Table:
    base = serial(comparison)
    rows = []
    for stage in comparison.measured:
        row: dict[str, Any] = {"stage": stage.stage, "ranks": stage.ranks, "threads": stage.threads or None}
        row |= stage.training or {}
        row |= {"infer_s": stage.inference["seconds"]} if stage.inference else {}
        row |= {f"{part}_up": speed_up(stage, base, part) for part in SECONDS}
        row |= {"process_s": stage.process_s or None, "peak_gpu_memory": row.get("peak_gpu_memory") or None}
        rows.append(row)
    note = (
        f"× serial is the speed-up over that stage, which uses all its threads too. {MEDIAN_NOTE} MB is the"
        " most memory that training took, of all ranks together and of the largest. Whole s is from the start"
        " of the processes to their end, kernels and files included."
    )
    return tabulated(RUNTIMES, rows, "Measured here", note, NONE)


def serial(comparison: Comparison) -> Measured | None:
    return next((stage for stage in comparison.measured if stage.stage == "serial"), None)


def speed_up(stage: Measured, base: Measured | None, part: str) -> float | None:
    """Return the speed-up over serial, if both have done this part."""
    ours, serials = getattr(stage, part), getattr(base, part) if base else None
    if not ours or not serials or not ours[SECONDS[part]]:
        return None
    return float(serials[SECONDS[part]] / ours[SECONDS[part]])


def published_runtimes(comparison: Comparison) -> Table:
    """Tabulate the published figures, and the speeds measured here as multiples of theirs."""
    ours = {stage.stage: stage.training["tokens_per_s"] for stage in comparison.measured if stage.training}
    rows = []
    for stage in STAGES:
        trained, wrote = published.TRAINING[stage], published.INFERENCE[stage]
        speed = published.tokens_per_s(stage)
        row = {"stage": stage, "train_s": trained, "infer_s": wrote, "tokens_per_s": speed}
        row |= {"training_up": published.TRAINING["serial"] / trained}
        row |= {"inference_up": published.INFERENCE["serial"] / wrote}
        rows.append(row | {"here": ours[stage] / speed if stage in ours else None})
    note = (
        f"All {published.EPOCHS} epochs, on {published.HARDWARE}; tokens/s follow from these seconds, and"
        " “here ×” is the speed of this machine, another one, as a multiple of that."
        f" {published.MPI_NOTE}"
    )
    return tabulated(PUBLISHED, rows, "Published by the course project", note, NONE)


# -- losses, and what went wrong


def losses(comparison: Comparison) -> Table:
    """Tabulate the losses of each stage, and the published ones below."""
    workload = comparison.options.workload
    epochs = workload.epochs()
    rows = [
        [stage.stage, *(_loss(stage, epoch) for epoch in epochs), _bits(stage)]
        for stage in comparison.measured
    ]
    last = "bits/byte"  # of the last step
    if not workload.is_projects:
        return Table(("stage", *(f"step {epoch + 1:,}" for epoch in epochs), last), rows, "Loss")
    rows += [
        [f"published {stage}", *(f"{published.LOSSES[epoch][stage]:.3f}" for epoch in epochs), NONE]
        for stage in STAGES
    ]
    note = f"Epoch 0 is the first step's loss. {published.TEXT_NOTE}"
    return Table(("stage", *(f"epoch {epoch}" for epoch in epochs), last), rows, "Loss per epoch", note)


def _bits(stage: Measured) -> str:
    bits = stage.training and stage.training.get("train_bits_per_byte")
    return NONE if bits is None else f"{bits:.4f}"


def _loss(stage: Measured, step: int) -> str:
    if step >= len(stage.losses):
        return NONE
    loss = stage.losses[step]
    return "not finite" if loss is None else f"{loss:.4f}"


def agreement(comparison: Comparison) -> Table:
    found, reference = comparison.differences, comparison.reference
    longer = any(each.steps > each.judged for each in found)
    columns: list[Column] = [
        ("stage", "", lambda each: each.stage),
        ("steps", "", lambda each: f"{each.judged:,}"),
        ("relative", "", lambda each: _relative(each.largest)),
        ("at step", "", lambda each: f"{each.step:,}"),
        ("tolerance", "", lambda each: f"{each.tolerance:.0e}"),
        ("agrees", "", lambda each: "yes" if each.agrees else f"no, from step {each.first:,}"),
        ("in all steps", "", lambda each: _relative(each.largest_of_all) if longer else ""),
        ("text", "", lambda each: text_verdict(each.same_text, each.text_differs_at)),
    ]
    note = ""
    optimizer = comparison.options.workload.run.train.optimizer
    usual = MEASURED[optimizer, reference.dtype] if reference else None
    if reference and usual and usual.apart:
        note = (
            f"Between CPU stages, rounding alone was measured to come to {usual.apart:.1e} in {usual.steps}"
            f" steps of {reference.dtype}; the tolerance leaves room for other machines."
        )
    title = f"Largest difference from {reference.stage if reference else 'serial'}'s losses"
    return tabulated(columns, found, title, note)


def _relative(difference: float | None) -> str:
    return "not finite" if difference is None else f"{difference:.2e}"


def text_verdict(same: bool | None, at: int | None) -> str:
    if same is None:
        return NONE
    return "the same" if same else f"differs from token {at}"


def cannot_run(comparison: Comparison) -> Table:
    """Tabulate what stages lack; what several lack is said once."""
    first: dict[str, str] = {}
    rows = []
    for stage, troubles in comparison.runnable.missing.items():
        text = "; ".join(map(sentence, troubles))
        rows.append([stage, f"as {first[text]}" if text in first else text])
        first.setdefault(text, stage)
    return Table(("stage", "what is missing, and what helps"), rows, "Not run: these stages cannot run here")


def died(comparison: Comparison) -> Table:
    rows = [[stage.stage, failure(stage.failed)] for stage in comparison.measured if stage.failed]
    return Table(("stage", "how"), rows, "Did not get to their end")
