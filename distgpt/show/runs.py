"""The table of runs: progress, loss, speed, and time of the last output of each."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any, TypeGuard

from distgpt.core.base.checked import parse_object
from distgpt.core.base.errors import DistgptError, UsageError, command_line, escape, nearest_path
from distgpt.core.base.files import read_small, storage_errors
from distgpt.core.base.formatting import clock, count
from distgpt.core.saved.rundir import Metrics, RunDirectory, parse_metrics, whole_lines
from distgpt.core.train.interfaces import ends_by_steps
from distgpt.show.page import Column, fitting, tabulated, terminal_table

DEEPEST = 3  # levels below the listed directory
TAIL = 50  # lines of metrics used to measure a run's speed
SPARE = ("train_bits_per_byte", "bits_per_byte", "tokens_per_s", "when")  # omitted on a narrow terminal
STOPS = ("finished", "ended early", "interrupted", "not finite", "outlier", "failed")


@dataclass(slots=True)
class Listed:
    """A run and its state. `val_loss` is the lowest one; None: unknown.

    A run with a time limit has no `steps`. `total_s` is its limit; for other runs it is an estimate while
    they run. `train_bits_per_byte` is `loss`, and `bits_per_byte` `val_loss`, in a unit that tokenizers
    share. `held_out_tokens` is set if `val_loss` covers only a part.
    """

    name: str
    path: str
    state: str = "begun"
    step: int = 0
    steps: int | None = None
    elapsed_s: float | None = None
    total_s: float | None = None
    loss: float | None = None
    train_bits_per_byte: float | None = None
    val_loss: float | None = None
    bits_per_byte: float | None = None
    val_step: int | None = None
    val_tokens: int | None = None
    held_out_tokens: int | None = None
    tokens_per_s: float | None = None
    when: float | None = None  # seconds since 1970
    sweep: str | None = None  # name of its sweep
    error: str | None = None


# Sort keys of the table that are not attribute names.
KEYS = {"steps": "step", "validation": "val_loss", "bits-per-byte": "bits_per_byte", "speed": "tokens_per_s"}
LARGEST_FIRST = ("speed", "when")


def list_runs(top: Path, key: str, reverse: bool) -> list[Listed]:
    """Return the runs in a directory (or the run at this path), sorted. Runs without the value come last."""
    if not top.is_dir():
        start = f"; to start a run there: {command_line('train')}" if top == Path("runs") else ""
        raise UsageError(f"no directory {top}{nearest_path(top) or start}")
    with storage_errors("read", top):
        paths = list(run_directories(top))
    runs = [_look_at(path, top) for path in paths]
    value = attrgetter(KEYS.get(key, key))
    known = sorted((run for run in runs if value(run) is not None), key=attrgetter("name"))
    known.sort(key=value, reverse=(key in LARGEST_FIRST) != reverse)
    return known + [run for run in runs if value(run) is None]


def render_terminal(runs: list[Listed]) -> str:
    """Format runs as a table with one row per sweep, and errors below it."""
    shown = [asdict(run) | {"steps": shown_steps(run), "time": _time(run)} for run in _with_sweeps(runs)]
    table = tabulated(fitting(COLUMNS, SPARE), shown)
    wrong = [escape(f"{run.name}: {run.error}") for run in runs if run.error]
    return "\n".join([terminal_table(table.columns, table.rows), *wrong])


def _with_sweeps(runs: list[Listed]) -> Iterator[Listed]:
    """Yield one entry per sweep (its best run, with the time of all), and other runs unchanged."""
    groups: dict[str, list[Listed]] = {}
    for run in runs:
        groups.setdefault(run.sweep or run.name, []).append(run)
    for name, members in groups.items():
        if members[0].sweep is None:
            yield members[0]
            continue
        best = min(members, key=lambda r: [x or math.inf for x in (r.bits_per_byte, r.val_loss, r.loss)])
        state = "running" if any(run.state == "running" for run in members) else best.state
        taken, when = sum(run.elapsed_s or 0 for run in members), max(run.when or 0 for run in members)
        name = f"{name} ({count(len(members), 'run')})"
        yield replace(best, name=name, state=state, elapsed_s=taken, total_s=None, when=when)


def shown_steps(run: Listed) -> str:
    return f"{run.step:,}" + ("" if run.steps is None else f"/{run.steps:,}")


def _time(run: Listed) -> str:
    """Return the time that a run has taken and, if known, its total time."""
    taken = "" if run.elapsed_s is None else clock(run.elapsed_s)
    return taken if run.total_s is None else f"{taken or '?'}/{clock(run.total_s)}"


def _moment(seconds: float) -> str:
    """Format a time; "" if it is outside the calendar, since a file can have any number."""
    try:
        return time.strftime("%Y-%m-%dT%H:%M", time.localtime(seconds))
    except (ValueError, OverflowError, OSError):
        return ""


# Columns as heading, key, format. Columns in which no run has a value are omitted. "bits" are per byte.
COLUMNS: tuple[Column, ...] = (
    ("run", "name", str),
    ("steps", "steps", str),
    ("time", "time", str),
    ("state", "state", str),
    ("loss", "loss", "{:.4f}".format),
    ("bits", "train_bits_per_byte", "{:.2f}".format),
    ("validation", "val_loss", "{:.4f}".format),
    ("bits", "bits_per_byte", "{:.2f}".format),
    ("tokens/s", "tokens_per_s", "{:,.0f}".format),
    ("when", "when", _moment),
)


def run_directories(top: Path) -> Iterator[Path]:
    """Yield the runs in a directory, or the path itself if it is a run."""
    for name, inside, files in os.walk(top):
        path = Path(name)
        if {"config.toml", "tokenizer.json"} <= set(files):
            inside.clear()
            yield path
        elif len(path.relative_to(top).parts) >= DEEPEST:
            inside.clear()
        inside[:] = sorted(folder for folder in inside if not folder.startswith("."))


def _look_at(path: Path, top: Path) -> Listed:
    name = path.relative_to(top)
    result = Listed(str(name) if name.parts else path.resolve().name, str(path))
    if len(name.parts) > 1 and (path.parent / "grid.json").is_file():
        result.sweep = str(name.parent)
    try:
        fill(result, RunDirectory(path), _read_metrics)
    except DistgptError as error:
        result.state, result.error = "damaged", str(error)
    return result


# The evaluations of a metrics file, and its last TAIL lines.
Records = tuple[Sequence[dict[str, Any]], Sequence[Metrics]]


def fill(found: Listed, run: RunDirectory, read: Callable[[Path], Records]) -> None:
    """Fill in all facts of a run. `read`: reads its metrics."""
    with storage_errors("read", run.config):
        found.when = run.config.stat().st_mtime
    saved = run.saved()
    if saved and saved.train.train_minutes:
        found.total_s = 60 * saved.train.train_minutes
    if saved and ends_by_steps(saved.train):
        found.steps = saved.train.steps
    if run.metrics.exists():
        with storage_errors("read", run.metrics):
            found.when = max(found.when, run.metrics.stat().st_mtime)
        _summarize(found, *read(run.metrics))
    if run.lock.path.exists():
        found.state = "running" if run.lock.is_held() else "stopped"
    elif run.summary.exists():
        _read_summary(found, run.summary)
    if found.steps is not None and found.state != "running":
        found.total_s = None


def best_evaluation(lines: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the line with the lowest validation loss after step 0, over as many tokens as the last one."""
    scored = [line for line in lines if line["step"] and _is_finite(line.get("val_loss"))]
    alike = [line for line in scored if line.get("val_tokens") == scored[-1].get("val_tokens")]
    return min(alike, key=lambda line: line["val_loss"], default=None)


