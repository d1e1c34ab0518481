"""The α–β model of an Allreduce: fitted to measured times, evaluated for numbers of ranks nobody measured.

A message costs α seconds and β seconds per byte (the time to add numbers up is part of β). Among N ranks, n
bytes take, with r = ⌈log₂ N⌉,

| form           | messages in a row | bytes sent by each rank | used for                           |
|----------------|-------------------|-------------------------|------------------------------------|
| doubling       | r                 | r n                     | short arrays                       |
| scatter-gather | 2 r               | 2 n (N − 1) / N         | long ones: MPICH and its relatives |
| ring           | 2 (N − 1)         | 2 n (N − 1) / N         | long ones: Open MPI, NCCL          |

The first two are for powers of two. In other numbers the ranks beyond the largest power below give their
arrays to others first and get the sums at last: two messages and 2 n more than that power takes, at least.

Libraries switch between forms by size, and memory is slower than cache, so the sizes are cut into up to three
regimes with an α and a β each.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

from distgpt.core.base.errors import DataError, UsageError

MOST_REGIMES = 3
FEWEST_POINTS = 3  # in a regime: two would be met exactly, whatever they are
SHORT = 16 << 10  # bytes: a table that ends below has seen only short arrays
NOISE = 1e-3  # relative: a fit closer than this is as good as an exact one
TCP = 52  # bytes of a frame for IP's and TCP's headers, with time stamps
ETHERNET = 38  # bytes that a frame has beside: header, sum, preamble and gap

# "Gbps" counts bits too; "GB/s" would count bytes, which no network is named by.
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0}
_QUANTITY = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(.*)")
_EXAMPLE = 'as in "1gbit,100us" or "25Gbit/s,10us"'


def doublings(ranks: int) -> int:
    """⌈log₂ N⌉."""
    return (ranks - 1).bit_length()


def paired(ranks: int) -> int:
    """The largest power of two up to N: the ranks that double, or scatter and gather."""
    return 1 << ranks.bit_length() - 1


def messages(form: str, ranks: int) -> int:
    """Messages in a row."""
    if form == "ring":
        return 2 * (ranks - 1)
    if form == "memory":
        return 2 * doublings(ranks)
    among = paired(ranks)
    return doublings(among) * (1 if form == "doubling" else 2) + 2 * (among < ranks)


def volume(form: str, ranks: int) -> float:
    """Bytes that each rank sends, per byte of the array."""
    if form == "ring":
        return 2 * (ranks - 1) / ranks
    if form == "memory":
        return 2.0
    among = paired(ranks)
    return (doublings(among) if form == "doubling" else 2 * (among - 1) / among) + 2 * (among < ranks)


@dataclass(frozen=True, slots=True)
class Regime:
    """The cost of arrays of up to `most` bytes; None: of any size."""

    form: str
    alpha: float
    beta: float
    most: float | None = None

    def seconds(self, ranks: int, size: float) -> float:
        return messages(self.form, ranks) * self.alpha + volume(self.form, ranks) * size * self.beta


@dataclass(frozen=True, slots=True)
class AlphaBeta:
    """Up to three regimes, by size."""

    regimes: tuple[Regime, ...]
    ranks: int  # among which the table was measured

    def seconds(self, ranks: int, size: float) -> float:
        """Return the time of one Allreduce; never less for more bytes.

        Where a regime ends the next may start lower: a longer array never takes less time.
        """
        longest = 0.0
        for regime in self.regimes if ranks > 1 and size > 0 else ():
            within = regime.most is None or size <= regime.most
            longest = max(longest, regime.seconds(ranks, size if within else regime.most or size))
            if within:
                break
        return longest

    def in_parts(self, ranks: int, size: float) -> float:
        """Return the time if every rank sends to all others what they add up, and then its own sum."""
        return replace(self.regimes[-1], form="ring").seconds(ranks, size) if size > 0 else 0.0

    def slowed(self, factor: float) -> AlphaBeta:
        """Return the model of ranks that share what these have: memory, or cores. A byte takes longer."""
        return replace(self, regimes=tuple(replace(each, beta=each.beta * factor) for each in self.regimes))

    def worst_error(self, points: Sequence[tuple[float, float]]) -> float:
        """The largest relative difference from a table of (bytes, seconds)."""
        return max(abs(self.seconds(self.ranks, size) / seconds - 1) for size, seconds in points)


@dataclass(frozen=True, slots=True)
class Network:
    """What joins hosts: a message takes `latency` seconds and its bits at `bits_per_s`, cut into frames."""

    bits_per_s: float
    latency: float
    mtu: int = 1500  # bytes of a frame, without Ethernet's own

    @property
    def seconds_per_byte(self) -> float:
        """Of a message: frames are longer than what they bring."""
        return 8 / self.bits_per_s * (self.mtu + ETHERNET) / (self.mtu - TCP)

    def __str__(self) -> str:
        fitting = [word for word, bits in _BITS.items() if self.bits_per_s >= bits]  # from small to large
        unit = fitting[-1] if fitting else "kbit"
        named = unit if unit == "kbit" else unit.capitalize()
        return f"{self.bits_per_s / _BITS[unit]:g} {named}/s, {self.latency * 1e6:g} µs"


@dataclass(frozen=True, slots=True)
class OverNetwork:
    """Hosts that a network joins, with some ranks each: ranks share their host's memory and its port.

    `here`, measured among ranks of one host, is what a message takes besides the network's latency, and what
    a byte takes in memory: to be added, rounded, copied. What is done in memory overlaps with nothing.
    """

    here: AlphaBeta
    network: Network
    ranks_per_node: int = 1

    def seconds(self, ranks: int, size: float) -> float:
        """Return the time of a sum within hosts, then one over hosts. A call over all ranks sends as much."""
        return self._inside(ranks, size) + self._between.seconds(self._hosts(ranks), size)

    def in_parts(self, ranks: int, size: float) -> float:
        """Return the same, with a sum in parts over hosts."""
        hosts = self._hosts(ranks)
        line = self._between.regimes[-1]
        waits = replace(line, alpha=line.alpha - self.network.latency)  # for all messages of a half at once
        between = AlphaBeta((waits,), hosts).in_parts(hosts, size)
        return self._inside(ranks, size) + between + self._ways(hosts, size)

    def flat_in_parts(self, ranks: int, size: float) -> float:
        """Return the time if every rank sends to all others, wherever they are.

        A rank has 2 (R - 1) / R of `size` bytes in memory. All parts but those of the host's own ranks leave
        by its port: 2 r (R - r) / R, for r of R ranks. Messages leave one after the other.
        """
        inside = min(ranks, self.ranks_per_node)
        memory, line = self._memory(inside), self._between.regimes[-1]
        if ranks == inside:
            return memory.in_parts(ranks, size)
        worked = 2 * (ranks - 1) / ranks * memory.regimes[-1].beta
        sent = 2 * inside * (ranks - inside) / ranks * self.network.seconds_per_byte
        started = 2 * (ranks - 1) * (line.alpha - self.network.latency)
        return started + self._ways(ranks, size) + size * (worked + sent) if size > 0 else 0.0

    def _inside(self, ranks: int, size: float) -> float:
        ranks = min(ranks, self.ranks_per_node)
        return self._memory(ranks).seconds(ranks, size)

    def _memory(self, ranks: int) -> AlphaBeta:
        """Memory brings so many bytes a second to all ranks."""
        return self.here.slowed(max(1.0, ranks / self.here.ranks))

    def _hosts(self, ranks: int) -> int:
        return -(-ranks // self.ranks_per_node)

    def _ways(self, hosts: int, size: float) -> float:
        """There and back."""
        return 2 * self.network.latency * (hosts > 1 and size > 0)

    @property
    def _between(self) -> AlphaBeta:
        """The library uses the same algorithms over the network. A rank of a host has a part of the array."""
        worked = self._memory(self.ranks_per_node)
        regimes = (
            replace(
                each,
                form="scatter-gather" if each.form == "memory" else each.form,  # between hosts MPI sums
                alpha=each.alpha + self.network.latency,
                beta=each.beta / self.ranks_per_node + self.network.seconds_per_byte,
            )
            for each in worked.regimes
        )
        return AlphaBeta(tuple(regimes), worked.ranks)


def fit(
    points: Sequence[tuple[float, float]],
    ranks: int,
    long_form: str = "scatter-gather",
) -> AlphaBeta:
    """Fit to a table of (bytes, seconds) among `ranks`.

    Relative errors count, of short arrays as much as of long ones. Among the cuts into regimes, choose the
    one whose closer fit is worth its additional parameters.
    """
    table = sorted((s, t) for s, t in points if s > 0 and t > 0)
    if ranks < 2 or len(table) < FEWEST_POINTS:
        raise DataError(f"an α–β model needs {FEWEST_POINTS} sizes measured among 2 ranks or more")
    candidates = []
    for count in range(1, min(MOST_REGIMES, len(table) // FEWEST_POINTS) + 1):
        for cuts in combinations(range(FEWEST_POINTS, len(table) - FEWEST_POINTS + 1), count - 1):
            edges = (0, *cuts, len(table))
            parts = [table[a:b] for a, b in pairwise(edges)]
            if all(len(part) >= FEWEST_POINTS for part in parts):
                candidates.append(_fitted(parts, ranks, long_form))
    _, regimes = min(candidates, key=lambda candidate: candidate[0])
    return AlphaBeta(regimes, ranks)


def _fitted(
    parts: Sequence[Sequence[tuple[float, float]]], ranks: int, long_form: str
) -> tuple[float, tuple[Regime, ...]]:
    """One regime per part, and how good that is: Schwarz's criterion, lower is better."""
    regimes: list[Regime] = []
    squares, count = 0.0, sum(map(len, parts))
    for i, part in enumerate(parts):
        is_short = i == 0 and (len(parts) > 1 or part[-1][0] <= SHORT)
        form = "doubling" if is_short else long_form
        least = regimes[0].alpha if regimes else 0.0  # a long message is no quicker to start than a short one
        alpha, beta = _line(part, messages(form, ranks), volume(form, ranks), least)
        last = i == len(parts) - 1
        regimes.append(
            Regime(form, alpha, beta, None if last else math.sqrt(part[-1][0] * parts[i + 1][0][0]))
        )
        squares += sum((regimes[-1].seconds(ranks, size) / seconds - 1) ** 2 for size, seconds in part)
    parameters = 3 * len(parts) - 1  # an α and a β each, and the cuts
    return count * math.log(squares / count + NOISE**2) + parameters * math.log(count), tuple(regimes)


