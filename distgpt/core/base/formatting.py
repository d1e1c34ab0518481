"""Formatting and parsing of counts, sizes and durations with units."""

import re
from collections.abc import Iterable, Mapping

from distgpt.core.base.errors import UsageError

_SIZES = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "B": 1}
_DURATIONS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}
_LONG = {"years": 365.25 * 86400, "days": 86400.0, "hours": 3600.0, "minutes": 60.0, "seconds": 1.0}
_PARTS = r"\s*".join(rf"(?:(\d{{1,9}}(?:\.\d{{1,9}})?)\s*{unit})?" for unit in "dhms")
_FACTORS = (86400.0, 3600.0, 60.0, 1.0)
PREFIXES = {"T": 1e12, "B": 1e9, "M": 1e6, "k": 1e3, "": 1.0}


def count(n: int, noun: str) -> str:
    """1 → "1 token", 2048 → "2,048 tokens", 2 → "2 processes"."""
    return f"{n:,} {noun}" + ("" if n == 1 else "es" if noun.endswith(("s", "ch")) else "s")


def numbered(noun: str, numbers: list[int]) -> str:
    """[0, 1, 2, 5] → "ranks 0–2, 5"."""
    return f"{noun}{'s' if len(numbers) > 1 else ''} {in_runs(numbers, '–', ', ')}"


def in_runs(numbers: Iterable[int], to: str = "-", between: str = ",") -> str:
    """[0, 1, 2, 5] → "0-2,5"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return between.join(to.join(map(str, run)) for run in runs)


def three_digits(value: float) -> str:
    """Format three significant digits with trailing zeros, so that columns align."""
    return f"{value:#.3g}" if abs(value) < 99.95 else f"{value:,.0f}"


def scaled(value: float, units: Mapping[str, float]) -> tuple[float, str]:
    """Return a value in the largest unit that gives at least 1. `units`: largest first."""
    unit = next((name for name, factor in units.items() if abs(value) >= factor), [*units][-1])
    return value / units[unit], unit


def parse_count(text: str, name: str) -> int:
    """Parse "300000", "1.5M" or "10B"; `name` is the option, for errors."""
    result = re.fullmatch(r"(.+?)([KMBT]?)", text.strip(), re.IGNORECASE)
    factors = {prefix.upper(): factor for prefix, factor in PREFIXES.items()}
    try:
        value = round(float(result[1]) * factors[result[2].upper()]) if result else 0
    except (ValueError, OverflowError):
        value = 0
    if value < 1:
        raise UsageError(f"{name} must be a number such as 300000, 300M or 10B, not {text!r}")
    return value


def loss_and_bits(loss: float, bits_per_byte: float | None) -> str:
    """(4.03047, 2.0374) → "4.0305 (2.04 bits per byte)"; only the loss if the bits are None."""
    return f"{loss:.4f}" + ("" if bits_per_byte is None else f" ({bits_per_byte:.2f} bits per byte)")


def size(n_bytes: float) -> str:
    """1536 → "1.5 KiB"."""
    number, unit = scaled(n_bytes, _SIZES)
    return f"{number:{'.4g' if number < 1000 else ',.0f'}} {unit}"


def size_in_column(n_bytes: float) -> str:
    """Format a size with three digits, so that columns align: 1536 → "1.50 KiB"."""
    number, unit = scaled(n_bytes, _SIZES)
    return f"{n_bytes:g} B" if unit == "B" else f"{three_digits(number)} {unit}"


def parse_size(text: str) -> int:
    """Return the bytes in "4k", "64MiB", "1.5G" or "4096". Units are powers of 1,024."""
    result = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if result is None:
        raise UsageError(f"{text!r} is not a size; write a number and K, M or G, such as 64M")
    return int(float(result[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[result[2].upper()])


def parse_duration(text: str) -> float:
    """Return the seconds in "3h50m", "90 s", "1.5 h" or "2d"."""
    result = re.fullmatch(_PARTS, text.strip(), re.IGNORECASE)
    parts = zip(result.groups(), _FACTORS, strict=True) if result else ()
    seconds = sum(float(part) * factor for part, factor in parts if part)
    if not 0 < seconds < 1e10:
        raise UsageError(f"{text!r} is not a duration; write numbers with d, h, m or s, such as 3h50m")
    return seconds


def typed_duration(seconds: float) -> str:
    """Format whole seconds as `parse_duration` reads them: 5400 → "1h30m"."""
    left, text = max(1, round(seconds)), ""
    for unit, factor in zip("dhms", _FACTORS, strict=True):
        number, left = divmod(left, int(factor))
        text += f"{number}{unit}" * bool(number)
    return text


def duration(seconds: float) -> str:
    """Format a measured time with three digits: "1.23 s", "45.0 ms", "6.70 µs"."""
    number, unit = scaled(seconds, _DURATIONS)
    return f"{three_digits(number)} {unit}" if seconds else "0 s"


def long_duration(seconds: float) -> str:
    """Format an estimated time in the largest unit that gives at least 2: "3.50 hours"."""
    unit, factor = next(((u, f) for u, f in _LONG.items() if seconds >= 2 * f), ("seconds", 1.0))
    return f"{three_digits(seconds / factor)} {unit}"


def clock(seconds: float) -> str:
    """3723 → "1:02:03"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
