"""`distgpt compare`: at which step two runs part, and what of them differs there. Reads their files alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from distgpt.core.base.errors import UsageError
from distgpt.core.base.formatting import count
from distgpt.core.config import differences
from distgpt.core.saved.checkpoint import OPTIMIZER, WEIGHTS, verify
from distgpt.core.saved.tensors import DATA_SUM, read_header
from distgpt.measure.verification.records import (
    NEUTRAL,
    Record,
    Side,
    distance,
    numbers_apart,
    tolerance_of,
    why_rounding,
)
from distgpt.show.page import terminal_table


@dataclass(slots=True)
class Parting:
    """Where two runs part, and why. None: nowhere."""

    one: str
    other: str
    steps: int  # that both have written
    last: int
    step: int | None = None  # the first step whose losses or norms differ
    words: str = ""  # about it
    beyond: int | None = None  # the first step whose losses are further apart than rounding brings them
    tolerance: float = 0.0
    weights_same: int | None = None  # the last checkpoint of both with the same weights
    weights_differ: int | None = None  # and the first one with others
    optimizer_differs: int | None = None  # the first one with the same weights and another optimizer's state
    settings: dict[str, tuple[object, object]] = field(default_factory=dict)  # at that step
    data: tuple[str, str] | None = None  # the texts' fingerprints, if they differ
    why: list[str] = field(default_factory=list)  # why the bits of the same steps may differ
    starts: list[str] = field(default_factory=list)

    @property
    def at(self) -> int | None:
        """The first step at which anything differs, losses first."""
        places = (self.step, self.weights_differ, self.optimizer_differs)
        return next((step for step in places if step is not None), None)

    def to_json(self) -> dict[str, object]:
        return {"same": self.at is None, **asdict(self)}


def compare(one: Path, other: Path) -> Parting:
    """Compare two runs."""
    records = Record(one), Record(other)
    first, second = (record.steps for record in records)
    common = sorted(first.keys() & second.keys())
    if not common:
        raise UsageError(f"no training step is in the metrics.jsonl of both {one} and {other}")
    found = Parting(str(one), str(other), len(common), common[-1])
    found.tolerance = tolerance_of(*(record.settings_of(common[0]).train for record in records)).apart
    for step in common:
        for name, key in (("loss", "loss"), ("gradient norm", "grad_norm")):
            pair = first[step].get(key), second[step].get(key)
            if found.step is None and distance(*pair):
                found.step, found.words = step, f"{name} {numbers_apart(*pair, ('in A', 'in B'))}"
            if found.beyond is None and key == "loss" and distance(*pair) > found.tolerance:
                found.beyond = step
    _compare_weights(found, *records)
    _explain(found, records, found.at or common[-1])
    return found


def _compare_weights(found: Parting, one: Record, other: Record) -> None:
    """Compare the checksums of weights and optimizers; of the last checkpoint also the files with them."""
    paths = dict(one.checkpoints()), dict(other.checkpoints())
    common = sorted(paths[0].keys() & paths[1].keys())
    for step in common:
        weights, optimizers = (
            [_checksum(checkpoints[step] / name) for checkpoints in paths] for name in (WEIGHTS, OPTIMIZER)
        )
        if step == common[-1]:
            for checkpoints in paths:
                verify(checkpoints[step])
        if None in weights:
            continue
        if weights[0] == weights[1]:
            found.weights_same = step
            if optimizers[0] != optimizers[1] and found.optimizer_differs is None:
                found.optimizer_differs = step
        elif found.weights_differ is None:
            found.weights_differ = step


def _checksum(file: Path) -> str | None:
    return read_header(file).metadata.get(DATA_SUM) if file.exists() else None


def _explain(found: Parting, records: tuple[Record, Record], step: int) -> None:
    """Find what differs between the processes that have taken a step, and in what came before."""
    configs = [record.settings_of(step) for record in records]
    found.settings = {name: pair for name, pair in differences(*configs).items() if name not in NEUTRAL}
    starts = [next(iter(record.starts_of(step, step)), None) for record in records]
    a, b = (start.facts if start else None for start in starts)
    if a and b and a.data != b.data:
        found.data = a.data, b.data
    sides = Side(a, configs[0].train, "in A"), Side(b, configs[1].train, "in B")
    # Not again a setting that is listed anyway.
    found.why = [why for why in why_rounding(*sides) if why.partition(":")[0] not in found.settings]
    for name, record in zip("AB", records, strict=True):
        found.starts += [
            f"{name} resumed after step {start.step}" for start in record.starts if 0 < start.step < step
        ]
        found.starts += [
            f"{name} went back to step {at}, and has left out {count(left_out, 'batch')} since"
            for at, left_out in record.skipped.items()
            if at < step
        ]


def page(found: Parting) -> str:
    """Tabulate where two runs part, and what differs there; the last line is the verdict if they do not."""
    losses = f"the same to the bit in all {count(found.steps, 'step')} of both, up to step {found.last}"
    if found.step is not None:
        above = f"above rounding from step {found.beyond} on" if found.beyond else "never above rounding"
        losses = f"differ from step {found.step} on: {found.words}; {above} ({found.tolerance:g})"
    weights = f"the same to the bit after step {found.weights_same}" if found.weights_same is not None else ""
    if found.weights_differ is not None:
        weights = f"differ after step {found.weights_differ}"
    optimizer = f"differs after step {found.optimizer_differs}" if found.optimizer_differs else ""
    rows = [("A", found.one), ("B", found.other), ("losses", losses)]
    rows += [("weights", weights), ("optimizer", optimizer)]
    rows += [(name, f"{a!r:.60} in A, {b!r:.60} in B") for name, (a, b) in found.settings.items()]
    rows += [("data", f"{found.data[0]} in A, {found.data[1]} in B")] if found.data else []
    rows += [("bits", reason) for reason in found.why]
    rows += [("starts", line) for line in found.starts]
    table = terminal_table(("what", "result"), [row for row in rows if row[1]])
    return table + (f"\n{verdict(found)}" if found.at is None else "")


def verdict(found: Parting) -> str:
    """Say in a sentence whether two runs part, and by what."""
    if found.at is None:
        same = "the same to the bit"
        return f"{same} in all losses: no checkpoint is in both" if found.weights_same is None else same
    if found.settings or found.data:
        return (
            f"they part at step {found.at}, by {', '.join([*found.settings, *(['data'] * bool(found.data))])}"
        )
    if found.why:
        return f"they part at step {found.at}, by rounding: {found.why[0]}"
    return (
        f"they part at step {found.at}, and nothing that is kept differs: memory or a processor may have"
        f" failed; distgpt replay A --steps {found.at}, and B, tells which is right"
    )
