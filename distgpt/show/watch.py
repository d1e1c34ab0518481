"""The page of `distgpt watch`: state, curves and samples of runs, on 127.0.0.1 or in a file."""

from __future__ import annotations

import html
import re
import time
import webbrowser
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from distgpt.core.base.checked import parse_object
from distgpt.core.base.errors import DistgptError, UsageError, escape, escape_model_text, print_lines
from distgpt.core.base.files import LONGEST_LINE, atomic_file, open_regular, storage_errors, system_error
from distgpt.core.base.formatting import clock, count
from distgpt.core.saved.rundir import Metrics, RunDirectory, parse_metrics
from distgpt.show import plot
from distgpt.show.page import Column, tabulated
from distgpt.show.plot import Curve, Run
from distgpt.show.runs import TAIL, Listed, Records, fill, shown_steps

POINTS = 500  # per curve
SAMPLES = 3  # maximum in total, but at least one per run
IN_BROWSER, IN_FILE, LONGEST = 4.0, 15.0, 60.0  # seconds between two refreshes; a browser reloads every 5
SHARE = 120  # a refresh may take 1/120 of the time until the next one
STALE = 60.0  # seconds without a step
CURVES = ("loss", "train_bits_per_byte", "grad_norm", "tokens_per_s")
COLUMNS = ("step", *(f"{key}{kind}" for kind in ("", " low", " high") for key in CURVES))
WIDTH = 1 + len(CURVES)
DASHES = ("none", "7 4", "2 3")
HOSTS = ("127.0.0.1", "localhost")
LINEAR = MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10])


@dataclass
class Tail:
    """New lines of a growing file. `forget` is called if the file was replaced, shortened or rewritten."""

    path: Path
    forget: Callable[[], None]
    offset: int = 0
    before: bytes = b""  # the end of the bytes before the offset

    def read(self) -> Iterator[bytes]:
        """Yield the complete lines since the last call."""
        with storage_errors("read", self.path), open_regular(self.path) as file:
            file.seek(self.offset - len(self.before))
            if file.read(len(self.before)) != self.before:
                self.offset, self.before = file.seek(0), b""
                self.forget()
            while (line := file.readline(LONGEST_LINE)).endswith(b"\n"):
                self.offset, self.before = self.offset + len(line), line[-200:]
                yield line


