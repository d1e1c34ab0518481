"""The table of runs: how far each is, how good, how fast, and when it last wrote something."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeGuard

from distgpt.core.base.checked import parse_object
from distgpt.core.base.errors import DistgptError, UsageError, escape
from distgpt.core.base.files import read_small, storage_errors
from distgpt.core.base.formatting import clock
from distgpt.core.saved.rundir import RunDirectory
from distgpt.show.metrics import parse_metrics, whole_lines
from distgpt.show.page import Column, tabulated, terminal_table

DEEPEST = 3  # levels of directories below the one that is listed
TAIL = 50  # lines of metrics that say how fast a run is
STOPS = ("finished", "ended early", "interrupted", "not finite", "outlier", "failed")


@dataclass(slots=True)
class Listed:
    """One run. `val_loss` is the lowest so far; None is what is not known.

    One that ends by the clock has no `steps`, but `total_s`. `train_bits_per_byte` is `loss` in a unit that
    tokenizers share, and `bits_per_byte` is `val_loss`. `held_out_tokens`: if it is over a part of them.
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
    error: str | None = None


# What the table can be sorted by; the last two with the largest first.
KEYS: dict[str, Callable[[Listed], Any]] = {
    "name": lambda run: run.name,
    "steps": lambda run: run.step,
    "state": lambda run: run.state,
    "loss": lambda run: run.loss,
    "validation": lambda run: run.val_loss,
    "bits-per-byte": lambda run: run.bits_per_byte,
    "speed": lambda run: run.tokens_per_s,
    "when": lambda run: run.when,
}
LARGEST_FIRST = ("speed", "when")


def list_runs(top: Path, key: str, reverse: bool) -> list[Listed]:
    """Return all runs in a directory, or the one that it is, sorted; those without the value come last."""
    if not top.is_dir():
        raise UsageError(f"there is no directory {top}")
    with storage_errors("read", top):
        paths = list(run_directories(top))
    runs = [_look_at(path, path.relative_to(top)) for path in paths]
    known = [run for run in runs if KEYS[key](run) is not None]
    known.sort(key=lambda run: run.name)
    known.sort(key=KEYS[key], reverse=(key in LARGEST_FIRST) != reverse)
    return known + [run for run in runs if KEYS[key](run) is None]


def render_terminal(runs: list[Listed]) -> str:
    """Format runs as a table, and below it what is wrong with a run."""
    table = tabulated(COLUMNS, [asdict(run) | {"steps": _steps(run), "time": _time(run)} for run in runs])
    parts = [
        escape(f"{run.name}: validation of {run.val_tokens:,} of {run.held_out_tokens:,} held-out tokens")
        for run in runs
        if run.val_tokens and run.held_out_tokens
    ]
    wrong = [escape(f"{run.name}: {run.error}") for run in runs if run.error]
    return "\n".join([terminal_table(table.columns, table.rows), *parts, *wrong])


def _steps(run: Listed) -> str:
    return f"{run.step:,}" + ("" if run.steps is None else f"/{run.steps:,}")


def _time(run: Listed) -> str:
    """Return how much of its time has elapsed of a run that ends by the clock."""
    if run.total_s is None:
        return ""
    return f"{'?' if run.elapsed_s is None else clock(run.elapsed_s)}/{clock(run.total_s)}"


def _moment(seconds: float) -> str:
    """Format a moment as `ls -l` does: with the time of the day, or the year if that is another one.

    "" for one in no year that a calendar has: a file can carry any number.
    """
    try:
        then = time.localtime(seconds)
        return time.strftime("%b %d %H:%M" if then.tm_year == time.localtime().tm_year else "%Y-%m-%d", then)
    except (ValueError, OverflowError, OSError):
        return ""


# Those in which no run has a value are left out: head, field, format. "bits" are those per byte.
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
    """Yield the runs in a directory, or the one that it is."""
    for name, inside, files in os.walk(top):
        path = Path(name)
        if {"config.toml", "tokenizer.json"} <= set(files):
            inside.clear()
            yield path
        elif len(path.relative_to(top).parts) >= DEEPEST:
            inside.clear()
        inside[:] = sorted(folder for folder in inside if not folder.startswith("."))


def _look_at(path: Path, name: Path) -> Listed:
    found = Listed(str(name) if name.parts else path.resolve().name, str(path))
    try:
        _fill(found, RunDirectory(path))
    except DistgptError as error:
        found.state, found.error = "damaged", str(error)
    return found


def _fill(found: Listed, run: RunDirectory) -> None:
    with storage_errors("read", run.config):
        found.when = run.config.stat().st_mtime
    saved = run.saved()
    if saved and saved.train.train_minutes:
        found.total_s = 60 * saved.train.train_minutes
    elif saved:
        found.steps = saved.train.steps
    if run.metrics.exists():
        with storage_errors("read", run.metrics):
            found.when = max(found.when, run.metrics.stat().st_mtime)
        _read_metrics(found, run.metrics)
    if run.lock.path.exists():
        found.state = "running" if run.lock.is_held() else "stopped"
    elif run.summary.exists():
        _read_summary(found, run.summary)


def best_evaluation(lines: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the line with the lowest validation loss after a step, over as many tokens as the last one."""
    scored = [line for line in lines if line["step"] and _is_finite(line.get("val_loss"))]
    alike = [line for line in scored if line.get("val_tokens") == scored[-1].get("val_tokens")]
    return min(alike, key=lambda line: line["val_loss"], default=None)


def _read_metrics(found: Listed, path: Path) -> None:
    """Fill in what the steps so far have come to."""
    numbered = list(enumerate(whole_lines(path), 1))
    evaluations = [parse_metrics(line, number, path) for number, line in numbered if b'"val_loss"' in line]
    if best := best_evaluation([{"step": line.step, **line.numbers} for line in evaluations]):
        found.val_loss, found.bits_per_byte = best["val_loss"], best.get("bits_per_byte")
        found.val_step = best["step"]
        found.val_tokens, found.held_out_tokens = best.get("val_tokens"), best.get("held_out_tokens")
    last = [parse_metrics(line, number, path) for number, line in numbered[-TAIL:]]
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


def _read_summary(found: Listed, path: Path) -> None:
    """Take the reason of the stop from the summary, unless it is of an earlier start."""
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
        found.step = step  # of a branch that had nothing left to do
    if found.val_loss is None and _is_finite(loss := summary.get("best_val_loss")):
        found.val_loss, bits = loss, summary.get("best_bits_per_byte")
        found.bits_per_byte = bits if _is_finite(bits) else None


def _is_finite(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
