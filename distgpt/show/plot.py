"""Pictures of runs: loss, learning rate, gradient norm and speed, of one run or of several side by side."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from distgpt.errors import UsageError, escape
from distgpt.files import atomic_file, storage_errors
from distgpt.kernels.api import Array
from distgpt.saved.rundir import RunDirectory, read_metrics
from distgpt.show.charts import LIGHT, SERIES, STYLE, series_colour
from distgpt.show.drawing import drawable, set_ticks
from distgpt.show.runs import run_directories

FORMATS = (".png", ".svg", ".pdf")
WIDTH, DPI = 9.0, 200  # inches: 900 pixels in a browser, sharp on a screen with twice as many
INDISTINCT = 0.004  # of a curve's height: less than the width of its line
SMOOTHED = 1 / 40  # of a curve is what goes into each of its smoothed values
DASHES = ("-", "--", ":")  # from the ninth run on
MARKS: dict[str, Any] = {
    "marker": "o",
    "markersize": 4,
    "markeredgecolor": LIGHT["paper"],
    "markeredgewidth": 0.6,
}
UNITS = {"h": 3600.0, "min": 60.0, "s": 1.0}

PANELS = STYLE | {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": LIGHT["rule"],
    "axes.linewidth": 0.7,
    "axes.labelcolor": LIGHT["ink"],
    "xtick.color": LIGHT["rule"],
    "ytick.color": LIGHT["rule"],
    "xtick.labelcolor": LIGHT["ink"],
    "ytick.labelcolor": LIGHT["ink"],
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8.5,
}


@dataclass(frozen=True, slots=True)
class Look:
    """The user's choices. `smooth` counts lines of metrics; None leaves it to the curve's length."""

    axis: str = "steps"
    smooth: int | None = None
    title: str | None = None
    log_loss: bool = False


class Curve(NamedTuple):
    """A value at some of the steps; NaN where it is not known."""

    steps: Array
    values: Array

    def finite(self) -> Curve:
        """Return the points whose values are known."""
        known = np.isfinite(self.values)
        return Curve(self.steps[known], self.values[known])

    def smoothed(self, count: int, average: Callable[[Array], Any] = np.mean) -> Array:
        """Return the average of `count` neighbours of each value.

        At the steep beginning it is of fewer, as many on either side, and at the end of those there are.
        """
        places = np.arange(len(self.steps))
        reach = np.minimum(places, count // 2)
        windows = (self.values[i - r : i + r + 1] for i, r in zip(places, reach, strict=True))
        known = (window[np.isfinite(window)] for window in windows)
        return np.array([average(window) if len(window) else np.nan for window in known])


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
        """Return the places of steps on the axis of "steps", "tokens", or "time" (seconds of training)."""
        if axis == "steps":
            return steps
        known = self["tokens" if axis == "tokens" else "step_s"].finite()
        values = known.values
        if axis == "time":  # a step that was not recorded took as long as the next one that was
            values = np.cumsum(values * np.diff(known.steps, prepend=0))
        return np.interp(steps, [0, *known.steps], [0.0, *values])

    def end(self, axis: str) -> float:
        """Return the place of the last step of which anything is known."""
        return float(self.places(axis, np.array([self._lines[-1]["step"]])).max(initial=0))


def plot(paths: Sequence[Path], out: Path | None, look: Look) -> Path:
    """Draw these runs into one file; gives its path."""
    paths = [run for path in paths for run in _runs_at(path)]
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
        name, self._per_unit = _horizontal(look.axis, farthest)
        self._longest = farthest / self._per_unit
        scored = any(len(run["hellaswag"].steps) for run in runs)
        self._grid = self.figure.add_gridspec(2, 6, height_ratios=(1.75, 1))
        self._loss(slice(0, 4 if scored else 6))
        if scored:
            self._hellaswag(slice(4, 6))
        self._rate(slice(0, 2))
        self._norm(slice(2, 4))
        self._speed(slice(4, 6))
        self.figure.supxlabel(name, fontsize=9, color=LIGHT["ink"])
        if title := escape(look.title or "") or (runs[0].name if self.alone else ""):
            self.figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold")

    def _panel(self, row: int, columns: slice, title: str) -> Any:
        axes = self.figure.add_subplot(self._grid[row, columns])
        axes.set_title(title)
        set_ticks(axes.xaxis, np.array([0, self._longest]), False, 5)
        axes.tick_params(length=3, width=0.7)
        axes.set_xlim(-0.015 * self._longest, 1.015 * self._longest)
        return axes

    def _looks(self, number: int) -> dict[str, Any]:
        return {"color": series_colour(number), "linestyle": DASHES[number // SERIES % len(DASHES)]}

    def _line(self, axes: Any, run: Run, curve: Curve, **how: Any) -> None:
        """Draw a curve; one of a single point is a dot."""
        dot = {"marker": "o", "markersize": 4} if len(curve.finite().steps) == 1 else {}
        x = run.places(self.look.axis, curve.steps) / self._per_unit
        axes.plot(x, curve.values, **(dot | how))

    def _lines(self, axes: Any, curves: Sequence[Curve], width: float, **how: Any) -> None:
        """Draw a curve of each run, wider where others will cover it, so that it shows on both sides."""
        for number, (run, curve) in enumerate(zip(self.runs, curves, strict=True)):
            covering = sum(_coincide(curve, other) for other in curves[number + 1 :])
            wide = {"linewidth": width + 2.2 * covering, "alpha": 1.0 if not covering else 0.6}
            self._line(axes, run, curve, **self._looks(number) | wide | how)

    def _traces(self, axes: Any, key: str, average: Callable[[Array], Any]) -> list[Curve]:
        """Draw records, thin and pale, below their smoothed form, which is returned for each run."""
        all_smoothed = []
        for number, run in enumerate(self.runs):
            curve, looks = run[key], self._looks(number)
            count = self.look.smooth or max(1, round(len(curve.steps) * SMOOTHED))
            smoothed = Curve(curve.steps, curve.smoothed(count, average))
            all_smoothed.append(smoothed)
            if not np.array_equal(curve.values, smoothed.values, equal_nan=True):
                self._line(axes, run, curve, **looks | {"linestyle": "-"}, linewidth=0.5, alpha=0.3)
        self._lines(axes, all_smoothed, 1.4)
        return all_smoothed

    def _loss(self, columns: slice) -> None:
        axes = self._panel(0, columns, "Loss (nats per token)")
        all_smoothed = self._traces(axes, "loss", np.mean)
        evaluated = [run["val_loss"] for run in self.runs]
        how: dict[str, Any] = {"linestyle": ":"}
        if self.alone:
            how = {"color": series_colour(1), "linestyle": "-"}
        self._lines(axes, evaluated, 1, **how, **MARKS, zorder=3)
        if self.alone:
            entries = [self._entry(0, "training" + _last(all_smoothed[0]))]
        else:
            lowest = [_lowest(curve) for curve in evaluated]
            entries = [
                self._entry(number, self.runs[number].name + _losses(all_smoothed[number], lowest[number]))
                for number in sorted(range(len(lowest)), key=lowest.__getitem__)  # stable, unknown ones last
            ]
        if any(len(curve.steps) for curve in evaluated):
            how |= {} if self.alone else {"color": LIGHT["muted"]}
            label = "validation" + (_last(evaluated[0]) if self.alone else " (lowest)")
            entries.append(Line2D([], [], **how, **MARKS, linewidth=1, label=label))
        if self.look.log_loss:
            _logarithmic(axes)
        columns_of_legend = 1 if len(entries) <= 8 else 2
        axes.legend(handles=entries, loc="upper right", ncols=columns_of_legend, handlelength=1.8)

    def _entry(self, number: int, label: str) -> Line2D:
        return Line2D([], [], **self._looks(number), linewidth=2, label=label)

    def _hellaswag(self, columns: slice) -> None:
        axes = self._panel(0, columns, "HellaSwag (% right)")
        self._lines(axes, [run["hellaswag"] for run in self.runs], 1.2, **MARKS)
        axes.axhline(0.25, color=LIGHT["muted"], linewidth=0.8, linestyle=(0, (4, 3)))
        where: Any = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": "right"}
        axes.annotate("by chance", (1, 0.25), (-2, 3), fontsize=7.5, color=LIGHT["muted"], **where)
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}")

    def _rate(self, columns: slice) -> None:
        highest = max(run["lr"].finite().values.max(initial=0) for run in self.runs)
        exponent = math.floor(math.log10(highest)) if highest > 0 else 0
        axes = self._panel(1, columns, "Learning rate" + (f" (1e{exponent})" if exponent else ""))
        self._lines(axes, [run["lr"] for run in self.runs], 1.4)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value / 10**exponent:g}")

    def _norm(self, columns: slice) -> None:
        axes = self._panel(1, columns, "Gradient norm")
        self._traces(axes, "grad_norm", np.median)
        _logarithmic(axes)

    def _speed(self, columns: slice) -> None:
        """Draw speed from 0, so that the slow first step takes no room, and up to what is usual."""
        axes = self._panel(1, columns, "Speed (tokens/s)")
        self._traces(axes, "tokens_per_s", np.median)
        rates = [run["tokens_per_s"].finite().values for run in self.runs]
        axes.set_ylim(
            0, 1.2 * max((np.percentile(some, 95) for some in rates if len(some)), default=1.0) or 1
        )
        set_ticks(axes.yaxis, np.array(axes.get_ylim()), False, 6)


def _horizontal(axis: str, farthest: float) -> tuple[str, float]:
    """Return the axis' name, and how much one unit on it is."""
    if axis != "time":
        return {"steps": "step", "tokens": "tokens seen"}[axis], 1.0
    unit = next((name for name, size in UNITS.items() if farthest >= 2 * size), "s")
    return f"training time ({unit})", UNITS[unit]


