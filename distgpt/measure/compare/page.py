"""A comparison for people: on standard output, and as one HTML file."""

from __future__ import annotations

from collections.abc import Iterable

from distgpt.errors import printable
from distgpt.machine.stages import STAGES
from distgpt.measure.compare import published, tables
from distgpt.measure.compare.comparison import Comparison
from distgpt.measure.compare.measuring import Measured
from distgpt.measure.compare.tables import Rows
from distgpt.measure.compare.workload import NEW_TOKENS
from distgpt.show.charts import Bar, BarChart, LineChart, Series, StackedBars
from distgpt.show.page import Block as PageBlock
from distgpt.show.page import Facts, Paragraph, Section, Table, Texts, Verdict, page
from distgpt.show.tables import terminal_table, wrapped

PARTS = ("start and saving", "training", "start for inference", "inference")


def terminal(comparison: Comparison) -> str:
    """The whole result as text of 100 columns."""
    workload = comparison.question.workload
    parts = [wrapped(workload.sentence())]
    parts += [f"{rows.title}\n{terminal_table(rows.columns, rows.rows)}" for rows in _all_tables(comparison)]
    if workload.is_projects:
        parts.append(wrapped(f"{published.MPI_NOTE} {published.TEXT_NOTE}"))
    for who, text in tables.texts(comparison):
        parts.append(f"Written by {who} after the text's first tokens\n{wrapped(printable(text))}")
    return "\n\n".join([*parts, wrapped(comparison.verdict())])


def _all_tables(comparison: Comparison) -> Iterable[Rows]:
    """Those that have something to say."""
    found = [tables.runtimes(comparison)]
    if comparison.question.workload.is_projects:
        found.append(tables.published_runtimes(comparison))
    found += [tables.losses(comparison), tables.agreement(comparison)]
    found += [tables.died(comparison), tables.cannot_run(comparison)]
    return [rows for rows in found if rows.rows]


def html(comparison: Comparison) -> str:
    workload, where = comparison.question.workload, comparison.environment
    cores = f"{where['cores']} cores of {where['processor']}"
    gpus = f", {', '.join(where['gpus'])}" if where["gpus"] else ""
    sections = [
        Section("Verdict", list(_verdict(comparison))),
        Section("Time", list(_times(comparison))),
        Section("Losses", list(_losses(comparison))),
        Section("What they wrote", list(_texts(comparison))),
        Section("How it was measured", list(_method(comparison))),
    ]
    lead = f"{workload.sentence()}, then {NEW_TOKENS} tokens written greedily"
    lead = lead[0].upper() + lead[1:]
    return page("The same job in every stage", f"{lead}. {cores}{gpus}, {where['date'][:10]}.", sections)


def _verdict(comparison: Comparison) -> Iterable[PageBlock]:
    passed, verdict = comparison.passed, comparison.verdict()
    yield Paragraph(verdict) if passed is None else Verdict(passed, verdict)
    for rows in (tables.agreement(comparison), tables.died(comparison), tables.cannot_run(comparison)):
        if rows.rows:
            yield _table(rows)


def _table(rows: Rows) -> Table:
    return Table(rows.columns, rows.rows, rows.title, rows.note)


def _times(comparison: Comparison) -> Iterable[PageBlock]:
    yield _table(tables.runtimes(comparison))
    stages = comparison.measured
    base = tables.serial(comparison)
    for part in ("training", "inference"):
        found = [(stage.stage, tables.speed_up(stage, base, part)) for stage in stages]
        bars = [Bar(stage, value, f"{value:.2f} ×") for stage, value in found if value is not None]
        if len(bars) > 1:
            told = ", ".join(f"{bar.label} {bar.text}" for bar in bars)
            yield BarChart(
                f"Speed-up of {part} over serial, here", f"{told}.", "times as fast as serial", bars
            )
    phases = [(stage.stage, _phases(stage)) for stage in stages if stage.training]
    if phases:
        told = "; ".join(
            f"{stage}: "
            + ", ".join(f"{part} {value:.1f} s" for part, value in zip(PARTS, values, strict=True))
            for stage, values in phases
        )
        yield StackedBars("Time per phase", f"{told}.", "seconds", PARTS, phases)
    if comparison.question.workload.is_projects:
        yield _table(tables.published_runtimes(comparison))
        yield _published_chart()


def _published_chart() -> BarChart:
    base, bars = published.TRAINING["serial"], []
    for stage in STAGES:
        text = f"{base / published.TRAINING[stage]:.2f} ×"
        disputed = f", by its text {base / published.MPI_BY_TEXT:.2f} ×" if stage == "mpi" else ""
        bars.append(Bar(stage, base / published.TRAINING[stage], text + disputed))
    told = "; ".join(f"{bar.label} {bar.text}" for bar in bars)
    title = "Speed-up of training over serial, as published"
    return BarChart(title, f"{told}. {published.MPI_NOTE}", "times as fast as serial", bars)


def _phases(stage: Measured) -> list[float]:
    found = []
    for part, key in ((stage.training, "train_s"), (stage.inference, "seconds")):
        found += [part["process_s"] - part[key], part[key]] if part else [0.0, 0.0]
    return found


def _losses(comparison: Comparison) -> Iterable[PageBlock]:
    is_projects = comparison.question.workload.is_projects
    series = [
        Series(
            stage.stage,
            range(len(stage.losses)),
            [float("nan") if loss is None else loss for loss in stage.losses],
        )
        for stage in comparison.measured
        if stage.losses
    ]
    if is_projects:
        epochs = list(published.LOSSES)
        series += [
            Series(
                f"published {stage}", epochs, [row[stage] for row in published.LOSSES.values()], dashed=True
            )
            for stage in STAGES
        ]
    ends = ", ".join(f"{one.name} from {one.y[0]:.3f} to {one.y[-1]:.3f}" for one in series)
    yield LineChart("Loss", f"{ends}.", "epoch" if is_projects else "steps done", "loss", series)
    yield _table(tables.losses(comparison))


def _texts(comparison: Comparison) -> Iterable[PageBlock]:
    found = tables.texts(comparison)
    yield Texts([("all were given", comparison.opening.prompt), *found])
    if not found:
        yield Paragraph("No stage got so far.")


def _method(comparison: Comparison) -> Iterable[PageBlock]:
    opening, where = comparison.opening, comparison.environment
    yield Paragraph(
        "Each stage trains in a fresh process with the same seed, text and global batches, then another"
        " process lets the trained model write. The commands, as one would type them:"
    )
    yield Texts([(stage.stage, "\n\n".join(stage.commands)) for stage in comparison.measured])
    run = comparison.question.workload.run
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    yield Facts(
        [
            ("command", where["command"]),
            (
                "model",
                f"{opening.parameters:,} parameters, {run.model.n_layer} layers, {run.model.n_embd} wide",
            ),
            ("text", f"{opening.corpus_tokens:,} tokens, vocabulary {opening.vocabulary:,}"),
            ("number format", _formats(comparison)),
            ("processor", f"{where['processor']}, {where['cores']} of {where['cores_of_host']} cores"),
            ("GPUs", ", ".join(where["gpus"]) or "none"),
            ("system", where["system"]),
            ("software", f"{versions}; {where['blas']}"),
            ("date", where["date"]),
            ("sources", where["commit"] or "an installed package"),
        ]
    )


def _formats(comparison: Comparison) -> str:
    jobs = comparison.question.jobs
    same = jobs.dtype == jobs.gpu_dtype
    return jobs.dtype if same else f"{jobs.dtype}, on GPUs {jobs.gpu_dtype}"
