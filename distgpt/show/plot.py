"""Pictures of runs: loss, learning rate, gradient norm and speed, of one run or of several side by side."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from distgpt.errors import DataError, UsageError, printable
from distgpt.files import atomic_file, storage_errors
from distgpt.kernels.api import Array
from distgpt.saved.rundir import RunDirectory
from distgpt.show.charts import LIGHT, SERIES, STYLE
from distgpt.show.drawing import drawable, set_ticks

FORMATS = (".png", ".svg", ".pdf")
WIDTH, DPI = 9.0, 200  # inches: 900 pixels in a browser, sharp on a screen with twice as many
SMOOTHED = 1 / 40  # of a curve is what goes into each of its smoothed values
MOST_STEPS = 1 << 53  # as many as a picture's axis can tell apart

COLOURS = tuple(LIGHT[f"s{i}"] for i in range(1, SERIES + 1))
DASHES = ("-", "--", ":")  # from the ninth run on
INK, MUTED, PAPER = LIGHT["ink"], LIGHT["muted"], LIGHT["paper"]

PANELS = STYLE | {
    "font.size": 9,
    "text.color": INK,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 7,
    "axes.edgecolor": LIGHT["rule"],
    "axes.linewidth": 0.7,
    "axes.labelcolor": INK,
    "axes.spines.left": True,
    "grid.linewidth": 0.7,
    "lines.scale_dashes": True,
    "xtick.color": LIGHT["rule"],
    "ytick.color": LIGHT["rule"],
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
}

MARKS: dict[str, Any] = {"marker": "o", "markersize": 4, "markeredgecolor": PAPER, "markeredgewidth": 0.6}
UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class Look:
    """What the user chooses. `smooth` counts lines of metrics; None leaves it to the curve's length."""

    axis: str = "steps"
    smooth: int | None = None
    title: str | None = None
    log_loss: bool = False