def _logarithmic(axes: Any) -> None:
    """Make the y axis logarithmic; it leaves out what is not positive."""
    seen = np.concatenate([line.get_ydata() for line in axes.lines])
    seen = seen[np.isfinite(seen) & (seen > 0)]
    if len(seen):
        axes.set_yscale("log", nonpositive="mask")
        set_ticks(axes.yaxis, seen, True, 8)


def _coincide(one: Curve, other: Curve) -> bool:
    """Return whether two curves lie on each other, to the eye, for most of the way that they share."""
    _, mine, its = np.intersect1d(one.steps, other.steps, return_indices=True)
    values, others = one.values[mine], other.values[its]
    known = np.isfinite(values) & np.isfinite(others)
    if not known.any():
        return False
    apart = np.abs(values[known] - others[known])
    height = max(
        float(np.ptp(values[known])), float(np.ptp(others[known])), 1e-9 * abs(float(others[known][0]))
    )
    return bool((apart <= INDISTINCT * height).mean() > 0.5)


def _lowest(curve: Curve) -> float:
    """Return the lowest value; infinite where nothing was evaluated."""
    return float(curve.finite().values.min(initial=math.inf))


def _losses(training: Curve, lowest: float) -> str:
    """Return losses for a legend: the last training loss and the lowest validation loss."""
    return _last(training) + (f"  val {lowest:.3f}" if math.isfinite(lowest) else "")


