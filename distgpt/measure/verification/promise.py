"""When the same bits are promised, and why rounding is expected where they are not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distgpt.core.base.formatting import count
from distgpt.core.config import TrainConfig
from distgpt.measure.verification.kept import Facts

SHARED = "shared memory"  # an exchange that adds in the order of the ranks, whatever the MPI


@dataclass(frozen=True, slots=True)
class Side:
    """One of two ways to take the same steps; `words` say in a sentence where it was gone."""

    facts: Facts | None
    t: TrainConfig
    words: str


def why_rounding(one: Side, other: Side) -> list[str]:
    """Return why the bits of the same steps may differ; none: they must not."""
    unknown = [side.words for side in (one, other) if side.facts is None]
    if one.facts is None or other.facts is None:
        return [f"it is not kept what bits depend on {' and '.join(unknown)}"]
    pair = _Pair(one.facts, other.facts, (one.words, other.words))
    if bool(pair.one.gpu) != bool(pair.other.gpu):  # then all else differs, too
        return [f"a GPU {pair.words[0 if pair.one.gpu else 1]} alone"]
    found = [*pair.programs()]
    if one.t.dtype != other.t.dtype:
        found.append(pair.each(one.t.dtype, other.t.dtype))
    if pair.one.gpu:
        found += pair.gpus()
    # Parts of the batch that are added in a fixed tree make the same bits of any ranks and threads.
    if not (one.t.reproducible_parts and one.t.reproducible_parts == other.t.reproducible_parts):
        found += pair.sums(other.t)
    elif other.t.optimizer == "muon" and pair.may_cut_norms({one.t.grad_sync, other.t.grad_sync}):
        found.append("with Muon a shard may begin within a piece of the norm")
    return found


@dataclass(frozen=True, slots=True)
class _Pair:
    one: Facts
    other: Facts
    words: tuple[str, str]

    def each(self, before: object, after: object, what: str = "") -> str:
        """Return what differs, and where it is which: "processor: znver4 in the run, znver5 here"."""
        shown = ", ".join(
            f"{value if value != '' else 'none'} {where}"
            for value, where in zip((before, after), self.words, strict=True)
        )
        return f"{what}: {shown}" if what else shown

    def may_cut_norms(self, ways: set[str]) -> bool:
        """Return whether shards differ: not so of as many ranks, threads and hosts, with the same MPI."""
        first, second = ((f.threads, f.nodes, f.mpi, f.transport) for f in (self.one, self.other))
        return "sharded" in ways and (len(ways) > 1 or first != second)

    def programs(self) -> Iterator[str]:
        """Yield what differs in program, libraries and processors."""
        one, other = self.one, self.other
        if one.sources != other.sources:
            before, after = (facts.versions.get("distgpt", "") for facts in (one, other))
            is_named = before != after
            yield self.each(before, after, "distgpt") if is_named else "the sources of distgpt differ"
        for name in dict.fromkeys((*one.versions, *other.versions)):
            was, now = one.versions.get(name, ""), other.versions.get(name, "")
            if was != now and name != "distgpt":
                yield self.each(was, now, name)
        if one.processors != other.processors:
            yield self.each(", ".join(one.processors), ", ".join(other.processors), "processor")
        for facts, where in zip((one, other), self.words, strict=True):
            if len(facts.processors) > 1:
                yield f"processors of several kinds {where}"
        if one.matmul != other.matmul:
            yield self.each(one.matmul, other.matmul, "matmul")

    def gpus(self) -> Iterator[str]:
        """Yield what keeps GPUs from computing the same bits."""
        one, other = self.one.gpu, self.other.gpu
        for name in dict.fromkeys((*one, *other)):
            if one.get(name, "") != other.get(name, ""):
                yield self.each(one.get(name, ""), other.get(name, ""), f"the GPU's option {name}")
        if "True" not in (one.get("deterministic"), other.get("deterministic")):
            yield "GPUs without --deterministic"
        if self.one.recompute != self.other.recompute:
            yield self.each(self.one.recompute, self.other.recompute, "--recompute")

    def sums(self, t: TrainConfig) -> Iterator[str]:
        """Yield what makes sums another order, without --reproducible-parts."""
        one, other = self.one, self.other
        if one.ranks != other.ranks:
            yield self.each(one.ranks, other.ranks, "ranks")
        elif one.threads != other.threads:
            yield self.each(_listed(one.threads), _listed(other.threads), "threads of a rank")
        elif one.micro_batches != other.micro_batches:
            yield self.each(one.micro_batches, other.micro_batches, "micro-batches")
        elif other.ranks > 1:
            yield from self.exchanges(t)

    def exchanges(self, t: TrainConfig) -> Iterator[str]:
        """Yield what makes an exchange add in another order, or round otherwise, on as many ranks."""
        one, other = self.one, self.other
        if t.balance == "auto":
            yield "--balance auto measures the ranks"
        if one.ranks == 2 and t.gradient_dtype == "float32":
            return  # the sum of two numbers has no order
        if one.exchange != other.exchange:
            yield self.each(one.exchange, other.exchange, "gradients are summed by")
        elif other.exchange != SHARED:
            if one.nodes != other.nodes:
                yield self.each(_listed(one.nodes), _listed(other.nodes), "ranks of a host")
            if (one.mpi, one.transport) != (other.mpi, other.transport):
                yield self.each(one.mpi or one.transport, other.mpi or other.transport, "MPI")


def _listed(numbers: Sequence[int]) -> str:
    """[2, 2] → "2", [1, 3] → "1 and 3"."""
    return " and ".join(map(str, dict.fromkeys(numbers)))


def described(facts: Facts) -> str:
    """Describe in a few words where steps were taken."""
    alike = f" of {count(facts.threads[0], 'thread')}" if len(set(facts.threads)) == 1 else ""
    threads = alike if any(facts.threads) else ""
    return f"{count(facts.ranks, 'rank')}{threads} on {', '.join(facts.processors)}"
