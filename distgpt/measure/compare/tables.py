"""The tables of a comparison, the same rows for a terminal and for the page: all cells are text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distgpt.machine.doctor import sentence
from distgpt.machine.stages import STAGES
from distgpt.measure.compare import published
from distgpt.measure.compare.agreement import JUDGED, MEASURED
from distgpt.measure.compare.comparison import Comparison
from distgpt.measure.compare.measuring import Measured
from distgpt.measure.compare.progress import failure

NONE = "–"


@dataclass(frozen=True, slots=True)
class Rows:
    """A table that is not laid out yet."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def runtimes(comparison: Comparison) -> Rows:
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
    return Rows("Measured here", columns, rows, note)


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
    ups = [_times(speed_up(stage, base, part)) for part in ("training", "inference")]
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


def _times(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"


def published_runtimes(comparison: Comparison) -> Rows:
    """With what a stage does here as a multiple of it."""
    ours = {stage.stage: stage.training["tokens_per_s"] for stage in comparison.measured if stage.training}
    rows = []
    for stage in STAGES:
        trained, wrote = published.TRAINING[stage], published.INFERENCE[stage]
        rate = published.tokens_per_s(stage)
        rows.append(
            [
                stage,
                f"{trained:,.2f}",
                f"{published.TRAINING['serial'] / trained:.2f}",
                f"{wrote:.2f}",
                f"{published.INFERENCE['serial'] / wrote:.2f}",
                f"{rate:,.1f}",
                f"{ours[stage] / rate:,.0f}" if stage in ours else NONE,
            ]
        )
    columns = ("stage", "train s", "× serial", "infer s", "× serial", "tokens/s", "here ×")
    note = (
        f"All {published.EPOCHS} epochs, on {published.HARDWARE}; tokens/s follow from these seconds, and"
        f" “here ×” is the speed of this machine, another one, as a multiple of that. {published.MPI_NOTE}"
    )
    return Rows("Published by the course project", columns, rows, note)


def losses(comparison: Comparison) -> Rows:
    """A line for each stage, those that were published below."""
    workload = comparison.question.workload
    epochs = workload.epochs()
    rows = [[stage.stage, *(_loss(stage, epoch) for epoch in epochs)] for stage in comparison.measured]
    if not workload.is_projects:
        return Rows("Loss", ("stage", *(f"step {epoch + 1:,}" for epoch in epochs)), rows)
    rows += [
        [f"published {stage}", *(f"{published.LOSSES[epoch][stage]:.3f}" for epoch in epochs)]
        for stage in STAGES
    ]
    note = (
        f"Epoch 0 is the first step's loss. {published.TEXT_NOTE} Its stages drift apart by up to"
        f" {published.drift():.0%}."
    )
    return Rows("Loss per epoch", ("stage", *(f"epoch {epoch}" for epoch in epochs)), rows, note)


def _loss(stage: Measured, step: int) -> str:
    if step >= len(stage.losses):
        return NONE
    loss = stage.losses[step]
    return "not finite" if loss is None else f"{loss:.4f}"


def agreement(comparison: Comparison) -> Rows:
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
    return Rows(title, columns, rows, note)


def _relative(difference: float | None) -> str:
    return "not finite" if difference is None else f"{difference:.2e}"


def text_verdict(same: bool | None, at: int | None) -> str:
    if same is None:
        return NONE
    return "the same" if same else f"differs from token {at}"


def cannot_run(comparison: Comparison) -> Rows:
    """What several lack is told once."""
    told: dict[str, str] = {}
    rows = []
    for stage, troubles in comparison.runnable.missing.items():
        text = "; ".join(map(sentence, troubles))
        rows.append([stage, f"as {told[text]}" if text in told else text])
        told.setdefault(text, stage)
    return Rows("Not run: these stages cannot run here", ("stage", "what is missing, and what helps"), rows)


def died(comparison: Comparison) -> Rows:
    rows = [[stage.stage, failure(stage.failed)] for stage in comparison.measured if stage.failed]
    return Rows("Did not get to their end", ("stage", "how"), rows)


def texts(comparison: Comparison) -> list[tuple[str, str]]:
    """What each stage wrote, those that wrote the same as the reference told once."""
    found: dict[str, list[str]] = {}
    for stage in comparison.measured:
        if stage.inference is not None:
            found.setdefault(stage.inference["text"], []).append(stage.stage)
    return [(", ".join(stages), text) for text, stages in found.items()]
