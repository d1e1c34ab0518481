"""Metrics of a training run for Prometheus, in a file for node_exporter or at a port.

The label `run` is the absolute path of the run's directory, because node_exporter rejects all metrics of a
host if two files have the same labels.
"""

from __future__ import annotations

import errno
import platform
import re
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from zlib import crc32

from distgpt.core.base import __version__
from distgpt.core.base.errors import StorageError, UsageError, escape, print_lines
from distgpt.core.comm.job import exit_code, this_job
from distgpt.core.saved.checkpoint import MANIFEST, saved_checkpoints
from distgpt.core.train.interfaces import Listener
from distgpt.core.train.lines import Facts, Metrics

try:
    from prometheus_client import CollectorRegistry, start_http_server, write_to_textfile
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
except ImportError:
    raise UsageError(
        "Prometheus metrics require prometheus-client: pip install 'distgpt[prometheus]'"
    ) from None


SECONDS_BETWEEN = 15.0  # between versions of the file; a common scrape interval of Prometheus
ENDING = ".prom"  # node_exporter reads no other files

# Name and help by the names in metrics.jsonl. Others are gauges with their own names. Don't change the help:
# node_exporter drops metrics whose help differs between files of two versions.
FAMILIES = {
    "loss": ("loss", "Training loss of the last step, in nats per token."),
    "val_loss": ("validation_loss", "Loss of the last evaluation, in nats per token."),
    "train_bits_per_byte": ("bpb", "Training loss of the last step, in bits per byte."),
    "bits_per_byte": ("validation_bpb", "Loss of the last evaluation, in bits per byte."),
    "epoch": ("epoch", "Passes over the training data."),
    "lr": ("learning_rate", "Learning rate of the last step."),
    "grad_norm": ("gradient_norm", "Norm of the gradients of the last step."),
    "step": ("step", "Completed steps."),
    "tokens": ("tokens_total", "Tokens of all completed steps, including earlier starts."),
    "tokens_per_s": ("tokens_per_second", "Tokens per second of the last step."),
    "step_s": ("step_seconds", "Duration of the last step."),
    "late_s": ("slowest_rank_late_seconds", "How much later the slowest rank was than the others."),
    "val_s": ("validation_seconds", "Duration of the last evaluation."),
    "elapsed_s": ("elapsed_seconds", "Elapsed time that counts toward the run's time limit."),
    "time": ("step_timestamp_seconds", "Time of the end of the last step."),
}


