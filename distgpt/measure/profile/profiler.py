"""Watches a run's steps, from the third on: what each took goes into sums, of the first ones all is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distgpt.data.batches import Batches
from distgpt.gpu.api import Device
from distgpt.measure.profile.accounting import Account, Accountant, Times
from distgpt.measure.profile.clocks import Clock, DeviceClock, HostClock
from distgpt.measure.profile.recorder import Recorder, Taken
from distgpt.training.step import Step, StepResult

WARM_UP = 2  # steps that compile, record and try out
TRACED = 10  # steps of which every operation is kept


@dataclass(frozen=True, slots=True)
class Traced:
    """A step with all its operations. `begin` in seconds from the moment at which all ranks met."""

    number: int
    begin: float
    account: Account


@dataclass(slots=True)
class Watched:
    """A step's outcome, which closes its account when it is read: nothing waits before."""

    outcome: StepResult
    close: Any

    @property
    def lr(self) -> float:
        return self.outcome.lr

    def read(self) -> tuple[float, float]:
        found = self.outcome.read()
        self.close()
        return found


class Profiler:
    """One rank's. `device` is the GPU, if there is one."""

    def __init__(self, device: Device | None = None, warm_up: int = WARM_UP) -> None:
        self.clock: Clock = HostClock() if device is None else DeviceClock(device)
        self.on_gpu = device is not None
        self.warm_up = warm_up
        self.times = Times.none()
        self.seconds: list[float] = []  # of each profiled step
        self.traced: list[Traced] = []
        self.workers = 1
        self.skipped = 0  # steps to warm up that were done
        self._last: Taken | None = None
        self._zero: Any = None
        self._recorder: Recorder | None = None
        self._accountant = Accountant(self.clock, 1)

    def watch(self, step: Step) -> None:
        """From now on this step's launches are measured, after those to warm up. Collective."""
        launch, kernels = step.launch, step.model.kernels
        self.workers = kernels.threads
        self._accountant = Accountant(self.clock, self.workers)
        self.clock.settle()
        step.comm.barrier()
        self._zero = self.clock.now()

        def measured(number: int, batches: Batches) -> StepResult | Watched:
            if self.skipped < self.warm_up:
                self.skipped += 1
                return launch(number, batches)
            if self._recorder is None:
                self._recorder = Recorder(self.clock, kernels, step.comm, batches)
            with self._recorder:
                outcome = launch(number, batches)
            taken = self._recorder.take()
            if self._last is not None:  # if it is still open, what a GPU waits in between is its own
                self._last.end = taken.begin
            self._last = taken
            return Watched(outcome, lambda: self._close(number, taken))

        vars(step)["launch"] = measured  # this one object's, in place of its class's

    def _close(self, number: int, taken: Taken) -> None:
        account = self._accountant.account(taken)
        self.times.add(account.times)
        self.seconds.append(account.seconds)
        if len(self.traced) < TRACED:
            begin = float(self.clock.seconds([taken.begin], self._zero)[0])
            self.traced.append(Traced(number, begin, account))
