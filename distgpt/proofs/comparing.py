"""`distgpt compare`: at which step two runs part, and what of them differs there. Reads their files alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from distgpt.core.base.errors import UsageError, escape
from distgpt.core.base.formatting import count
from distgpt.core.config import differences
from distgpt.core.saved.checkpoint import OPTIMIZER, WEIGHTS, verify
from distgpt.core.saved.tensors import DATA_SUM, read_header
from distgpt.proofs.numbers import are_same, distance, numbers_apart, tolerance_of
from distgpt.proofs.promise import Side, described, why_rounding
from distgpt.proofs.records import NEUTRAL, Record

MOST_SHOWN = 12  # differences of settings: one screen


@dataclass(slots=True)
class Parting:
    """Where two runs part, and why. None: nowhere."""

    one: str
    other: str
    steps: int  # that both have written
    last: int
    step: int | None = None  # the first step whose losses differ
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
    taken: tuple[str, str] = ("", "")

    @property
    def is_same(self) -> bool:
        return self.step is None and self.weights_differ is None and self.optimizer_differs is None

    def to_json(self) -> dict[str, object]:
        return {"same": self.is_same, **asdict(self)}


def compare(one: Path, other: Path) -> Parting:
    """Compare two runs."""
    records = Record(one), Record(other)
    first, second = (record.steps for record in records)
    common = sorted(first.keys() & second.keys())
    if not common:
        raise UsageError(f"no training step is in the metrics.jsonl of both {one} and {other}")
    found = Parting(str(one), str(other), len(common), common[-1])
    settings = [record.settings_of(common[0]).train for record in records]
    limit = tolerance_of(*settings)
    found.tolerance = limit.apart
    for step in common:
        losses = first[step]["loss"], second[step]["loss"]
        norms = first[step].get("grad_norm"), second[step].get("grad_norm")
        if found.step is None and not (are_same(*losses) and are_same(*norms)):
            name, pair = ("gradient norm", norms) if are_same(*losses) else ("loss", losses)
            found.step, found.words = step, f"{name} {numbers_apart(*pair, ('in A', 'in B'))}"
        if found.beyond is None and distance(*losses) > limit.apart:
            found.beyond = step
    _compare_weights(found, *records)
    places = found.step, found.weights_differ, found.optimizer_differs
    _explain(found, records, next((step for step in places if step is not None), common[-1]))
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
    """Say what differs between the processes that have taken a step, and in what came before."""
    configs = [record.settings_of(step) for record in records]
    found.settings = {name: pair for name, pair in differences(*configs).items() if name not in NEUTRAL}
    starts = [next(iter(record.starts_of(step, step)), None) for record in records]
    facts = [start.facts if start else None for start in starts]
    one, other = (
        Side(fact, config.train, words)
        for fact, config, words in zip(facts, configs, ("in A", "in B"), strict=True)
    )
    if facts[0] and facts[1] and facts[0].data != facts[1].data:
        found.data = facts[0].data, facts[1].data
    found.taken = described(facts[0]) if facts[0] else "", described(facts[1]) if facts[1] else ""
    dtype = str(found.settings["dtype"][0]) if "dtype" in found.settings else None
    # Not again a setting that is listed anyway.
    found.why = [reason for reason in why_rounding(one, other) if not (dtype and reason.startswith(dtype))]
    for name, record in zip("AB", records, strict=True):
        if resumed := [str(start.step) for start in record.starts if 0 < start.step < step]:
            found.starts.append(f"{name} resumed after step {', '.join(resumed)}")
        found.starts += [
            f"{name} went back to step {at}, and has left out {count(left_out, 'batch')} since"
            for at, left_out in record.skipped.items()
            if at < step
        ]


def page(found: Parting) -> str:
    """Describe where two runs part, on one screen."""
    paths = zip("AB", (found.one, found.other), found.taken, strict=True)
    rows = [(name, path + (f": {taken}" if taken else "")) for name, path, taken in paths]
    if found.step is None:
        same = f"the same to the bit in all {count(found.steps, 'step')} of both, up to step {found.last}"
        rows.append(("losses", same))
    else:
        rounding = f"rounding ({found.tolerance:g})"
        above = f"above {rounding} from step {found.beyond} on" if found.beyond else f"never above {rounding}"
        rows.append(("losses", f"the first that differs is of step {found.step}: {found.words}; {above}"))
    if found.weights_differ is not None:
        rows.append(("weights", f"other bits after step {found.weights_differ}"))
    elif found.weights_same is not None:
        rows.append(("weights", f"the same to the bit after step {found.weights_same}"))
    if found.optimizer_differs is not None:
        rows.append(("optimizer", f"other bits after step {found.optimizer_differs}"))
    few = [*found.settings.items()][:MOST_SHOWN]
    rows += [("setting", f"{name}: {a!r:.60} in A, {b!r:.60} in B") for name, (a, b) in few]
    if len(found.settings) > MOST_SHOWN:
        rows.append(("", f"… and {len(found.settings) - MOST_SHOWN} more (--json lists all)"))
    if found.data:
        rows.append(("data", f"other texts: {found.data[0]} in A, {found.data[1]} in B"))
    rows += [("bits", reason) for reason in found.why]
    rows += [("starts", line) for line in found.starts]
    lines = [f"{name:<10} {escape(text)}" for name, text in rows]
    return "\n".join([*lines, *([verdict(found)] if found.is_same else [])])


def verdict(found: Parting) -> str:
    """Say in a sentence whether two runs part, and by what."""
    if found.is_same:
        same = "the same to the bit"
        return f"{same} in all losses: no checkpoint is in both" if found.weights_same is None else same
    at = found.step or found.weights_differ or found.optimizer_differs
    if found.settings or found.data:
        named = [*found.settings, *(["data"] if found.data else [])]
        return f"they part at step {at}, by {', '.join(named[:MOST_SHOWN])}"
    if found.why:
        return f"they part at step {at}, by rounding: {found.why[0]}"
    return (
        f"they part at step {at}, and nothing that is kept differs: memory or a processor may have failed;"
        f" distgpt replay A --steps {at}, and B, tells which is right"
    )
