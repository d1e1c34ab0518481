"""`distgpt compare`: find the step at which two runs diverge, and the differences there. Only reads files."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from distgpt.core.base.errors import UsageError, escape
from distgpt.core.base.formatting import count
from distgpt.core.config import differences
from distgpt.core.saved.checkpoint import OPTIMIZER, WEIGHTS, verify
from distgpt.core.saved.tensors import DATA_SUM, read_header
from distgpt.measure.verification.records import (
    NEUTRAL,
    Kind,
    Record,
    Side,
    distance,
    numbers_apart,
    tabulated,
    why_rounding,
)

KINDS = {"loss": "loss", "gradient norm": "grad_norm"}  # labels of numbers, and their names in metrics.jsonl
FILES = {"weights": WEIGHTS, "optimizer": OPTIMIZER}


@dataclass(slots=True)
class Parting:
    """The step at which two runs diverge, and the reasons."""

    one: str
    other: str
    kinds: dict[str, Kind] = field(default_factory=lambda: {name: Kind() for name in (*KINDS, *FILES)})
    settings: dict[str, tuple[object, object]] = field(default_factory=dict)  # different ones at that step
    data: tuple[str, str] | None = None  # fingerprints of the training text, if they differ
    why: list[str] = field(default_factory=list)  # why the same steps may differ bitwise
    starts: list[str] = field(default_factory=list)

    @property
    def at(self) -> int | None:
        """The first step with a different loss or norm; otherwise the first checkpoint that differs."""
        firsts = {name: kind.first for name, kind in self.kinds.items() if kind.first is not None}
        numbers = [step for name, step in firsts.items() if name in KINDS]
        return min(numbers or firsts.values(), default=None)

    def to_json(self) -> dict[str, object]:
        return {"same": self.at is None, "step": self.at, **asdict(self)}


def compare(one: Path, other: Path) -> Parting:
    records = Record(one), Record(other)
    first, second = (record.steps for record in records)
    common = sorted(first.keys() & second.keys())
    if not common:
        raise UsageError(f"{one} and {other} have no step in common in metrics.jsonl")
    result = Parting(str(one), str(other))
    for step in common:
        for name, key in KINDS.items():
            pair = first[step].get(key), second[step].get(key)
            words = numbers_apart(*pair, ("in A", "in B")) if distance(*pair) else ""
            result.kinds[name].add(step, words)
    _compare_files(result, *(dict(record.checkpoints()) for record in records))
    _explain(result, records, result.at or common[-1])
    return result


def _compare_files(found: Parting, one: dict[int, Path], other: dict[int, Path]) -> None:
    """Compare the checksums of weights and optimizers. Verify the files of the last common checkpoint."""
    common = sorted(one.keys() & other.keys())
    for path in (one[common[-1]], other[common[-1]]) if common else ():
        verify(path)
    for step in common:
        for name, file in FILES.items():
            paths = [checkpoints[step] / file for checkpoints in (one, other)]
            sums = [read_header(path).metadata.get(DATA_SUM) if path.exists() else None for path in paths]
            if None not in sums:
                found.kinds[name].add(step, "different checksum" if sums[0] != sums[1] else "")


def _explain(found: Parting, records: tuple[Record, Record], step: int) -> None:
    """Find differences between the processes that took a step, and in their history."""
    configs = [record.settings_of(step) for record in records]
    found.settings = {name: pair for name, pair in differences(*configs).items() if name not in NEUTRAL}
    starts = [next(iter(record.starts_of(step, step)), None) for record in records]
    a, b = (start.facts if start else None for start in starts)
    if a and b and a.data != b.data:
        found.data = a.data, b.data
    sides = Side(a, configs[0].train, "in A"), Side(b, configs[1].train, "in B")
    # Skip settings that are already listed.
    found.why = [why for why in why_rounding(*sides) if why.partition(":")[0] not in found.settings]
    for name, record in zip("AB", records, strict=True):
        found.starts += [
            f"{name} resumed after step {start.step}" for start in record.starts if 0 < start.step < step
        ]
        found.starts += [
            f"{name} went back to step {at}, and has skipped {count(left_out, 'batch')} since"
            for at, left_out in record.skipped.items()
            if at < step
        ]


def page(found: Parting) -> str:
    """Return a table of the comparison and, below it, the differences at the first divergent step."""
    lines = [f"A: {found.one}", f"B: {found.other}", tabulated(found.kinds)]
    lines += [f"{name}: {a!r:.60} in A, {b!r:.60} in B" for name, (a, b) in found.settings.items()]
    lines += [f"data: {found.data[0]} in A, {found.data[1]} in B"] if found.data else []
    lines += [*found.why, *found.starts, *([] if found.at else [verdict(found)])]
    return "\n".join(line if "\n" in line else escape(line) for line in lines)


def verdict(found: Parting) -> str:
    """Describe in one sentence whether and why two runs diverge."""
    if found.at is None:
        same = "bitwise identical"
        return same if found.kinds["weights"].compared else f"{same} in all losses; no common checkpoints"
    named = [*found.settings, *["data"] * bool(found.data)]
    if named:
        return f"the runs diverge at step {found.at}; different settings: {', '.join(named)}"
    if found.why:
        return f"the runs diverge at step {found.at} by rounding: {found.why[0]}"
    return (
        f"the runs diverge at step {found.at}, but no setting differs; memory or a processor may have failed;"
        f" to find out which run is right, run distgpt replay --steps {found.at} on each"
    )