@dataclass(frozen=True, slots=True)
class Curve:
    """A value at some of the steps."""

    steps: Array
    values: Array

    def __len__(self) -> int:
        return len(self.steps)

    def finite(self) -> Curve:
        """Where its values are known."""
        known = np.isfinite(self.values)
        return Curve(self.steps[known], self.values[known])

    def smoothed(self, count: int) -> Array:
        """The mean of `count` neighbours of each value.

        At the steep beginning it is of fewer, as many on either side, and at the end of those there are.
        """
        known = np.isfinite(self.values)
        sums = np.concatenate([[0.0], np.cumsum(np.where(known, self.values, 0.0))])
        counts = np.concatenate([[0], np.cumsum(known)])
        first, stop = self._neighbours(count)
        many = counts[stop] - counts[first]
        means = (sums[stop] - sums[first]) / np.maximum(many, 1)
        return np.where(many > 0, means, np.nan)

    def medians(self, count: int) -> Array:
        """The same with the middle one of the neighbours, which outliers do not move."""
        pieces = [
            self.values[start:end][np.isfinite(self.values[start:end])]
            for start, end in zip(*self._neighbours(count), strict=True)
        ]
        return np.array([np.median(piece) if len(piece) else np.nan for piece in pieces])

    def _neighbours(self, count: int) -> tuple[Array, Array]:
        """Where they begin, and where they end, for every place."""
        places = np.arange(len(self))
        reach = np.minimum(places, count // 2)
        return places - reach, np.minimum(places + reach, len(self) - 1) + 1


class Run:
    """The curves of one run by the names that metrics.jsonl has for them; those it lacks are empty."""

    def __init__(self, name: str, lines: Sequence[dict[str, Any]]) -> None:
        self.name = name
        self._lines = lines

    def __getitem__(self, key: str) -> Curve:
        points = [(line["step"], line[key]) for line in self._lines if key in line]
        steps, values = zip(*points, strict=True) if points else ((), ())
        return Curve(np.array(steps, np.int64), np.array(values, np.float64))

    def places(self, axis: str, steps: Array) -> Array:
        """Where these steps lie on the axis of "steps", "tokens", or "time" (seconds of training)."""
        if axis == "steps":
            return steps
        known = self["tokens"].finite() if axis == "tokens" else self._seconds()
        return np.interp(steps, [0, *known.steps], [0.0, *known.values])

    def end(self, axis: str) -> float:
        """Where the last step lies of which anything is known."""
        return float(self.places(axis, np.array([self._lines[-1]["step"]])).max(initial=0))

    def _seconds(self) -> Curve:
        """A step that was not recorded took as long as the next one that was."""
        taken = self["step_s"].finite()
        return Curve(taken.steps, np.cumsum(taken.values * np.diff(taken.steps, prepend=0)))


def plot(paths: Sequence[Path], out: Path | None, look: Look) -> Path:
    """Draw these runs into one file; gives its path."""
    out = out or (paths[0] / "curves.png" if len(paths) == 1 else Path("curves.png"))
    if out.suffix.lower() not in FORMATS:
        raise UsageError(f"--out {out}: the name must end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    runs = read_runs(paths)
    picture = BytesIO()
    with rc_context(PANELS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)  # drawn as boxes
        metadata = {"Date": None} if out.suffix.lower() == ".svg" else None
        _Picture(runs, look).figure.savefig(picture, format=out.suffix[1:].lower(), metadata=metadata)
    with atomic_file(out) as file:
        file.write(picture.getvalue())
    return out


class _Picture:
    """Draws in matplotlib's object interface: no state outside, no window."""

    def __init__(self, runs: Sequence[Run], look: Look) -> None:
        self.runs, self.look = runs, look
        self.alone = len(runs) == 1
        layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06, wspace=0.03, hspace=0.03)
        self.figure: Any = Figure(figsize=(WIDTH, 5.6), dpi=DPI, layout=layout)
        farthest = max(run.end(look.axis) for run in runs) or 1.0
        self._axis_name, self._per_unit = _horizontal(look.axis, farthest)
        self._longest = farthest / self._per_unit
        scored = any(len(run["hellaswag"]) for run in runs)
        grid = self.figure.add_gridspec(2, 6, height_ratios=(1.75, 1))
        self._loss(self.figure.add_subplot(grid[0, : 4 if scored else 6]))
        if scored:
            self._hellaswag(self.figure.add_subplot(grid[0, 4:]))
        self._rate(self.figure.add_subplot(grid[1, :2]))
        self._norm(self.figure.add_subplot(grid[1, 2:4]))
        self._speed(self.figure.add_subplot(grid[1, 4:]))
        self.figure.supxlabel(self._axis_name, fontsize=9, color=INK)
        if title := printable(look.title or "") or (runs[0].name if self.alone else ""):
            self.figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold")

    def _panel(self, ax: Any, title: str) -> None:
        ax.set_title(title)
        set_ticks(ax.xaxis, np.array([0, self._longest]), False, 5)
        ax.tick_params(length=3, width=0.7)
        ax.set_xlim(-0.015 * self._longest, 1.015 * self._longest)

    def _looks(self, number: int) -> dict[str, Any]:
        return {
            "color": COLOURS[number % len(COLOURS)],
            "linestyle": DASHES[number // len(COLOURS) % len(DASHES)],
        }

    def _line(self, ax: Any, run: Run, curve: Curve, values: Any, **how: Any) -> None:
        """A curve of a single point is a dot."""
        dot = {"marker": "o", "markersize": 4} if np.isfinite(values).sum() == 1 else {}
        ax.plot(run.places(self.look.axis, curve.steps) / self._per_unit, values, **(dot | how))

    def _smoothed(self, curve: Curve, by: Callable[[Curve, int], Array] = Curve.smoothed) -> Array:
        return by(curve, self.look.smooth or max(1, round(len(curve) * SMOOTHED)))

    def _traces(self, ax: Any, key: str, positive: bool = False, by: Any = Curve.smoothed) -> None:
        """What was recorded, thin and pale, below its smoothed form."""
        for number, run in enumerate(self.runs):
            curve, looks = run[key], self._looks(number)
            raw, smoothed = curve.values, self._smoothed(curve, by)
            if positive:
                raw, smoothed = (np.where(values > 0, values, np.nan) for values in (raw, smoothed))
            if len(curve) and not np.array_equal(raw, smoothed, equal_nan=True):
                self._line(ax, run, curve, raw, **looks | {"linestyle": "-"}, linewidth=0.5, alpha=0.3)
            self._line(ax, run, curve, smoothed, **looks, linewidth=1.4)

    def _loss(self, ax: Any) -> None:
        self._panel(ax, "Loss (nats per token)")
        self._traces(ax, "loss", positive=self.look.log_loss)
        labels = ["training" if self.alone else run.name for run in self.runs]
        entries = [
            Line2D([], [], **self._looks(i), linewidth=2, label=label + _last(self._smoothed(run["loss"])))
            for i, (run, label) in enumerate(zip(self.runs, labels, strict=True))
        ]
        validation = [run["val_loss"] for run in self.runs]
        for i, (run, curve) in enumerate(zip(self.runs, validation, strict=True)):
            how = {"color": COLOURS[1]} if self.alone else self._looks(i) | {"linestyle": ":"}
            self._line(ax, run, curve, curve.values, **how, **MARKS, linewidth=1, zorder=3)
        if any(map(len, validation)):
            how |= {} if self.alone else {"color": MUTED}
            last = _last(validation[0].values) if self.alone else ""
            entries.append(Line2D([], [], **how, **MARKS, linewidth=1, label=f"validation{last}"))
        if self.look.log_loss:
            _logarithmic(ax)
        ax.legend(handles=entries, loc="upper right", ncols=1 if len(entries) <= 8 else 2, handlelength=1.8)

    def _hellaswag(self, ax: Any) -> None:
        self._panel(ax, "HellaSwag (% right)")
        for number, run in enumerate(self.runs):
            score = run["hellaswag"]
            self._line(ax, run, score, score.values, **self._looks(number), **MARKS, linewidth=1.2)
        ax.axhline(0.25, color=MUTED, linewidth=0.8, linestyle=(0, (4, 3)))
        ax.annotate(
            "by chance", (1, 0.25), (-2, 3), xycoords=("axes fraction", "data"), textcoords="offset points",
            ha="right", fontsize=7.5, color=MUTED,
        )  # fmt: skip
        ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}")

    def _rate(self, ax: Any) -> None:
        highest = max(run["lr"].finite().values.max(initial=0) for run in self.runs)
        exponent = math.floor(math.log10(highest)) if highest > 0 else 0
        unit = f" (1e{exponent})" if exponent else ""
        self._panel(ax, f"Learning rate{unit}")
        for number, run in enumerate(self.runs):
            self._line(ax, run, run["lr"], run["lr"].values, **self._looks(number), linewidth=1.4)
        ax.set_ylim(bottom=0)
        ax.yaxis.set_major_formatter(lambda value, _: f"{value / 10**exponent:g}")

    def _norm(self, ax: Any) -> None:
        self._panel(ax, "Gradient norm")
        self._traces(ax, "grad_norm", positive=True, by=Curve.medians)
        _logarithmic(ax)

    def _speed(self, ax: Any) -> None:
        """From 0, so that the slow first step takes no room, and up to what is usual."""
        self._panel(ax, "Speed (tokens/s)")
        self._traces(ax, "tokens_per_s", by=Curve.medians)
        rates = [run["tokens_per_s"].values for run in self.runs]
        usual = [np.percentile(some[np.isfinite(some)], 95) for some in rates if np.isfinite(some).any()]
        ax.set_ylim(0, 1.2 * max(usual, default=1.0) or 1.0)
        set_ticks(ax.yaxis, np.array(ax.get_ylim()), False, 6)


def _horizontal(axis: str, farthest: float) -> tuple[str, float]:
    """What is written below, and how much of it one unit on the axis is."""
    if axis != "time":
        return {"steps": "step", "tokens": "tokens seen"}[axis], 1.0
    unit = next((name for name, size in reversed(UNITS.items()) if farthest >= 2 * size), "s")
    return f"training time ({unit})", UNITS[unit]


def _logarithmic(ax: Any) -> None:
    seen = np.concatenate([line.get_ydata() for line in ax.lines] or [np.array([])])
    seen = seen[np.isfinite(seen)]
    if len(seen):
        ax.set_yscale("log")
        set_ticks(ax.yaxis, seen, True, 8)


def _last(values: Array) -> str:
    known = values[np.isfinite(values)]
    return f"  {known[-1]:.3f}" if len(known) else ""


# What runs have recorded


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """Each run once, by the shortest ends of their paths that tell them apart."""
    different = {path.resolve(): path for path in paths}
    names = short_names(list(different))
    return [
        Run(printable(name), _history(path)) for name, path in zip(names, different.values(), strict=True)
    ]


def short_names(paths: Sequence[Path]) -> list[str]:
    for length in range(1, max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _history(path: Path) -> list[dict[str, Any]]:
    """One line a step, in order. A resumed run has lost what it had recorded beyond its first step."""
    if not path.exists():
        raise UsageError(f"there is no run directory {path}")
    directory = RunDirectory(path)
    if not directory.metrics.is_file():
        begun = directory.config.is_file()
        raise UsageError(f"{path} has recorded no steps yet" if begun else f"{path} is not a run directory")
    history: dict[int, dict[str, Any]] = {}
    trained = -1
    for line in _lines(directory.metrics):
        step = line["step"]
        if "loss" in line:
            if step <= trained:
                history = {known: history[known] for known in history if known < step}
            trained = step
        history[step] = history.get(step, {}) | line
    if not history:
        raise UsageError(f"{path} has recorded no steps yet")
    return [history[step] for step in sorted(history)]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Without the half line that a killed run may have left at the end."""
    with storage_errors("read", path):
        content = path.read_bytes()
    for number, text in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), 1):
        try:
            line = json.loads(text)
            step = int(line.pop("step"))
            found = {key: drawable(value) for key, value in line.items()}
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            raise DataError(f"{path}: line {number} holds no metrics") from None
        if not 0 <= step < MOST_STEPS:
            raise DataError(f"{path}: line {number} is of an impossible step")
        yield {"step": step, **found}
