"""A profile from its first to its last step: peaks, measuring, what all ranks found, files and table."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from zlib import compress, decompress

from distgpt.comm.agree import gather_bytes, on_root
from distgpt.comm.api import Comm
from distgpt.config import TrainConfig
from distgpt.files import atomic_file, storage_errors
from distgpt.machine.environment import environment
from distgpt.machine.stages import Stage
from distgpt.measure.peaks import SECONDS, Peaks, measure_peaks
from distgpt.measure.profile.profiler import WARM_UP, Profiler
from distgpt.measure.profile.result import RankProfile, of_rank, result
from distgpt.measure.profile.table import as_text
from distgpt.measure.profile.trace import Event, as_trace, events
from distgpt.model.model import Model
from distgpt.units import count

TABLE, TRACE = "profile.json", "trace.json"

Tell = Callable[[str], None]


def prepare(comm: Comm, folder: Path) -> None:
    """Find out beforehand whether files can be written there. Collective."""

    def probe() -> None:
        with storage_errors("write the profile into", folder):
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=folder) as file:
                file.write(b"whether there is room")

    on_root(comm, probe)


class Session:
    """On every rank, each with a step of the same kind. `peak_seconds` is how long measuring peaks may take.

    After Ctrl-C `salvage` tells what rank 0 has. With several ranks that is not certain: every rank hears of
    the interrupt, and whichever comes to its end first ends the job. So what matters most is written first.
    """

    def __init__(
        self,
        stage: Stage,
        model: Model,
        train: TrainConfig,
        warm_up: int = WARM_UP,
        peak_seconds: float = SECONDS,
    ) -> None:
        self._stage, self._comm = stage, stage.comm
        self.profiler = Profiler(stage.device, warm_up)
        self.watch = self.profiler.watch
        self._about = {
            "environment": environment() if self._comm.rank == 0 else {},
            "stage": stage.name,
            "ranks": self._comm.size,
            "threads": stage.threads,
            "gpu": stage.device is not None,
            "dtype": train.dtype,
            "parameters": model.layout.size,
            "tokens_per_step": train.batch_size * model.config.seq_len,
        }
        if stage.device is not None:
            stage.notes.add("each operation is timed, so steps are not recorded as CUDA graphs")
        self._kernels, self._peak_seconds = model.kernels, peak_seconds
        self._peaks: Peaks | None = None

    def measure_peaks(self) -> None:
        """Of all ranks at once: what they share, such as memory, they share here too. Collective.

        Others may use the processor too, once more than at other times: a second measurement may be higher.
        The arrays for it count in what the process takes, so not before a run whose memory is to be told.
        """
        found = measure_peaks(self._kernels, self._peak_seconds, self._comm.barrier)
        self._peaks = self._peaks.or_higher(found) if self._peaks else found

    @property
    def steps(self) -> int:
        """Steps that were profiled so far."""
        return len(self.profiler.seconds)

    def finish(self, folder: Path, tell: Tell) -> None:
        """Tell the table and write the files, on rank 0. Collective."""
        if not self.steps:
            if self._comm.rank == 0:
                tell(f"\nnothing to profile: {self._why_nothing()}")
            return
        if not self.profiler.on_gpu or self._peaks is None:
            self.measure_peaks()
        own = compress(json.dumps([self._profile(), self._events()]).encode())
        ranks = [json.loads(decompress(found)) for found in gather_bytes(self._comm, own)]
        profiles = [profile for profile, _ in ranks]
        trace = [event for _, events in ranks for event in events]
        on_root(self._comm, lambda: self._put_out(profiles, lambda: trace, folder, tell))

    def salvage(self, folder: Path, tell: Tell) -> None:
        """The same of rank 0 alone, once the others can't be relied on; nothing if nothing was measured."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would break off this too
        if self.steps and self._comm.rank == 0:
            self._about["interrupted"] = True
            self._put_out([self._profile()], self._events, folder, tell)

    def _why_nothing(self) -> str:
        if not self.profiler.skipped:
            return "no step was left to do"
        warm_up = count(self.profiler.warm_up, "step")
        return f"{warm_up} to warm up come first, and none was done after them"

    def _profile(self) -> dict[str, Any]:
        return of_rank(self.profiler, self._comm.rank, self._peaks).as_dict()

    def _events(self) -> list[Event]:
        return events(self._comm.rank, self.profiler.traced, self.profiler.on_gpu)

    def _put_out(
        self, profiles: list[dict[str, Any]], trace: Callable[[], list[Event]], folder: Path, tell: Tell
    ) -> None:
        """In the order in which it would be missed, for nobody knows how far this gets."""
        found = result([RankProfile.from_dict(each) for each in profiles], self._about)
        tell(f"\n{as_text(found)}\n")
        _write(folder / TABLE, json.dumps(found, indent=1))
        tell(f"profile   {folder / TABLE}")
        facts = {key: str(found[key]) for key in ("stage", "ranks", "threads", "dtype", "parameters")}
        _write(folder / TRACE, json.dumps(as_trace(trace(), facts)))
        tell(f"trace     {folder / TRACE}")


def _write(path: Path, content: str) -> None:
    with atomic_file(path) as file:
        file.write(content.encode() + b"\n")
