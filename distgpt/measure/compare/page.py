"""A comparison for people: its tables, once for both, on standard output and in one HTML file with charts."""

from __future__ import annotations

from collections.abc import Iterable

from distgpt.errors import printable
from distgpt.machine.doctor import sentence
from distgpt.machine.stages import STAGES
from distgpt.measure.compare import published
from distgpt.measure.compare.agreement import JUDGED, MEASURED
from distgpt.measure.compare.comparison import Comparison, failure
from distgpt.measure.compare.stages import Measured
from distgpt.measure.compare.workload import NEW_TOKENS
from distgpt.show.charts import Bar, BarChart, LineChart, Series, StackedBars
from distgpt.show.page import Block as PageBlock
from distgpt.show.page import Facts, Paragraph, Section, Table, Texts, Verdict, page
from distgpt.show.tables import terminal_table, wrapped

PARTS = ("start and saving", "training", "start for inference", "inference")
NONE = "–"


def terminal(comparison: Comparison) -> str:
    """The whole result as text of 100 columns."""
    workload = comparison.options.workload
    tables = [runtimes(comparison)]
    tables += [published.runtimes(_speeds(comparison))] if workload.is_projects else []
    tables += [losses(comparison), agreement(comparison), died(comparison), cannot_run(comparison)]
    parts = [wrapped(workload.sentence())]
    parts += [f"{each.caption}\n{terminal_table(each.columns, each.rows)}" for each in tables if each.rows]
    if workload.is_projects:
        parts.append(wrapped(f"{published.MPI_NOTE} {published.TEXT_NOTE}"))
    for who, text in texts(comparison):
        parts.append(f"Written by {who} after the text's first tokens\n{wrapped(printable(text))}")
    return "\n\n".join([*parts, wrapped(comparison.verdict())])


def html(comparison: Comparison) -> str:
    workload, where = comparison.options.workload, comparison.environment
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
    for table in (agreement(comparison), died(comparison), cannot_run(comparison)):
        if table.rows:
            yield table


def _times(comparison: Comparison) -> Iterable[PageBlock]:
    yield runtimes(comparison)
    base = serial(comparison)
    for part in ("training", "inference"):
        found = [(stage.stage, speed_up(stage, base, part)) for stage in comparison.measured]
        bars = [Bar(stage, value, f"{value:.2f} ×") for stage, value in found if value is not None]
        if len(bars) > 1:
            description = ", ".join(f"{bar.label} {bar.text}" for bar in bars) + "."
            title = f"Speed-up of {part} over serial, here"
            yield BarChart(title, description, "times as fast as serial", bars)
    phases = [(stage.stage, _phases(stage)) for stage in comparison.measured if stage.training]
    if phases:
        each = (
            f"{stage}: "
            + ", ".join(f"{part} {value:.1f} s" for part, value in zip(PARTS, values, strict=True))
            for stage, values in phases
        )
        yield StackedBars("Time per phase", "; ".join(each) + ".", "seconds", PARTS, phases)
    if comparison.options.workload.is_projects:
        yield published.runtimes(_speeds(comparison))
        yield published.chart()


def _speeds(comparison: Comparison) -> dict[str, float]:
    return {stage.stage: stage.training["tokens_per_s"] for stage in comparison.measured if stage.training}


def _phases(stage: Measured) -> list[float]:
    found = []
    for part, key in ((stage.training, "train_s"), (stage.inference, "seconds")):
        found += [part["process_s"] - part[key], part[key]] if part else [0.0, 0.0]
    return found


def _losses(comparison: Comparison) -> Iterable[PageBlock]:
    is_projects = comparison.options.workload.is_projects
    series = []
    for stage in filter(lambda stage: stage.losses, comparison.measured):
        known = [float("nan") if loss is None else loss for loss in stage.losses]
        series.append(Series(stage.stage, range(len(known)), known))
    for name in STAGES if is_projects else ():
        rows = published.LOSSES.items()
        x, y = [epoch for epoch, _ in rows], [row[name] for _, row in rows]
        series.append(Series(f"published {name}", x, y, dashed=True))
    ends = ", ".join(f"{one.name} from {one.y[0]:.3f} to {one.y[-1]:.3f}" for one in series)
    yield LineChart("Loss", f"{ends}.", "epoch" if is_projects else "steps done", "loss", series)
    yield losses(comparison)


def _texts(comparison: Comparison) -> Iterable[PageBlock]:
    found = texts(comparison)
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
    shape = comparison.options.workload.run.model
    dtype, on_gpus = comparison.options.dtype_of("serial"), comparison.options.gpu_dtype
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    yield Facts(
        [
            ("command", where["command"]),
            ("model", f"{opening.parameters:,} parameters, {shape.n_layer} layers, {shape.n_embd} wide"),
            ("text", f"{opening.corpus_tokens:,} tokens, vocabulary {opening.vocabulary:,}"),
            ("number format", dtype if dtype == on_gpus else f"{dtype}, on GPUs {on_gpus}"),
            ("processor", f"{where['processor']}, {where['cores']} of {where['cores_of_host']} cores"),
            ("GPUs", ", ".join(where["gpus"]) or "none"),
            ("system", where["system"]),
            ("software", f"{versions}; {where['blas']}"),
            ("date", where["date"]),
            ("sources", where["commit"] or "an installed package"),
        ]
    )