def _line(part: Sequence[tuple[float, float]], a: float, b: float, least: float) -> tuple[float, float]:
    """α ≥ least and β ≥ 0 that minimise Σ ((a α + b β size) / seconds − 1)²."""
    rows = [(a / seconds, b * size / seconds) for size, seconds in part]
    xx, xy, yy = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    x, y = (sum(r[i] for r in rows) for i in (0, 1))
    determinant = xx * yy - xy * xy
    alpha = (x * yy - y * xy) / determinant if determinant > 0 else -1.0
    beta = (xx * y - xy * x) / determinant if determinant > 0 else -1.0
    if alpha >= least and beta >= 0:
        return alpha, beta
    edges = [(least, max(0.0, (y - xy * least) / yy)), (max(least, x / xx), 0.0)]
    return min(edges, key=lambda e: sum((p * e[0] + q * e[1] - 1) ** 2 for p, q in rows))


def parse_network(text: str) -> Network:
    """A rate and a latency, in this order, each with its unit."""

    def refusal(problem: str) -> UsageError:
        return UsageError(f"--network {text!r}: {problem}, {_EXAMPLE}")

    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2:
        raise refusal("a rate and a latency are needed")
    quantities = [_QUANTITY.fullmatch(part) for part in parts]
    for part, found in zip(parts, quantities, strict=True):
        if found is None:
            raise refusal(f"{part!r} does not begin with a number")
    (rate, rate_unit), (latency, unit) = (found.groups() for found in quantities if found)
    bits = _BITS.get(re.sub("(bit/s|bitps|bps)$", "bit", rate_unit.replace("Bit", "bit")).lower())
    if bits is None:
        raise refusal(f"{parts[0]!r} is no rate: its unit is kbit, Mbit, Gbit or Tbit")
    if unit not in _SECONDS:
        raise refusal(f"{parts[1]!r} is no latency: its unit is ns, us, ms or s")
    if float(rate) <= 0:
        raise refusal("the rate must be above 0")
    return Network(float(rate) * bits, float(latency) * _SECONDS[unit])