def _last(curve: Curve) -> str:
    known = curve.finite().values
    return f"  {known[-1]:.3f}" if len(known) else ""


# What runs have recorded


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """Return each run once, named by the shortest ends of their paths that tell them apart."""
    different = {path.resolve(): path for path in paths}
    names = short_names(list(different))
    return [Run(escape(name), _history(path)) for name, path in zip(names, different.values(), strict=True)]


def _runs_at(path: Path) -> list[Path]:
    """Return a run's directory, or all runs that have begun in a directory of such."""
    if path.is_dir() and not RunDirectory(path).config.is_file():
        with storage_errors("read", path):
            return [run for run in run_directories(path) if RunDirectory(run).metrics.is_file()] or [path]
    return [path]


def short_names(paths: Sequence[Path]) -> list[str]:
    for length in range(1, max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _history(path: Path) -> list[dict[str, Any]]:
    """Return a record per step, in order. A resumed run has lost records beyond its first step."""
    if not path.exists():
        raise UsageError(f"there is no run directory {path}")
    directory = RunDirectory(path)
    if not directory.metrics.is_file():
        begun = directory.config.is_file()
        raise UsageError(f"{path} has recorded no steps yet" if begun else f"{path} is not a run directory")
    history: dict[int, dict[str, Any]] = {}
    trained = -1
    for line in read_metrics(directory.metrics):
        step = line.pop("step")
        line = {"step": step, **{key: drawable(value) for key, value in line.items()}}
        if "loss" in line:
            if step <= trained:
                history = {known: history[known] for known in history if known < step}
            trained = step
        history[step] = history.get(step, {}) | line
    if not history:
        raise UsageError(f"{path} has recorded no steps yet")
    return [history[step] for step in sorted(history)]
