"""Plots of one or more runs: loss, learning rate, gradient norm and speed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator

from distgpt.core.base.errors import DataError, StorageError, UsageError, command_line, escape, nearest_path
from distgpt.core.base.files import atomic_file, read_small, storage_errors
from distgpt.core.ops.api import Array
from distgpt.core.saved.rundir import IN_BITS, RunDirectory, read_metrics
from distgpt.show.runs import best_evaluation, run_directories

# Series colors differ by at least 0.08 in Oklab, also for each kind of color blindness.
COLOURS = {"ink": "#1b2026", "muted": "#59626d", "rule": "#ccd3da", "grid": "#e4e8ec"}
SERIES = ("#1a4ea5", "#b9470a", "#04866c", "#e64ca8", "#aa8a1c", "#3496d2", "#4f4f56", "#7d2417")
LARGEST = 1e100  # largest plotted value; axis limits need some margin
FORMATS = (".png", ".svg", ".pdf")
WIDTH, DPI = 9.0, 200  # inches: 900 pixels in a browser, sharp on a high-density screen
HEIGHT, LINE = 5.6, 0.19  # inches, of the panels and of each line of the legend
LETTERS = 120  # per line of the legend
SMOOTHED = 1 / 40  # fraction of a curve averaged into each smoothed value
DASHES = ("-", "--", ":")  # the second applies from the ninth run on
MARKS: dict[str, Any] = {"marker": "o", "markersize": 4}
FONTS = {"font.size": 9, "axes.titlesize": 9.5, "xtick.labelsize": 8, "ytick.labelsize": 8}

STYLE: dict[Any, Any] = {
    "text.color": COLOURS["ink"],
    "text.parse_math": False,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": COLOURS["rule"],
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "grid.color": COLOURS["grid"],
    "path.simplify_threshold": 0.3,
    "svg.hashsalt": "distgpt",
    "svg.fonttype": "none",
}


class Curve(NamedTuple):
    """A value at some steps; NaN if unknown."""

    steps: Array
    values: Array

    def finite(self) -> Curve:
        """Return the points with known values."""
        known = np.isfinite(self.values)
        return Curve(self.steps[known], self.values[known])

    def after(self, step: float) -> Curve:
        return Curve(self.steps[self.steps > step], self.values[self.steps > step])

    def smoothed(self, count: int | None = None, average: Callable[[Array], Any] = np.mean) -> Array:
        """Return the average of `count` neighbors of each value. None: a fixed fraction of the curve.

        At the steep start the window is smaller but symmetric. At the end it is cut off.
        """
        count = count or max(1, round(len(self.steps) * SMOOTHED))
        places = np.arange(len(self.steps))
        reach = np.minimum(places, count // 2)
        windows = (self.values[i - r : i + r + 1] for i, r in zip(places, reach, strict=True))
        known = (window[np.isfinite(window)] for window in windows)
        return np.array([average(window) if len(window) else np.nan for window in known])


@dataclass(frozen=True)
class Run:
    """The curves of one run, by their names in metrics.jsonl. A missing curve is empty."""

    name: str
    lines: Sequence[dict[str, Any]]
    tokenizer: str = ""  # content of the tokenizer file, "" if there is none

    def __getitem__(self, key: str) -> Curve:
        points = [(line["step"], line[key]) for line in self.lines if key in line]
        steps, values = zip(*points, strict=True) if points else ((), ())
        return Curve(np.array(steps, np.int64), np.array(values, np.float64))

    def lowest(self, evaluated: Curve) -> float:
        """Return the loss of the best evaluation on this curve, or infinity if it has none."""
        best = best_evaluation(self.lines)
        result: Any = evaluated.values[evaluated.steps == best["step"]] if best else ()
        return float(result[0]) if len(result) else math.inf

    def places(self, axis: str, steps: Array) -> Array:
        """Map steps to positions on the axis "steps", "tokens", or "time" (minutes of training)."""
        if axis == "steps":
            return steps
        known = self["tokens" if axis == "tokens" else "step_s"].finite()
        values = known.values
        if axis == "time":  # an unrecorded step counts as long as the next recorded one
            values = np.cumsum(values * np.diff(known.steps, prepend=0)) / 60
        places: Array = np.interp(steps, [0, *known.steps], [0.0, *values])
        return places


def plot(paths: Sequence[Path], out: Path | None, **look: Any) -> Path:
    """Plot runs into one file and return its path. `look`: options of `draw`."""
    paths = [run for path in paths for run in runs_at(path)]
    out = out or (paths[0] / "curves.png" if len(paths) == 1 else Path("curves.png"))
    if out.suffix.lower() not in FORMATS:
        raise UsageError(f"--out {out} must end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    runs = read_runs(paths)
    picture = BytesIO()
    with style(**FONTS):
        metadata = {"Date": None} if out.suffix.lower() == ".svg" else None
        draw(runs, **look).savefig(picture, format=out.suffix[1:].lower(), metadata=metadata)
    with atomic_file(out) as file:
        file.write(picture.getvalue())
    return out


def draw(
    runs: Sequence[Run],
    axis: str = "steps",
    smooth: int | None = None,
    title: str | None = None,
    log_loss: bool = False,
) -> Any:
    """Return a matplotlib figure, made with the object interface: no global state, no window.

    `smooth` counts lines of metrics. None depends on the curve's length.
    """
    figure: Any = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI, layout="constrained")
    grid = figure.add_gridspec(2, 3, height_ratios=(1.75, 1))
    looks: list[dict[str, Any]] = [
        {"color": series_colour(number), "linestyle": DASHES[number // len(SERIES) % len(DASHES)]}
        for number in range(len(runs))
    ]

    def panel(place: Any, heading: str) -> Any:
        axes = figure.add_subplot(place)
        axes.set_title(heading)
        axes.locator_params(axis="x", nbins=5)
        return axes

    def lines(axes: Any, curves: Sequence[Curve], **how: Any) -> None:
        """Draw a curve of each run. A curve with a single point is a dot."""
        for run, curve, look in zip(runs, curves, looks, strict=True):
            dot = MARKS if len(curve.finite().steps) == 1 else {}
            axes.plot(run.places(axis, curve.steps), curve.values, **look | dot | how)

    def traces(axes: Any, curves: Sequence[Curve], average: Callable[[Array], Any]) -> None:
        """Draw raw values, thin and pale, below their smoothed form."""
        smoothed = [Curve(curve.steps, curve.smoothed(smooth, average)) for curve in curves]
        lines(axes, curves, linestyle="-", linewidth=0.5, alpha=0.3)
        lines(axes, smoothed, linewidth=1.4)

    keys, unit = loss_keys(runs)
    trained, evaluated = [[run[key] for run in runs] for key in keys]
    loss = panel(grid[0, :], f"Loss ({unit})")
    traces(loss, trained, np.mean)
    of_validation: dict[str, Any] = MARKS | {"linestyle": ":", "linewidth": 1}
    lines(loss, evaluated, **MARKS | {"linestyle": ""})
    lines(loss, [curve.after(0) for curve in evaluated], linestyle=":", linewidth=1)  # 0: before any step
    if log_loss:
        _logarithmic(loss)
    elif _cut_start(loss, trained + evaluated):
        loss.set_title(f"Loss ({unit}), without the steep start")
    # The legend lists the lowest validation loss first. It is below the panels, to hide no curve.
    lowest = [run.lowest(curve) for run, curve in zip(runs, evaluated, strict=True)]
    entries = []
    for number in sorted(range(len(lowest)), key=lowest.__getitem__):  # stable, unknown ones last
        known, label = trained[number].finite().values, runs[number].name
        label += f"  {known[-1]:.3f}" if len(known) else ""
        label += f"  val {lowest[number]:.3f}" if math.isfinite(lowest[number]) else ""
        entries.append(Line2D([], [], **looks[number], linewidth=2, label=label))
    if any(len(curve.steps) for curve in evaluated):
        entries.append(Line2D([], [], label="validation (lowest)", color=COLOURS["muted"], **of_validation))
    columns = max(1, LETTERS // (6 + max(len(str(entry.get_label())) for entry in entries)))
    figure.legend(handles=entries, loc="outside lower center", ncols=columns)
    figure.set_figheight(HEIGHT + LINE * -(-len(entries) // columns))

    lines(panel(grid[1, 0], "Learning rate"), [run["lr"] for run in runs], linewidth=1.4)
    norm = panel(grid[1, 1], "Gradient norm")
    traces(norm, [run["grad_norm"] for run in runs], np.median)
    _logarithmic(norm)
    speed = panel(grid[1, 2], "Speed (tokens/s)")
    traces(speed, [run["tokens_per_s"] for run in runs], np.median)
    speed.set_ylim(0, top_speed(runs))
    for axes in figure.axes:
        set_ticks(axes.xaxis)
        set_ticks(axes.yaxis)
    # For all panels, in the middle and above the legend.
    names = {"steps": "step", "tokens": "tokens seen", "time": "training time (min)"}
    norm.set_xlabel(names[axis], fontsize="large")
    if shown := escape(title or "") or (runs[0].name if len(runs) == 1 else ""):
        figure.suptitle(shown, x=0.012, ha="left", fontsize=13, fontweight="bold")
    return figure


def _cut_start(axes: Any, curves: Sequence[Curve]) -> bool:
    """If the first tenth of the steps would take over half of the y axis, cut it off and return True."""
    curves = [curve.finite() for curve in curves if len(curve.finite().steps)]
    start = max((curve.steps[-1] for curve in curves), default=0) / 10
    rest = [curve.after(min(start, curve.steps[-1] / 2)).values for curve in curves]
    values, later = (np.concatenate([[], *each]) for each in ([curve.values for curve in curves], rest))
    if not len(later) or values.max() - later.max() <= (used := later.max() - values.min()):
        return False
    axes.set_ylim(values.min() - used / 20, later.max() + used / 20)
    return True


def _logarithmic(axes: Any) -> None:
    if any((drawn.get_ydata() > 0).any() for drawn in axes.lines):
        axes.set_yscale("log", nonpositive="mask")


def loss_keys(runs: Sequence[Run]) -> tuple[tuple[str, str], str]:
    """Return the names of both losses, and their unit. Tokenizers share only bits per byte."""
    if len({run.tokenizer for run in runs if run.tokenizer}) > 1:
        return (IN_BITS["loss"], IN_BITS["val_loss"]), "bits per byte"
    return ("loss", "val_loss"), "nats per token"


def top_speed(runs: Sequence[Run]) -> float:
    """Return the upper limit of a speed axis from 0, so that a slow or fast first step needs no space."""
    rates = [run["tokens_per_s"].finite().values for run in runs]
    usual: float = max((np.percentile(some, 95) for some in rates if len(some)), default=1.0)
    return 1.2 * usual or 1.0


# Records of runs


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """Return each run once, named by the shortest unique end of its path."""
    different = {path.resolve(): path for path in paths}
    names = short_names(list(different))
    return [
        Run(escape(name), _history(path), tokenizer_of(path))
        for name, path in zip(names, different.values(), strict=True)
    ]


def tokenizer_of(path: Path) -> str:
    """Return the content of a run's tokenizer file, "" if there is none."""
    with suppress(DataError, StorageError):
        return read_small(RunDirectory(path).tokenizer).decode(errors="replace")
    return ""