class Watched:
    """A run as of the last refresh."""

    def __init__(self, path: Path) -> None:
        self._directory = RunDirectory(path)
        self._metrics = Tail(self._directory.metrics, self._forget)
        self._sampled = Tail(self._directory.samples, lambda: self.samples.clear())
        self.samples: list[tuple[int, str]] = []
        self.listed, self._tokenizer = Listed("", str(path)), ""
        self._forget()

    def _forget(self) -> None:
        self._rows, self._last, self._lines = array("d"), deque[Metrics](maxlen=TAIL), 0
        self.evaluations: list[dict[str, Any]] = []

    def refresh(self, name: str) -> None:
        """Read the run's new lines. If that fails, keep the former numbers."""
        result = Listed(name, self.listed.path)
        try:
            fill(result, self._directory, self._read)
            for line in self._sampled.read() if self._directory.samples.exists() else ():
                event: Any = parse_object(line, self._directory.samples)
                while self.samples and self.samples[-1][0] >= event["step"]:
                    self.samples.pop()
                self.samples.append((event["step"], str(event["sample"])))
            self._tokenizer = self._tokenizer or plot.tokenizer_of(self._directory.path)
            self.listed = result
        except (DistgptError, OSError, KeyError, TypeError) as error:
            state = "deleted" if isinstance(system_error(error), FileNotFoundError) else "unreadable"
            self.listed = replace(self.listed, name=name, state=state, error=str(error))

    def _read(self, path: Path) -> Records:
        for content in self._metrics.read():
            self._lines += 1
            line = parse_metrics(content, self._lines, path)
            self._last.append(line)
            if "val_loss" in line.numbers:
                self.evaluations.append({"step": line.step, **line.numbers})
            if "loss" in line.numbers:
                while self._rows and self._rows[-WIDTH] >= line.step:  # an earlier start's later steps
                    del self._rows[-WIDTH:]
                while self.evaluations and self.evaluations[-1]["step"] >= line.step:
                    self.evaluations.pop()
                self._rows.extend([line.step, *(plot.drawable(line.numbers.get(key)) for key in CURVES)])
        return self.evaluations, self._last

    def facts(self, validation: str) -> dict[str, Any]:
        """Return the values of a row, and notes. `validation`: the key of the validation loss."""
        listed, now = self.listed, self.evaluations[-1] if self.evaluations else {}
        is_running, notes = listed.state == "running", [listed.error] if listed.error else []
        age = listed.when and max(0.0, time.time() - listed.when)
        pace = max((line.numbers.get("step_s") or 0.0 for line in self._last), default=0.0)
        if age and is_running and age > max(STALE, 5 * pace):
            notes.append(f"running, but last step {ago(age)}")
        left = max(0.0, (listed.total_s or 0.0) - (listed.elapsed_s or 0.0))
        more = {"steps": shown_steps(listed), "now": now.get(validation), "age": age, "notes": notes}
        return asdict(listed) | more | {"left": left if is_running and listed.total_s else None}

    def curves(self) -> Run:
        """Return the run for drawing: means and extremes of equal numbers of steps."""
        rows, lines = np.array(self._rows).reshape(-1, WIDTH), list[dict[str, Any]]()
        if len(rows):
            starts, known = np.arange(0, len(rows), 1 + len(rows) // POINTS), np.isfinite(rows)
            bounds = (bound.reduceat(rows, starts)[:, 1:] for bound in (np.fmin, np.fmax))
            with np.errstate(invalid="ignore"):
                means = np.add.reduceat(np.where(known, rows, 0), starts) / np.add.reduceat(1 * known, starts)
            lines += [dict(zip(COLUMNS, row, strict=True)) for row in np.hstack([means, *bounds]).tolist()]
        lines += self.evaluations[:: -1 - len(self.evaluations) // POINTS][::-1]
        return Run(_text(self.listed.name), lines, self._tokenizer)


class Watch:
    """Runs and their page, refreshed after `seconds`, or later if that takes long. For any thread."""

    def __init__(self, paths: Sequence[Path], seconds: float) -> None:
        self._paths, self._lock, self._runs = paths, Lock(), dict[Path, Watched]()
        self._seconds, self._due, self._body, self._title = seconds, 0.0, "", ""
        self._refresh()  # reads all lines, so its time does not count
        for path in paths:
            if not any(run.is_relative_to(path.resolve()) for run in self._runs):
                raise UsageError(f"{path} is not a run directory and contains no runs")

    @property
    def is_live(self) -> bool:
        return any(run.listed.state in ("running", "unreadable") for run in self._runs.values())

    def _refresh(self) -> list[Watched]:
        for path in self._paths:
            with suppress(DistgptError, OSError):
                for result in plot.runs_at(path):
                    if result.resolve() not in self._runs and RunDirectory(result).config.is_file():
                        self._runs[result.resolve()] = Watched(result)
        names = plot.short_names([*self._runs]) if self._runs else []
        for run, name in zip(self._runs.values(), names, strict=True):
            run.refresh(name)
        return [*self._runs.values()]

    def body(self) -> str:
        """Return the content of the page."""
        with self._lock:
            if time.monotonic() >= self._due:
                begun, runs = time.thread_time(), self._refresh()
                self._title = _text(runs[0].listed.name) if len(runs) == 1 else count(len(runs), "run")
                head = f"<h1>{self._title}</h1><p>updated {time.strftime('%Y-%m-%d %H:%M:%S')}</p>"
                self._body = f"<header>{head}</header>\n{render(runs)}"
                wait = max(self._seconds, SHARE * (time.thread_time() - begun))
                self._due = time.monotonic() + min(wait, LONGEST)
            return self._body

    def page(self, has_script: bool = True) -> str:
        """Return the page. Without a script, it reloads itself while a run is active."""
        text, body = Path(__file__).with_suffix(".html").read_text("utf-8"), self.body()
        if not has_script:
            reload = f'<meta http-equiv="refresh" content="{self._seconds:.0f}">\n' * self.is_live
            text = text.partition('<p id="lost"')[0].replace("<title>", f"{reload}<title>")
        text = text.replace("<title>", f"<title>{self._title} · distgpt watch")
        return text.replace("<main>", f"<main>{body}")


def _text(text: str) -> str:
    return html.escape(escape(text))


def ago(seconds: float) -> str:
    """250 → "4 minutes ago"."""
    units = {"day": 86400, "hour": 3600, "minute": 60, "second": 1}
    unit = next((name for name, size in units.items() if seconds >= size), "second")
    return f"{count(int(seconds // units[unit]), unit)} ago"


def render(watched: Sequence[Watched]) -> str:
    """Return a table, charts and samples as HTML."""
    runs = [run.curves() for run in watched]
    (loss, validation), unit = plot.loss_keys(runs)
    columns: list[Column] = [("run", "name", str), ("state", "state", str), ("step", "steps", str)]
    columns += [("time left", "left", clock), ("loss", loss, "{:.4f}".format)]
    columns += [("validation", "now", "{:.4f}".format), ("best", validation, "{:.4f}".format)]
    columns += [("tokens/s", "tokens_per_s", "{:,.0f}".format), ("last step", "age", ago)]
    facts = [run.facts(validation) for run in watched]
    table = tabulated(columns, facts)
    result = ["<table><thead><tr>", *(f"<th>{name}" for name in table.columns), "</thead><tbody>"]
    for number, (name, *cells) in enumerate(table.rows):
        key = f'<svg class="key" viewBox="0 0 26 10">{_path(number, "M0 5h26")}</svg>'
        named = zip(table.columns[1:], cells, strict=True)
        rest = "".join(f'<td data-name="{column}">{_text(cell)}' for column, cell in named)
        result.append(f"<tr><td>{key}{_text(name)}{rest}")
    result.append("</table>")
    for fact in facts:
        result += [f'<p class="wrong">{_text(fact["name"])}: {_text(note)}</p>' for note in fact["notes"]]
    dots = "; dots: validation" * any(run.evaluations for run in watched)
    charts = chart(f"Loss ({unit}{dots})", runs, loss, validation)
    charts += chart("Speed (tokens/s)", runs, "tokens_per_s") + chart("Gradient norm", runs, "grad_norm")
    result.append(f'<section class="charts">{charts}</section>')
    for run in watched:
        for step, text in run.samples[: -1 - max(1, SAMPLES // len(runs)) : -1]:
            title = f"Sample of {_text(run.listed.name)} after step {step:,}"
            shown = html.escape(escape_model_text(text))
            result.append(f"<article><h2>{title}</h2><pre>{shown}</pre></article>")
    return "\n".join(result)


def _path(number: int, commands: str, kind: str = "", title: str = "") -> str:
    """Return a line of a run: eight colors, then dashes."""
    color, dash = plot.series_colour(number), DASHES[number // len(plot.SERIES) % len(DASHES)]
    look = f'color="{color}" stroke-dasharray="{dash}" class="{kind}"'
    return f'<path {look} d="{commands}"><title>{title}</title></path>'


def chart(title: str, runs: Sequence[Run], key: str, dots: str = "") -> str:
    """Draw a number of all runs as SVG of any width: smoothed lines, on bands from lowest to highest."""
    is_log, top = key == "grad_norm", plot.top_speed(runs) if key == "tokens_per_s" else None

    def scaled(curve: Curve) -> Curve:
        values = np.minimum(curve.values, plot.LARGEST)
        values = np.log10(np.where(values > 0, values, np.nan)) if is_log else values
        return Curve(curve.steps, values).finite()

    drawn: list[tuple[str, int, Curve]] = []
    for i, run in enumerate(runs):
        low, high, mean = (scaled(run[f"{key}{kind}"]) for kind in (" low", " high", ""))
        band = Curve(*(np.append(ahead, back[::-1]) for ahead, back in zip(low, high, strict=True)))
        line = Curve(mean.steps, mean.smoothed(average=np.mean if dots else np.median))
        drawn += [("band", i, band), ("dots", i, scaled(run[dots])), ("line", i, line)]
    drawn = sorted((each for each in drawn if len(each[2].steps)), key=lambda each: each[0])
    if not drawn:
        return ""
    room = {"band": (0.02, 0.98)}  # its outliers need no space
    shown = [np.quantile(curve.values, room.get(kind, (0, 1))) for kind, _, curve in drawn]
    margin = 0.05 * np.ptp(shown) or 0.1
    bottom, height = (0.0, top) if top else (np.min(shown) - margin, np.ptp(shown) + 2 * margin)
    steps = np.concatenate([curve.steps for *_, curve in drawn])
    width = 1.02 * max(1, np.ptp(steps))
    left = steps.min() - 0.01 * width

    paths, labels = "", ""
    for kind, i, curve in drawn:
        x, y = (curve.steps - left) / width, 1 - (curve.values - bottom) / height
        places = np.stack([2000 * x, 1000 * np.clip(y, -1, 2)], axis=1).tolist()
        points = ("h0M" if kind == "dots" else "L").join(f"{x:.0f} {y:.0f}" for x, y in places)
        paths += _path(i, f"M{points}h0", kind, runs[i].name)  # h0 draws a point
    ends = (10**bottom, 10 ** (bottom + height)) if is_log else (bottom, bottom + height)
    locator = plot.log_locator(*ends) if is_log and ends[1] > 10 * ends[0] else LINEAR
    for tick in (tick for tick in locator.tick_values(*ends) if ends[0] <= tick <= ends[1]):
        at = f"{100 - 100 * ((np.log10(tick) if is_log else tick) - bottom) / height:.1f}%"
        labels += f'<line x2="100%" y1="{at}" y2="{at}"/><text class="y" y="{at}">{tick:,g}</text>'
    for tick in LINEAR.tick_values(left, left + width):
        if left <= tick <= left + width and not tick % 1:
            labels += f'<text x="{100 * (tick - left) / width:.1f}%" y="100%">{tick:,.0f}</text>'
    inner = f'<svg viewBox="0 0 2000 1000" preserveAspectRatio="none">{paths}</svg>'
    about = f'class="chart" role="img" aria-label="{title}"'
    return f"<figure><figcaption>{title}</figcaption><svg {about}>{labels}{inner}</svg></figure>"


def listen(watch: Watch, port: int) -> ThreadingHTTPServer:
    """Return a server of the page, only on 127.0.0.1. Reject unknown Host headers (DNS rebinding)."""
    contents = {"/": watch.page, "/body": watch.body}

    class Handler(BaseHTTPRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):  # the client disconnected
                super().handle()

        def do_GET(self) -> None:
            is_known = re.sub(r":\d+$", "", self.headers.get("Host", "")).lower() in HOSTS
            if not is_known or self.path not in contents:
                self.send_error(404 if is_known else 403)
                return
            content = contents[self.path]().encode(errors="replace")
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content if self.command == "GET" else b"")

        do_HEAD = do_GET

        def log_message(self, *about: Any) -> None: ...

    try:
        return ThreadingHTTPServer((HOSTS[0], port), Handler)
    except OSError as error:
        raise UsageError(f"--port {port}: {error.strerror or error}; omit it for a free port") from None


def serve_page(paths: Sequence[Path], port: int, is_opened: bool) -> None:
    """Serve the page until a signal."""
    with suppress(KeyboardInterrupt), listen(Watch(paths, IN_BROWSER), port) as server:
        print_lines(address := f"http://{HOSTS[0]}:{server.server_port}")
        if is_opened:
            webbrowser.open(address)
        server.serve_forever(poll_interval=60)  # a signal ends it anyway


def write_page(paths: Sequence[Path], out: Path) -> None:
    """Write the page to a file, again and again while a run is active."""
    watch, is_written = Watch(paths, IN_FILE), False
    with suppress(KeyboardInterrupt):
        while not is_written or watch.is_live:
            time.sleep(IN_FILE * is_written)
            with suppress(*[DistgptError] * is_written), atomic_file(out) as file:
                file.write(watch.page(has_script=False).encode(errors="replace"))
            is_written = True
