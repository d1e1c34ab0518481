"""When the same bits are promised, and why rounding is expected where they are not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from distgpt.core.base.formatting import count
from distgpt.core.config import TrainConfig
from distgpt.measure.verification.kept import Facts

SHARED = "shared memory"  # an exchange that adds in the order of the ranks, whatever the MPI

# Why bits differ, where two values do: what it is ("" if the values say so), and the values of both sides.
Reason = tuple[str, object, object]


@dataclass(frozen=True, slots=True)
class Side:
    """One of two ways to take the same steps; `words` say in a sentence where it was gone."""

    facts: Facts | None
    t: TrainConfig
    words: str


def why_rounding(one: Side, other: Side) -> list[str]:
    """Return why the bits of the same steps may differ; none: they must not."""
    a, b = one.facts, other.facts
    if a is None or b is None:
        unknown = [side.words for side in (one, other) if side.facts is None]
        return [f"it is not kept what bits depend on {' and '.join(unknown)}"]
    if bool(a.gpu) != bool(b.gpu):  # then all else differs, too
        return [f"a GPU {(one if a.gpu else other).words} alone"]
    differing = [*_programs(a, b), ("", one.t.dtype, other.t.dtype), *_gpus(a, b)]
    # Parts of the batch that are added in a fixed tree make the same bits of any ranks and threads.
    are_fixed = one.t.reproducible_parts and one.t.reproducible_parts == other.t.reproducible_parts
    differing += [] if are_fixed else _sums(a, b, other.t)
    found = [
        f"{what + ': ' if what else ''}{_shown(before)} {one.words}, {_shown(after)} {other.words}"
        for what, before, after in differing
        if before != after
    ]
    if a.sources != b.sources and a.versions.get("distgpt") == b.versions.get("distgpt"):
        found.append("the sources of distgpt differ")
    found += [f"processors of several kinds {side.words}" for side in (one, other) if _is_mixed(side)]
    if a.gpu and "True" not in (a.gpu.get("deterministic"), b.gpu.get("deterministic")):
        found.append("GPUs without --deterministic")
    if are_fixed:
        ways = {one.t.grad_sync, other.t.grad_sync}
        if other.t.optimizer == "muon" and "sharded" in ways and (len(ways) > 1 or _shards(a) != _shards(b)):
            found.append("with Muon a shard may begin within a piece of the norm")
    elif a.ranks == b.ranks > 1 and other.t.balance == "auto":
        found.append("--balance auto measures the ranks")
    return found


def _is_mixed(side: Side) -> bool:
    return side.facts is not None and len(side.facts.processors) > 1


def _shards(facts: Facts) -> object:
    """Return what shards depend on: as many ranks, threads and hosts, with the same MPI, have the same."""
    return facts.threads, facts.nodes, facts.mpi, facts.transport


def _programs(a: Facts, b: Facts) -> Iterator[Reason]:
    for name in dict.fromkeys((*a.versions, *b.versions)):
        if name != "distgpt" or a.sources != b.sources:
            yield name, a.versions.get(name, ""), b.versions.get(name, "")
    yield "processor", a.processors, b.processors
    yield "matmul", a.matmul, b.matmul


def _gpus(a: Facts, b: Facts) -> Iterator[Reason]:
    for name in dict.fromkeys((*a.gpu, *b.gpu)):
        yield f"the GPU's option {name}", a.gpu.get(name, ""), b.gpu.get(name, "")
    if a.gpu:
        yield "--recompute", a.recompute, b.recompute


def _sums(a: Facts, b: Facts, t: TrainConfig) -> list[Reason]:
    """Return what makes sums another order, or round otherwise: the first of these that differs."""
    found: list[Reason] = [
        ("ranks", a.ranks, b.ranks),
        ("threads of a rank", a.threads, b.threads),
        ("micro-batches", a.micro_batches, b.micro_batches),
    ]
    if a.threads != b.threads or a.micro_batches != b.micro_batches:
        return next([each] for each in found if each[1] != each[2])
    if b.ranks == 1 or (b.ranks == 2 and t.gradient_dtype == "float32"):
        return []  # the sum of two numbers has no order
    if a.exchange != b.exchange or b.exchange == SHARED:
        return [("gradients are summed by", a.exchange, b.exchange)]
    return [("ranks of a host", a.nodes, b.nodes), ("MPI", (a.mpi, a.transport), (b.mpi, b.transport))]


def _shown(value: object) -> str:
    """Return a value in words; of several each kind once: [2, 2] → "2", [1, 3] → "1 and 3"."""
    several = value if isinstance(value, list | tuple) else [value]
    return " and ".join(map(str, dict.fromkeys(each for each in several if each != ""))) or "none"


def described(facts: Facts) -> str:
    """Describe in a few words where steps were taken."""
    alike = f" of {count(facts.threads[0], 'thread')}" if len(set(facts.threads)) == 1 else ""
    threads = alike if any(facts.threads) else ""
    return f"{count(facts.ranks, 'rank')}{threads} on {', '.join(facts.processors)}"