def _read_metrics(path: Path) -> Records:
    numbered = list(enumerate(whole_lines(path), 1))
    evaluations = [parse_metrics(line, number, path) for number, line in numbered if b'"val_loss"' in line]
    last = [parse_metrics(line, number, path) for number, line in numbered[-TAIL:]]
    return [{"step": line.step, **line.numbers} for line in evaluations], last


def _summarize(found: Listed, evaluations: Sequence[dict[str, Any]], last: Sequence[Metrics]) -> None:
    if best := best_evaluation(evaluations):
        found.val_loss, found.bits_per_byte = best["val_loss"], best.get("bits_per_byte")
        found.val_step = best["step"]
        found.val_tokens, found.held_out_tokens = best.get("val_tokens"), best.get("held_out_tokens")
    trained = [line.numbers for line in last if "loss" in line.numbers]
    if not last:
        return
    found.state, found.step = "stopped", last[-1].step
    if trained and _is_finite(trained[-1]["loss"]):
        found.loss = trained[-1]["loss"]
        found.train_bits_per_byte = trained[-1].get("train_bits_per_byte")
    found.elapsed_s = trained[-1].get("elapsed_s") if trained else None
    rates = [rate for numbers in trained if _is_finite(rate := numbers.get("tokens_per_s"))]
    found.tokens_per_s = median(rates) if rates else None
    pace = [seconds for numbers in trained if _is_finite(seconds := numbers.get("step_s"))]
    if pace and found.elapsed_s is None:  # an estimate: steps that compiled took longer
        found.elapsed_s = found.step * median(pace)
        found.total_s = found.steps * median(pace) if found.steps else None


def _read_summary(found: Listed, path: Path) -> None:
    """Take the reason of the stop from the summary, unless it belongs to an earlier start."""
    with storage_errors("read", path):
        ended = path.stat().st_mtime
    summary = parse_object(read_small(path), path)
    if found.when is not None and ended + 1 < found.when:
        return
    found.when = ended
    stop, step, speed = summary.get("stop", "finished"), summary.get("step"), summary.get("tokens_per_s")
    found.state = stop if isinstance(stop, str) and stop in STOPS else "stopped"
    if _is_finite(speed):
        found.tokens_per_s = speed
    if not found.step and type(step) is int:
        found.step = step  # a branch that had no steps left
    if found.val_loss is None and _is_finite(loss := summary.get("best_val_loss")):
        found.val_loss, bits = loss, summary.get("best_bits_per_byte")
        found.bits_per_byte = bits if _is_finite(bits) else None


def _is_finite(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
