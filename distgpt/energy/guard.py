"""Counts the joules of a run on all of its hosts: a thread of one rank of each host reads, rank 0 sums."""

from __future__ import annotations

import json
import os
import platform
import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distgpt.core.base.system import boot_id
from distgpt.core.comm.agree import gather_texts
from distgpt.core.comm.job import this_job
from distgpt.core.train.progress import Finished
from distgpt.core.train.run import Run

if TYPE_CHECKING:
    from distgpt.energy.counters import Meter
    from distgpt.guards.reports import Reports

SYS = Path("/sys")
# Between two readings. RAPL's counters begin anew after minutes; Slurm's own takes half a minute by default.
SECONDS, SECONDS_OF_SLURM = 1.0, 60.0


class Energy(AbstractContextManager["Energy"]):
    """Reads counters of this host in a thread, and knows on rank 0 what all hosts have read."""

    def __init__(
        self,
        open_meter: Callable[[], Meter] | None,
        seconds: float,
        hosts: int,
        reports: Reports | None,
    ) -> None:
        """`open_meter` is None on ranks that read nothing; `seconds` are those between two readings."""
        self._open, self._seconds, self._hosts, self._reports = open_meter, seconds, hosts, reports
        self._known: dict[int, tuple[float | None, list[str]]] = {}  # by rank, what it has read last
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="energy", daemon=True)

    def __enter__(self) -> Energy:
        if self._open:
            self._thread.start()
        return self

    def __exit__(self, *ended: object) -> None:
        self._over.set()
        if self._open:
            self._thread.join(SECONDS)  # it reads a last time, and may wait for Slurm
        if self._reports and self._reports.rank:
            self._reports.close()

    def _run(self) -> None:
        assert self._open
        meter, is_over = self._open(), False
        while meter.counted and not is_over:
            is_over = self._over.wait(self._seconds)
            reading = meter.read(), meter.counted
            if self._reports and self._reports.rank:
                self._reports.to_root(dict(zip(("joules", "counted"), reading, strict=True)))
            else:
                self._known[0] = reading

    def after_step(self, done: Finished) -> dict[str, float]:
        joules, _ = self.known()
        return {} if joules is None else {"joules": round(joules, 3)}

    def known(self) -> tuple[float | None, list[str]]:
        """Return on rank 0 what all hosts have taken, and what was counted; None where one is silent."""
        for message, _ in self._reports.received() if self._reports else ():
            self._known[message["rank"]] = message["joules"], message["counted"]
        known = list(self._known.values())
        joules = [each for each, _ in known if each is not None]
        counted = list(dict.fromkeys(name for _, names in known for name in names))
        return sum(joules) if len(joules) == self._hosts else None, counted

    def result(self) -> tuple[float | None, list[str]]:
        """Return `known` of a run that is over."""
        try:
            return self.known()
        finally:
            if self._reports:
                self._reports.close()


def guard(run: Run, root: Path | None = None) -> Energy | None:
    """Return what counts this run's energy; None where a host shows none. Collective."""
    root = root or SYS
    gpu = _gpu(run) if run.stage.on_gpu else ""
    # Counters that Linux may show, as it does on few virtual machines.
    zones = any(any((root / "class").glob(each)) for each in ("powercap/intel-rapl:*", "hwmon/hwmon*"))
    if run.comm.size == 1 and not (gpu or zones or slurm_may_count()):
        return None
    from distgpt.energy.counters import meter_of_host, meter_of_slurm, opened_zones
    from distgpt.guards.reports import Reports

    own, refused = opened_zones(root)
    here = {"host": boot_id() or platform.node(), "reads": bool(own), "refused": refused}
    here |= {"gpu": gpu, "slurm": slurm_may_count()}
    ranks = [json.loads(text) for text in gather_texts(run.comm, json.dumps(here))]
    refusals = [rank["refused"] for rank in ranks if rank["refused"]]
    if refusals and this_job().batch:  # on most machines, where it would only disturb
        run.report.note(f"{refusals[0]}: the energy of processors is not counted (chmod a+r permits it)")
    of_host: dict[str, list[dict[str, Any]]] = {}
    for rank in ranks:
        of_host.setdefault(rank["host"], []).append(rank)
    mine = of_host[str(here["host"])]
    if all(those[0]["reads"] or any(rank["gpu"] for rank in those) for those in of_host.values()):
        reports = Reports(run.comm) if len(of_host) > 1 else None
        reads = mine[0] is ranks[run.comm.rank]
        opened = partial(meter_of_host, own, sorted({rank["gpu"] for rank in mine} - {""}))
        return Energy(opened if reads else None, SECONDS, len(of_host), reports)
    if ranks[0]["slurm"]:
        return Energy(None if run.comm.rank else meter_of_slurm, SECONDS_OF_SLURM, 1, None)
    return None


def slurm_may_count(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is one of a job of Slurm whose counters can be asked for."""
    return "SLURM_JOB_ID" in environ and shutil.which("sstat") is not None


def _gpu(run: Run) -> str:
    """Return the id of this rank's GPU; "" where its driver shows none."""
    from distgpt.gpu.probe import driver
    from distgpt.gpu.stage import device_of

    found = driver()
    return found.gpus[device_of(run.comm.local_rank, len(found.gpus))].uuid if found and found.gpus else ""


def of_run(run: Run) -> dict[str, object] | None:
    """Return what summary.json says of a run that is over; None where its energy is not known."""
    own = next((each for each in run.guards if isinstance(each, Energy)), None)
    joules, counted = own.result() if own else (None, [])
    if joules is None:
        return None
    tokens = run.settings.batch_size * run.model.config.seq_len * len(run.progress.seconds)
    return {
        "joules": round(joules, 3),
        "joules_per_token": joules / tokens if tokens else None,
        "counted": counted,
    }