# -- tables


def runtimes(comparison: Comparison) -> Table:
    base = serial(comparison)
    on_gpu = any(stage.training and stage.training["peak_gpu_memory"] for stage in comparison.measured)
    rows = [_runtime(stage, base) + [_gpu_memory(stage)] * on_gpu for stage in comparison.measured]
    columns = (
        *("stage", "ranks", "threads", "train s", "× serial", "infer s", "× serial", "tokens/s"),
        *("MB all", "MB rank", "whole s", *["GPU MB"] * on_gpu),
    )
    note = (
        "× serial is the speed-up over that stage, which uses all its threads too. Tokens/s are those of the"
        " median training step. MB is the most memory that training took, of all ranks together and of the"
        " largest. Whole s is from the start of the processes to their end, kernels and files included."
    )
    return Table(columns, rows, "Measured here", note)


def serial(comparison: Comparison) -> Measured | None:
    return next((stage for stage in comparison.measured if stage.stage == "serial"), None)


def _runtime(stage: Measured, base: Measured | None) -> list[str]:
    training, inference = stage.training, stage.inference
    trained, rate, total, largest = NONE, NONE, NONE, NONE
    if training is not None:
        trained, rate = f"{training['train_s']:.2f}", f"{training['tokens_per_s']:,.0f}"
        total, largest = (_megabytes(take(training["peak_memory"])) for take in (sum, max))
    wrote = NONE if inference is None else f"{inference['seconds']:.2f}"
    whole = f"{stage.process_s:.1f}" if stage.process_s else NONE
    ups = [_ratio(speed_up(stage, base, part)) for part in ("training", "inference")]
    shape = [stage.stage, str(stage.ranks), str(stage.threads or NONE)]
    return [*shape, trained, ups[0], wrote, ups[1], rate, total, largest, whole]


def _gpu_memory(stage: Measured) -> str:
    """Of all ranks."""
    taken = stage.training["peak_gpu_memory"] if stage.training else None
    return _megabytes(sum(taken)) if taken else NONE


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f}"


SECONDS = {"training": "train_s", "inference": "seconds"}


def speed_up(stage: Measured, base: Measured | None, part: str) -> float | None:
    """Over serial, if both have done this part."""
    ours, serials = getattr(stage, part), getattr(base, part) if base else None
    if not ours or not serials or not ours[SECONDS[part]]:
        return None
    return float(serials[SECONDS[part]] / ours[SECONDS[part]])


def _ratio(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"


def losses(comparison: Comparison) -> Table:
    """A row for each stage, and the published ones below."""
    workload = comparison.options.workload
    epochs = workload.epochs()
    rows = [[stage.stage, *(_loss(stage, epoch) for epoch in epochs)] for stage in comparison.measured]
    if not workload.is_projects:
        return Table(("stage", *(f"step {epoch + 1:,}" for epoch in epochs)), rows, "Loss")
    rows += [
        [f"published {stage}", *(f"{published.LOSSES[epoch][stage]:.3f}" for epoch in epochs)]
        for stage in STAGES
    ]
    note = (
        f"Epoch 0 is the first step's loss. {published.TEXT_NOTE} Its stages drift apart by up to"
        f" {published.drift():.0%}."
    )
    return Table(("stage", *(f"epoch {epoch}" for epoch in epochs)), rows, "Loss per epoch", note)


def _loss(stage: Measured, step: int) -> str:
    if step >= len(stage.losses):
        return NONE
    loss = stage.losses[step]
    return "not finite" if loss is None else f"{loss:.4f}"


def agreement(comparison: Comparison) -> Table:
    found = comparison.differences
    longer = any(each.steps > each.judged for each in found)
    rows = [
        [
            each.stage,
            f"{each.judged:,}",
            _relative(each.largest),
            f"{each.step:,}",
            f"{each.tolerance:.0e}",
            "yes" if each.agrees else f"no, from step {each.first:,}",
            *[_relative(each.largest_of_all)] * longer,
            text_verdict(each.same_text, each.text_differs_at),
        ]
        for each in found
    ]
    reference = comparison.reference
    title = f"Largest difference from {reference.stage if reference else 'serial'}'s losses"
    columns = (
        *("stage", "steps", "relative", "at step", "tolerance", "agrees"),
        *(*["in all steps"] * longer, "text"),
    )
    usual = MEASURED.get(reference.dtype) if reference else None
    note = (
        f"Between CPU stages, rounding alone was measured to come to {usual:.1e} in {JUDGED} steps of"
        f" {reference.dtype}; the tolerance leaves room for other machines."
        if usual and reference
        else ""
    )
    return Table(columns, rows, title, note)


def _relative(difference: float | None) -> str:
    return "not finite" if difference is None else f"{difference:.2e}"


def text_verdict(same: bool | None, at: int | None) -> str:
    if same is None:
        return NONE
    return "the same" if same else f"differs from token {at}"


def cannot_run(comparison: Comparison) -> Table:
    """What several stages lack is said once."""
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


def texts(comparison: Comparison) -> list[tuple[str, str]]:
    """What each stage wrote; stages that wrote the same text share an entry."""
    found: dict[str, list[str]] = {}
    for stage in comparison.measured:
        if stage.inference is not None:
            found.setdefault(stage.inference["text"], []).append(stage.stage)
    return [(", ".join(stages), text) for text, stages in found.items()]
