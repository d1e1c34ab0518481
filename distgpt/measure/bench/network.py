"""Networks in words: "1gbit,100us" as seconds per message and seconds per byte."""

from __future__ import annotations

import re
from dataclasses import dataclass

from distgpt.errors import UsageError

# "Gbps" counts bits too; "GB/s" would count bytes, which no network is named by.
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(.*)")
_EXAMPLE = 'as in "1gbit,100us" or "25Gbit/s,10us"'


@dataclass(frozen=True, slots=True)
class Network:
    """What a message between two hosts costs: `latency` at the least, and `bits_per_s` for its contents."""

    bits_per_s: float
    latency: float

    @property
    def seconds_per_byte(self) -> float:
        return 8 / self.bits_per_s

    def __str__(self) -> str:
        rate, unit = next(
            (
                (self.bits_per_s / size, word)
                for word, size in reversed(_BITS.items())
                if self.bits_per_s >= size
            ),
            (self.bits_per_s / 1e3, "kbit"),
        )
        return f"{rate:g} {unit[0].upper() if unit != 'kbit' else 'k'}{unit[1:]}/s, {self.latency * 1e6:g} µs"


def parse_network(text: str) -> Network:
    """A rate and a latency, in this order, each with its unit."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2:
        raise UsageError(f"--network {text!r}: a rate and a latency are needed, {_EXAMPLE}")
    rate, latency = parts
    number, unit = _quantity(rate, text)
    bits = _BITS.get(re.sub("(bit/s|bitps|bps)$", "bit", unit.replace("Bit", "bit")).lower())
    if bits is None:
        raise UsageError(
            f"--network {text!r}: {rate!r} is no rate: its unit is kbit, Mbit, Gbit or Tbit, {_EXAMPLE}"
        )
    seconds, unit = _quantity(latency, text)
    if unit not in _SECONDS:
        raise UsageError(
            f"--network {text!r}: {latency!r} is no latency: its unit is ns, us, ms or s, {_EXAMPLE}"
        )
    if number <= 0:
        raise UsageError(f"--network {text!r}: the rate must be above 0")
    return Network(number * bits, seconds * _SECONDS[unit])


def _quantity(part: str, text: str) -> tuple[float, str]:
    found = _NUMBER.fullmatch(part)
    if found is None:
        raise UsageError(f"--network {text!r}: {part!r} does not begin with a number, {_EXAMPLE}")
    return float(found[1]), found[2]
