"""The shape of the nodes that a job asks for, NUMA regions and cores, and what each rank gets of them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from distgpt.cluster.affinity.machine import read_machine
from distgpt.cluster.affinity.plan import region
from distgpt.core.base.errors import UsageError
from distgpt.core.base.formatting import count

HERE = "here"


@dataclass(frozen=True, slots=True)
class Shape:
    """A node of some NUMA regions with as many cores each."""

    regions: int
    cores: int

    def cpus_per_rank(self, ranks: int) -> int:
        """Return how many cores each of so many ranks gets."""
        return max(1, self.regions * self.cores // ranks)

    def doubt(self, ranks: int, cpus: int) -> str:
        """Return what is slow about ranks of so many cores, one behind the other; "" if nothing is.

        Refuses more cores than there are.
        """
        if ranks * cpus > self.regions * self.cores:
            need = f"{count(ranks, 'rank')} of {count(cpus, 'CPU')} do not fit on"
            raise UsageError(f"{need} {count(self.regions * self.cores, 'core')} of a node: start fewer")
        ends = ((i * cpus, (i + 1) * cpus - 1) for i in range(ranks))
        spans = max(last // self.cores - first // self.cores + 1 for first, last in ends)
        if spans > 1:
            best = f"--ranks-per-node {self.regions} --cpus-per-task {self.cores}"
            return f"a rank has cores in {spans} NUMA regions, whose memory is far from the others: {best}"
        return ""


def shape(text: str) -> Shape:
    """Read "8x16", regions and cores of each, or "here", which is this machine."""
    if text == HERE:
        machine = read_machine()
        sizes = Counter(map(region, machine.cores))
        if machine.doubts:
            raise UsageError(f"--node here: {machine.doubts[0]}; describe the node, as in --node 8x16")
        return Shape(len(sizes), min(sizes.values()))
    found = re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,3})", text)
    if not found:
        raise UsageError(f"--node {text}: give NUMA regions and cores of each, as in 8x16, or here")
    return Shape(int(found[1]), int(found[2]))
