"""From numbers to places on a chart: limits, ticks at round numbers, and how numbers are written."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

LARGEST = 1e300  # so that differences and ratios of what is drawn stay finite
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def drawable(value: float | None, log: bool = False) -> float | None:
    """A number with a place on the axis, else None: not a number, infinite, not positive on a log axis."""
    try:
        number = math.nan if value is None else float(value)
    except OverflowError:
        return None
    if not abs(number) < LARGEST or (log and number < 1 / LARGEST):
        return None
    return number


@dataclass(frozen=True)
class Axis:
    """Numbers from low to high lie between two places, evenly or by their logarithm."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def place(self, value: float) -> float:
        low, high, value = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (value - low) / (high - low) * (self.end - self.start)


def limits(values: Iterable[float], log: bool, margin: float, from_zero: bool = False) -> tuple[float, float]:
    """From the least to the greatest and a margin around; something sensible if they are all equal."""
    numbers = list(values) or [1.0 if log else 0.0]
    low, high = min(numbers), max(numbers)
    if log:
        low, high = math.log10(low), math.log10(high)
        gap = max((high - low) * margin, 0.5 if high - low < 1e-6 else 0.0)
        return 10.0 ** max(low - gap, -300), 10.0 ** min(high + gap, 300)
    if from_zero and 0 <= low < 0.5 * high:
        return 0.0, high + (high - low) * margin
    if high - low <= 1e-9 * max(abs(low), abs(high)) or high - low < 1 / LARGEST:
        gap = max(abs(low) * 0.1, 1e-200) if low else 1.0
        return (0.0 if from_zero and low == 0 else low - gap), high + gap
    gap = (high - low) * margin
    return low - gap, high + gap


def round_step(span: float, most: int) -> float:
    """The least of 1, 2, 5 times a power of ten that cuts a span into at most so many pieces."""
    raw = span / most
    power = 10.0 ** math.floor(math.log10(raw))
    return next(n * power for n in (1.0, 2.0, 5.0, 10.0) if n * power >= raw * (1 - 1e-9))


def linear_ticks(low: float, high: float, most: int, whole: bool = False) -> list[float]:
    """Round numbers between low and high; whole ones where the values are."""
    step = round_step(high - low, max(most, 1))
    if whole:
        step = max(step, 1.0)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)] if last - first <= 4 * most + 8 else [low, high]


def log_ticks(low: float, high: float) -> list[list[float]]:
    """Sets of ticks for a logarithmic axis, the densest first."""
    first, last = math.floor(math.log10(low) - 1e-9), math.ceil(math.log10(high) + 1e-9)
    sets: list[list[float]] = []
    decades = math.log10(high) - math.log10(low)
    if decades < 0.7:
        sets += [linear_ticks(low, high, most) for most in (7, 4, 2)]
    elif decades < 1.5:
        sets.append(_decades(first, last, (1, 2, 3, 5)))
    if decades < 3.5:
        sets.append(_decades(first, last, (1, 2, 5)))
    powers = range(first, last + 1)
    sets += [[10.0**k for k in powers if k % every == 0] for every in (1, 2, 3, 5, 10, 20, 50, 100, 200)]
    inside = [[t for t in ticks if low * (1 - 1e-9) <= t <= high * (1 + 1e-9)] for ticks in sets]
    return [ticks for ticks in inside if len(ticks) >= 2] or [[low, high]]


def _decades(first: int, last: int, digits: Sequence[int]) -> list[float]:
    return [d * 10.0**k for k in range(first, last + 1) for d in digits]


def that_fits(
    candidates: Iterable[Sequence[float]], fits: Callable[[Sequence[float]], bool]
) -> Sequence[float]:
    """The first set of ticks whose labels do not touch, else the last one's ends."""
    ticks: Sequence[float] = ()
    for ticks in candidates:
        if fits(ticks):
            return ticks
    return ticks[:1]


def tick_labels(ticks: Sequence[float], log: bool) -> list[str]:
    """10,000 becomes 10k; on a linear axis all labels get the same prefix and number of decimals."""
    if not ticks:
        return []
    if (log and max(ticks) >= 10 * min(ticks)) or len(ticks) == 1:
        return [short(tick, 1e3 if max(ticks) >= 1e4 else 1e4) for tick in ticks]
    step = min((b - a for a, b in pairwise(ticks)), default=abs(ticks[0]) or 1.0)
    largest = max(map(abs, ticks))
    if largest < 1e-3 or largest >= 1e15:
        return [power(tick) for tick in ticks]
    factor, prefix = next(((f, p) for f, p in PREFIXES if largest >= max(f, 1e4)), (1.0, ""))
    if _decimals(step / factor) > 2:
        factor, prefix = 1.0, ""
    decimals = _decimals(step / factor)
    return [minus(f"{tick / factor + 0.0:,.{decimals}f}{prefix if tick else ''}") for tick in ticks]


def _decimals(step: float) -> int:
    """How many decimals it takes to write multiples of a step."""
    return next((n for n in range(15) if abs(round(step, n) - step) <= 1e-6 * step), 15)


def short(value: float, prefixed: float = 1e4) -> str:
    """A number in few characters: 500, 20k, 16,384, 1.05M, 10⁻⁴; round ones are `prefixed` from there on."""
    size = abs(value)
    if not 1e-3 * (1 - 1e-9) <= size < 1e15:
        return power(value)
    if float(f"{value:.1g}") != float(f"{value:.9g}"):
        prefixed = 1e5
    factor, prefix = next(((f, p) for f, p in PREFIXES if size >= max(f, prefixed)), (1.0, ""))
    if prefix or size < 1000:
        return minus(f"{value / factor:.3g}{prefix}")
    return minus(f"{value:,.0f}")


def power(value: float) -> str:
    """1.5·10⁻⁵, or 10⁻⁵ where the factor is one."""
    if not value:
        return "0"
    digits, exponent = f"{value:.2e}".split("e")
    digits = digits.rstrip("0").rstrip(".")
    ten = "10" + str(int(exponent)).translate(SUPERSCRIPTS)
    return minus({"1": ten, "-1": f"-{ten}"}.get(digits, f"{digits}·{ten}"))


def number(value: float) -> str:
    """A measured number with three digits that count, as 0.0123, 4.56 or 12,345."""
    size = abs(value)
    if not size < math.inf:
        return "–"
    if size and not 1e-4 <= size < 1e15:
        return power(value)
    decimals = 0 if size >= 100 or value == int(value) else 2 - math.floor(math.log10(size))
    return minus(f"{value:,.{decimals}f}")


def minus(text: str) -> str:
    return text.replace("-", "−")
