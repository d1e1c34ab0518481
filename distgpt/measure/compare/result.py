"""The result of a comparison: one table of times and losses, one verdict, as JSON and for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from distgpt.cluster.jobs.processes import ending
from distgpt.core.config import STAGES
from distgpt.measure import published
from distgpt.measure.compare.agreement import Difference, differences, find_reference
from distgpt.measure.compare.stages import INTERRUPTED, CompareOptions, Measured, Runnable
from distgpt.measure.compare.workload import NEW_TOKENS, PROMPT_TOKENS, Opening
from distgpt.measure.doctor.facts import anonymised
from distgpt.measure.doctor.verdicts import sentence
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

RUNNING, DONE = "running", "done"
NOTHING = "(nothing to be seen: only spaces and line breaks)"
UNFINISHED = "Interrupted: only what was measured until then is here."


@dataclass(slots=True)
class Comparison:
    """The results of a comparison so far."""

    options: CompareOptions
    runnable: Runnable
    opening: Opening
    environment: dict[str, Any]
    measured: list[Measured] = field(default_factory=list)
    state: str = RUNNING

    @property
    def differences(self) -> list[Difference]:
        return differences(self.measured, self.options.tolerance, self.options.workload.run.train.optimizer)

    @property
    def problems(self) -> list[str]:
        """The reasons why this comparison failed."""
        died = [
            f"stage {stage.stage} {failure(stage.failed)}"
            for stage in self.measured
            if stage.failed and stage.failed["code"] is not None
        ]
        return [difference.sentence() for difference in self.differences if not difference.agrees] + died

    @property
    def passed(self) -> bool | None:
        """Return whether all agree; None if there was nothing to compare."""
        if self.problems or self.state != DONE:
            return False
        return True if self.differences else None

    def verdict(self) -> str:
        """Describe the result in one or two sentences."""
        if self.problems:
            return "; ".join(self.problems) + f". {UNFINISHED}" * (self.state == INTERRUPTED)
        if self.state == INTERRUPTED:
            return UNFINISHED
        found = self.differences
        if not found:
            only = self.measured[0].stage if self.measured else "no stage"
            return f"Only {only} ran, so there is nothing to compare it with."
        farthest = max(found, key=lambda difference: difference.largest or 0.0)
        largest = farthest.largest or 0.0
        every = "Both" if len(self.measured) == 2 else f"All {len(self.measured)}"
        whole = farthest.judged == farthest.steps
        steps = "any step" if whole else f"the first {farthest.judged} steps"
        by = f"by more than {largest:.1e} ({farthest.stage}, step {farthest.step}; tolerance"
        differs = f"{by} {farthest.tolerance:.0e})" if largest else "in a single bit"
        same = (
            f"{every} stages compute the same: no loss of {steps} differs from {farthest.reference}'s"
            f" {differs}."
        )
        later = max((each.largest_later or 0.0 for each in found), default=0.0)
        growth = ": in a long run rounding grows" if later > largest else ""
        return f"{same} Later ones differ by up to {later:.1e}{growth}." if later else same

    def as_json(self) -> dict[str, Any]:
        """Return everything, for compare.json and --json. Names no folders and hosts of this machine."""
        workload, run = self.options.workload, self.options.workload.run
        settings = asdict(run.model) | asdict(run.train)
        return {
            "state": self.state,
            "passed": self.passed,
            "verdict": self.verdict(),
            "environment": self.environment,
            "workload": {
                "name": workload.name,
                "sentence": workload.sentence(),
                "is_the_course_projects": workload.is_projects,
                **asdict(self.opening),
                "steps": run.train.steps,
                "tokens_per_step": run.train.batch_size * run.model.seq_len,
                "prompt_tokens": PROMPT_TOKENS,
                "new_tokens": NEW_TOKENS,
                "settings": settings
                | {key: anonymised(settings[key]) for key in ("data", "tokenizer", "init")},
            },
            "launcher": self.runnable.launcher.name if self.runnable.launcher else None,
            "cannot_run": self.runnable.missing,
            "stages": [asdict(stage) for stage in self.measured],
            "differences": [asdict(each) | {"agrees": each.agrees} for each in self.differences],
            "published": published.figures() if workload.is_projects else None,
        }


def failure(failed: dict[str, Any]) -> str:
    """Describe how a stage ended."""
    if failed["code"] is None:
        return f"interrupted in {failed['phase']}"
    words = f" ({failed['last_words']})" if failed["last_words"] else ""
    return f"died in {failed['phase']}: {ending(failed['code'])}{words}"


# -- for people


def render_terminal(comparison: Comparison) -> str:
    """Render the whole result as text of 100 columns."""
    wrote = [(f"Written by {who} after the text's first tokens", text) for who, text in texts(comparison)]
    workload = Paragraph(comparison.options.workload.sentence())
    shown = [workload, table(comparison), *_not_measured(comparison), Texts(wrote), _result(comparison)]
    return terminal(shown)


def render_html(comparison: Comparison) -> str:
    """Render the same as a page, with the prompt, the commands and what is known of the machine."""
    opening, where = comparison.opening, comparison.environment
    missing = [block for block in _not_measured(comparison) if block.rows]
    wrote = Texts([("all were given", opening.prompt), *texts(comparison)])
    commands = Texts([(stage.stage, "\n\n".join(stage.commands)) for stage in comparison.measured])
    model = f"{opening.parameters:,} parameters, vocabulary {opening.vocabulary:,}"
    facts = {"model": model, "text": f"{opening.corpus_tokens:,} tokens", **where}
    sections = [
        Section("Verdict", [_result(comparison), *missing]),
        Section("Times and losses", [table(comparison)]),
        Section("What they wrote", [wrote]),
        Section(
            "How it was measured", [commands, KeyValues([(name, str(of)) for name, of in facts.items()])]
        ),
    ]
    return html("The same job in every stage", f"{comparison.options.workload.sentence()}.", sections)


def _result(comparison: Comparison) -> Block:
    passed, verdict = comparison.passed, comparison.verdict()
    return Paragraph(verdict) if passed is None else Verdict(passed, verdict)


COLUMNS: tuple[Column, ...] = (
    *((key, key, str) for key in ("stage", "ranks", "threads")),
    ("train s", "train_s", "{:,.2f}".format),
    ("× serial", "training_up", "{:.2f}".format),
    ("infer s", "infer_s", "{:,.2f}".format),
    ("tokens/s", "tokens_per_s", "{:,.0f}".format),
    ("MB", "peak_memory", lambda ranks: f"{sum(ranks) / 1e6:,.0f}"),
    ("loss", "loss", str),
    ("bits/byte", "train_bits_per_byte", "{:.4f}".format),
    ("differs", "differs", str),
)


def table(comparison: Comparison) -> Table:
    """Tabulate all stages: times, the last loss, and the largest difference of a loss that is judged."""
    found = {each.stage: each for each in comparison.differences}
    reference = find_reference(comparison.measured)
    serial = next((stage for stage in comparison.measured if stage.stage == "serial"), None)
    rows = []
    for stage in comparison.measured:
        row: dict[str, Any] = {"stage": stage.stage, "ranks": stage.ranks, "threads": stage.threads or None}
        row |= stage.training or {}
        row |= {"infer_s": stage.inference["seconds"]} if stage.inference else {}
        if stage.training and serial and serial.training and stage.training["train_s"]:
            row["training_up"] = serial.training["train_s"] / stage.training["train_s"]
        row["loss"] = _loss(stage.losses[-1]) if stage.losses else None
        if each := found.get(stage.stage):
            row["differs"] = "not finite" if each.largest is None else f"{each.largest:.2e}"
        rows.append(row)
    notes = [
        "× serial is the speed-up of training over that stage, which uses all its threads too; tokens/s are"
        " those of the median training step, and MB is the most memory that training took, of all ranks. Loss"
        " and bits/byte are those of the last step."
    ]
    if found and reference:
        judged = max(each.judged for each in found.values())
        notes.append(
            f"Differs: the largest relative difference from {reference.stage}'s losses in {judged:,} steps."
        )
    if comparison.options.workload.is_projects:
        rows += list(_published(comparison))
        notes.append(
            f"*: published by the course project, all {published.EPOCHS} epochs on {published.HARDWARE}."
            f" {published.MPI_NOTE} {published.TEXT_NOTE}"
        )
    return tabulated(COLUMNS, rows, "Measured here", " ".join(notes), "–")


def _published(comparison: Comparison) -> Iterator[dict[str, Any]]:
    """Yield the course project's figures, with the losses of the last epoch that it published of ours."""
    epoch = max(step for step in published.LOSSES if step < comparison.options.workload.run.train.steps)
    for stage in STAGES:
        row = {"stage": f"{stage}*", "tokens_per_s": published.tokens_per_s(stage)}
        row |= {"train_s": published.TRAINING[stage], "infer_s": published.INFERENCE[stage]}
        row |= {"training_up": published.TRAINING["serial"] / published.TRAINING[stage]}
        yield row | {"loss": f"{published.LOSSES[epoch][stage]:.4f}"}


def _loss(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.4f}"


def _not_measured(comparison: Comparison) -> Sequence[Table]:
    """Tabulate stages that died, and those that cannot run with what they lack."""
    died = [[stage.stage, failure(stage.failed)] for stage in comparison.measured if stage.failed]
    lacking: dict[str, list[str]] = {}
    for stage, troubles in comparison.runnable.missing.items():
        lacking.setdefault("; ".join(map(sentence, troubles)), []).append(stage)
    missing = [[", ".join(stages), text] for text, stages in lacking.items()]
    return (
        Table(("stage", "how"), died, "Did not get to their end"),
        Table(("stage", "what is missing, and what helps"), missing, "Not run: these stages cannot run here"),
    )


def texts(comparison: Comparison) -> list[tuple[str, str]]:
    """Return the text of each stage; stages that wrote the same share an entry."""
    found: dict[str, list[str]] = {}
    for stage in comparison.measured:
        if stage.inference is not None:
            found.setdefault(stage.inference["text"], []).append(stage.stage)
    return [(", ".join(stages), text if text.strip() else NOTHING) for text, stages in found.items()]
