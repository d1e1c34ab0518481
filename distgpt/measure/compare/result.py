"""A comparison of stages: one table of times and losses, one verdict, as JSON and for people."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from distgpt.cluster.jobs.processes import undisturbed
from distgpt.core.base.errors import DisagreementError, print_lines
from distgpt.core.base.files import atomic_file, storage_errors
from distgpt.core.config import WITH_MPI
from distgpt.core.data.batches import refuse_uneven
from distgpt.measure.compare.agreement import Difference, differences
from distgpt.measure.compare.stages import (
    FORMAT,
    CompareOptions,
    Measured,
    find_prompt,
    find_runnable,
    refuse_foreign,
)
from distgpt.measure.doctor.facts import Facts, anonymised, environment
from distgpt.measure.doctor.verdicts import sentence
from distgpt.measure.jobs import say
from distgpt.show.page import Block, Column, Paragraph, Table, Texts, tabulated, terminal

VERSION = 1
RUNNING, DONE, INTERRUPTED = "running", "done", "interrupted"
NOTHING = "(only spaces and line breaks)"
UNFINISHED = "Interrupted: only what was measured until then is here."


def compare(options: CompareOptions, out: Path, as_json: bool) -> None:
    """Run the whole command. Raise a DisagreementError if stages disagree."""
    run = options.run
    refuse_foreign(out)
    stages, missing, launcher = find_runnable(options)
    for stage, troubles in missing.items():
        say(f"{stage:<9} cannot run here: {'; '.join(map(sentence, troubles))}")
    if set(stages) & set(WITH_MPI):
        refuse_uneven(run.train.batch_size, options.ranks, run.train.grad_accum or 1)
    comparison = Comparison(options, missing, find_prompt(run), environment())
    with storage_errors("use", out):
        out.mkdir(parents=True, exist_ok=True)
    with atomic_file(out / "prompt.txt") as file:
        file.write(comparison.prompt.encode())
    save(comparison, out)
    try:
        for stage in stages:
            ranks = options.ranks if stage in WITH_MPI else 1
            comparison.measured.append(Measured(stage, ranks, options.dtype_of(stage)))
            comparison.measured[-1].measure(options, launcher, out)
            save(comparison, out)
        comparison.state = DONE
    except BaseException as error:
        comparison.state = INTERRUPTED
        if isinstance(error, KeyboardInterrupt):
            error.add_note(f"what was measured is in {out}")
        raise
    finally:
        with undisturbed():
            save(comparison, out)
        print_lines(
            json.dumps(comparison.as_json(), indent=1) if as_json else terminal(blocks_of(comparison))
        )
        print_lines(f"\nresult  {out / 'compare.json'}", err=as_json)
    if comparison.problems:
        raise DisagreementError("; ".join(comparison.problems))


@dataclass(slots=True)
class Comparison:
    """The results of a comparison so far."""

    options: CompareOptions
    missing: dict[str, list[Facts]]  # of stages that cannot run here
    prompt: str
    environment: dict[str, Any]
    measured: list[Measured] = field(default_factory=list)
    state: str = RUNNING

    @property
    def differences(self) -> list[Difference]:
        return differences(self.measured, self.options.tolerance, self.options.run.train.optimizer)

    @property
    def problems(self) -> list[str]:
        """The reasons why this comparison failed."""
        died = [f"stage {stage.stage} {stage.failed}" for stage in self.measured if stage.failed]
        return [difference.sentence() for difference in self.differences if not difference.agrees] + died

    @property
    def passed(self) -> bool | None:
        """Return whether all agree; None if there was nothing to compare."""
        if self.problems or self.state != DONE:
            return False
        return True if self.differences else None

    def verdict(self) -> str:
        """Describe the result in one or two sentences."""
        unfinished = UNFINISHED if self.state == INTERRUPTED else ""
        if self.problems or unfinished:
            return ". ".join(filter(None, ["; ".join(self.problems), unfinished]))
        found = self.differences
        if not found:
            only = self.measured[0].stage if self.measured else "no stage"
            return f"Only {only} ran, so there is nothing to compare it with."
        farthest = max(found, key=lambda difference: difference.largest or 0.0)
        largest = farthest.largest or 0.0
        every = "Both" if len(self.measured) == 2 else f"All {len(self.measured)}"
        differs = f"by more than {largest:.1e} (tolerance {farthest.tolerance:.0e})"
        same = (
            f"{every} stages compute the same: no loss of the first {farthest.judged} steps differs from"
            f" {farthest.reference}'s {differs if largest else 'in a single bit'}."
        )
        later = max(each.largest_later or 0.0 for each in found)
        return f"{same} Later ones differ by up to {later:.1e}." if later else same

    def workload(self) -> str:
        t, tokens = self.options.run.train, self.options.run.model.seq_len
        return f"{self.options.name}: {t.steps} steps of {t.batch_size} × {tokens} tokens"

    def as_json(self) -> dict[str, Any]:
        """Return everything, for compare.json and --json. Names no directories and hosts of this machine."""
        run = self.options.run
        return {
            "format": FORMAT,
            "version": VERSION,
            "state": self.state,
            "passed": self.passed,
            "verdict": self.verdict(),
            "environment": self.environment,
            "workload": {
                "name": self.options.name,
                "sentence": self.workload(),
                "prompt": self.prompt,
                "settings": {
                    name: anonymised(value) if isinstance(value, str) else value
                    for name, value in (asdict(run.model) | asdict(run.train)).items()
                },
            },
            "cannot_run": self.missing,
            "stages": [asdict(stage) for stage in self.measured],
            "differences": [asdict(each) for each in self.differences],
        }


def save(comparison: Comparison, out: Path) -> None:
    with atomic_file(out / "compare.json") as file:
        file.write(json.dumps(comparison.as_json(), indent=1, allow_nan=False).encode() + b"\n")


def blocks_of(comparison: Comparison) -> list[Block]:
    """Return the whole result for a terminal."""
    wrote = [(f"Written by {who} after the text's first tokens", text) for who, text in _texts(comparison)]
    workload = Paragraph(comparison.workload())
    verdict = Paragraph(comparison.verdict())
    return [workload, _table(comparison), Texts(wrote), verdict]


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
NOTE = (
    "× serial is the speed-up of training over that stage, which uses all its threads too; tokens/s is the"
    " median training step's, MB the peak memory of all ranks in training. Loss and bits/byte are the last"
    " step's. Differs is the largest relative difference of a loss that is judged."
)


def _table(comparison: Comparison) -> Table:
    """Tabulate all stages: times, the last loss, and the largest difference of a loss that is judged."""
    found = {each.stage: each for each in comparison.differences}
    serial = [each.training["train_s"] for each in comparison.measured[:1] if each.training]
    rows: list[dict[str, Any]] = []
    for stage in comparison.measured:
        row: dict[str, Any] = {"stage": stage.stage, "ranks": stage.ranks, "threads": stage.threads or None}
        row |= stage.training or {}
        row |= {"infer_s": stage.inference["seconds"]} if stage.inference else {}
        if stage.training and serial and comparison.measured[0].stage == "serial":
            row["training_up"] = serial[0] / stage.training["train_s"]
        row["loss"] = _number(stage.losses[-1], ".4f") if stage.losses else None
        row["differs"] = _number(found[stage.stage].largest, ".2e") if stage.stage in found else None
        rows.append(row)
    return tabulated(COLUMNS, rows, "Measured here", NOTE, "–")


def _number(value: float | None, digits: str) -> str:
    return "not finite" if value is None else format(value, digits)


def _texts(comparison: Comparison) -> Sequence[tuple[str, str]]:
    """Return the text of each stage; stages that wrote the same share an entry."""
    found: dict[str, list[str]] = {}
    for stage in comparison.measured:
        if stage.inference is not None:
            found.setdefault(stage.inference["text"], []).append(stage.stage)
    return [(", ".join(stages), text if text.strip() else NOTHING) for text, stages in found.items()]