def runs_at(path: Path) -> list[Path]:
    """Return a run's directory, or all runs with metrics in a directory of runs."""
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
    """Return a record per step, in order. Resuming a run removes later records of the earlier start."""
    if not path.exists():
        others = f"; to list the runs: {command_line('runs', path.parent)}"
        raise UsageError(f"no run directory {path}{nearest_path(path) or others}")
    directory = RunDirectory(path)
    has_metrics = directory.metrics.is_file()
    if not has_metrics and not directory.config.is_file():
        start = f"to start a run in runs: {command_line('train')}"
        raise UsageError(f"{path} is not a run directory and contains no runs; {start}")
    history: dict[int, dict[str, Any]] = {}
    trained = -1
    for line in read_metrics(directory.metrics) if has_metrics else ():
        step = line.step
        if "loss" in line.numbers:
            if step <= trained:
                history = {known: history[known] for known in history if known < step}
            trained = step
        numbers = {name: drawable(number) for name, number in line.numbers.items()}
        history[step] = {**history.get(step, {}), "step": step, **numbers}
    if not history:
        raise UsageError(f"{path} has no recorded steps")
    return [history[step] for step in sorted(history)]


# Style


def series_colour(i: int) -> str:
    return SERIES[i % len(SERIES)]


@contextmanager
def style(**more: Any) -> Iterator[None]:
    with rc_context(STYLE | more), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)  # viewers have more fonts
        yield


def drawable(value: float | None) -> float:
    """Return NaN if the value cannot be drawn: unknown, infinite or too large."""
    try:
        number = math.nan if value is None else float(value)
    except OverflowError:
        return math.nan
    return number if 1 / LARGEST <= abs(number) <= LARGEST else 0.0 if abs(number) < 1 else math.nan


def log_locator(low: float, high: float) -> LogLocator:
    return LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,))


def set_ticks(axis: Any) -> None:
    """Format tick labels as 1,000, and add some on a short log axis."""
    if axis.get_scale() == "log":
        low, high = axis.get_view_interval()
        axis.set_major_locator(log_locator(low, high))
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_formatter("")