class Exporter(CollectorRegistry, Listener):
    """The latest facts of a run, written in the main thread and collected in any thread. Only on rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self._run: dict[str, str] = {}
        self._exit_code: int | None = None

    def started(self, facts: Facts) -> None:
        directory = Path(facts["directory"]).absolute()
        self._checkpoints = directory / "checkpoints"
        self._began = time.time()
        self._step: Metrics = {}
        self._evaluation: Metrics = {}
        self._skipped = 0
        self._last_step: int | None = None if facts.get("seconds") else facts["steps"]
        job = (this_job().batch or {}).get("id", "")
        about = {"stage": facts["stage"], "ranks": facts["ranks"], "version": __version__, "job": job}
        self._about = {name: str(value) for name, value in about.items()}
        run = str(directory).encode(errors="replace").decode()  # file names may not be UTF-8
        self._run = {"run": run, "host": platform.node(), "rank": "0"}

    def stepped(self, metrics: Metrics) -> None:
        self._skipped += int(metrics.get("skipped", 0))
        self._step = metrics

    def evaluated(self, metrics: Metrics) -> None:
        self._evaluation = metrics

    def close(self) -> None:
        """Store the run's exit code. Called while the error that ends the run, if any, is being handled."""
        if self._run and self._exit_code is None:
            self._exit_code = 0
            if (error := sys.exception()) is not None:
                self._exit_code = exit_code(error)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; none before the run has started."""
        if not self._run:
            return

        def family(name: str, help: str, value: float, **more: str) -> Metric:
            labels = self._run | more
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            name = re.sub(r"\W", "_", f"distgpt_train_{name}", flags=re.ASCII)
            metric = kind(name, help, labels=list(labels))
            metric.add_metric(list(labels.values()), value)
            return metric

        yield family("info", "Labels that describe the run.", 1, **self._about)
        yield family("running", "1 while the run is active, 0 after its end.", self._exit_code is None)
        if self._exit_code is not None:
            yield family("exit_code", "Exit code of the run: 0 finished, 75 restart.", self._exit_code)
        yield family("start_timestamp_seconds", "Time of the start of training.", self._began)
        if self._last_step is not None:
            yield family("last_step", "Last step of the run.", self._last_step)
        yield family("skipped_steps_total", "Steps skipped since this start.", self._skipped)
        for key, value in (self._evaluation | self._step).items():  # both have a step: training's wins
            if key != "skipped":
                default = key, f"Last value of {key} in metrics.jsonl."
                yield family(*FAMILIES.get(key, default), value)
        # Export a time, not an age: an age in a file would not grow after the run ends.
        with suppress(OSError, StorageError):
            for path in saved_checkpoints(self._checkpoints)[:1]:
                saved = (path / MANIFEST).stat().st_mtime
                yield family("checkpoint_timestamp_seconds", "Time of the newest checkpoint.", saved)


class Textfile(Exporter):
    """Writes the metrics to a file for node_exporter's textfile collector, every 15 seconds.

    The file stays after the run with its exit code, since Prometheus may not have read it yet.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        is_folder = path.is_dir()
        if not is_folder and not (path.suffix == ENDING and path.parent.is_dir()):
            raise UsageError(
                f"--metrics-textfile {path} must be an existing directory, or a {ENDING} file in one"
            )
        self._path = path.absolute()
        self._folder = self._path if is_folder else None
        self._written = 0.0
        self._is_failing = False

    def started(self, facts: Facts) -> None:
        if self._folder and self._run:  # an ensemble's previous model is finished
            self.close()
            self._exit_code = None
        super().started(facts)
        if self._folder:
            run = Path(facts["directory"]).absolute()
            self._path = (
                self._folder / f"distgpt-{run.name}-{crc32(str(run).encode(errors='replace')):08x}{ENDING}"
            )
        self._write()

    def stepped(self, metrics: Metrics) -> None:
        super().stepped(metrics)
        if time.monotonic() - self._written >= SECONDS_BETWEEN:
            self._write()

    def close(self) -> None:
        is_first = self._exit_code is None
        super().close()
        if self._run and is_first:
            self._write()

    def _write(self) -> None:
        """Replace the file. A write error does not end the run."""
        self._written = time.monotonic()
        try:
            write_to_textfile(str(self._path), self)
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                why = f"cannot write {escape(str(self._path))}: {error.strerror or error}"
                print_lines(f"{why}; continuing without Prometheus metrics", err=True)
            self._is_failing = True


LOCAL = "127.0.0.1"


def parsed_address(text: str) -> tuple[str, int]:
    """Parse host and port from "9200", "node:9200" or "[::]:9200". Raise a UsageError for anything else."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or LOCAL
    if not (port.isascii() and port.isdecimal() and int(port) < 1 << 16):
        raise UsageError(f"--metrics-port {text!r:.80} must be a port, such as 9200, or ADDRESS:PORT")
    return host, int(port)


class Port(Exporter):
    """Serves /metrics in threads, until the process ends."""

    def __init__(self, where: str) -> None:
        super().__init__()
        host, port = parsed_address(where)
        try:
            self.server, _ = start_http_server(port, host, self)
        except (OSError, UnicodeError) as error:  # UnicodeError: a name with an empty or overlong part
            why = getattr(error, "strerror", None) or error
            # A job that has waited in a queue, perhaps to resume, is worth more than its metrics.
            if getattr(error, "errno", None) == errno.EADDRINUSE and this_job().batch:
                print_lines(f"--metrics-port {where:.80}: {why}; continuing without it", err=True)
                return
            raise UsageError(f"--metrics-port {where:.80}: {why}") from None
        # Ignore clients that disconnect early.
        self.server.handle_error = lambda *about: None  # type: ignore[method-assign]
        shown = f"[{host}]" if self.server.address_family == socket.AF_INET6 else host
        print_lines(f"Prometheus metrics: http://{shown}:{self.server.server_port}/metrics")
