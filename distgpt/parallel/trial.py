"""`--grad-sync auto`: several exchanges in turn in the first steps, and then the fastest."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from distgpt.core.base.errors import Say
from distgpt.core.base.formatting import duration
from distgpt.core.comm.agree import on_root
from distgpt.core.comm.api import Comm
from distgpt.core.config import TrainConfig
from distgpt.core.train.sharing import Exchange, OptimizerState, Scales
from distgpt.parallel.choose import exchange_for

WARM_UP = 2  # steps of each that do not count: on a GPU one compiles, and the next one records
EACH = 3  # steps of each that count, of which the fastest counts: a save may come between two


class Trial(Exchange):
    """Uses one of several exchanges, which sum alike up to rounding. All ranks use the same at every step."""

    def __init__(
        self,
        comm: Comm,
        names: Sequence[str],
        make: Callable[[str], Exchange],
        say: Say,
        wait: Callable[[], None],
    ) -> None:
        """`wait` returns when all that was queued is done."""
        self._comm, self._say, self._wait = comm, say, wait
        self._exchanges = {name: make(name) for name in names}
        self._to_try = list(names) * (WARM_UP + EACH)
        self._seconds: dict[str, list[float]] = {name: [] for name in names}
        self._name, self._begun, self._steps = names[0], 0.0, 0
        self.name = "auto"
        self.is_final = False

    def before_backward(self, step: int) -> None:
        if not self.is_final:
            self._next()
        self._current.before_backward(step)
        self.ready = self._current.ready

    def sum_gradients(self, step: int) -> None:
        self._current.sum_gradients(step)

    def scales(self, counted: float) -> Scales:
        return self._current.scales(counted)

    @property
    def _current(self) -> Exchange:
        return self._exchanges[self._name]

    def _next(self) -> None:
        """Take the time of the step that has just ended, and another exchange for the next one."""
        self._wait()
        now = time.perf_counter()
        if self._steps > len(self._seconds) * WARM_UP:
            self._seconds[self._name].append(now - self._begun)
        if self._steps < len(self._to_try):
            self._name, self._begun = self._to_try[self._steps], now
            self._steps += 1
            return
        best = {name: min(seconds) for name, seconds in self._seconds.items()}
        self._name, line = on_root(self._comm, lambda: self._pick_fastest(best))
        self.name = self._current.name
        self._exchanges = {self._name: self._exchanges[self._name]}
        self.is_final = True
        self._say(line)

    def _pick_fastest(self, best: dict[str, float]) -> tuple[str, str]:
        """Return the name of the fastest by rank 0's clock, and a line that says so."""
        name = min(best, key=lambda name: best[name])
        others = ", ".join(f"{other} {duration(seconds)}" for other, seconds in best.items() if other != name)
        return name, f"--grad-sync {name} is the fastest here: {duration(best[name])} a step ({others})"


def candidates(comm: Comm, t: TrainConfig, on_gpu: bool) -> list[str]:
    """Return what may be the fastest, by how the ranks lie on nodes. Collective."""
    most, has_threads = comm.allreduce_max(comm.local_size), not comm.allreduce_max(not comm.is_threadsafe)
    if t.reproducible_parts:
        return ["allreduce"]
    if on_gpu and comm.queued:
        return ["allreduce", "overlapped"]
    if on_gpu and t.gradient_dtype != "float32":
        return ["allreduce"]
    if on_gpu or most == comm.size:
        return ["allreduce", "chunked"]
    return ["allreduce", *["overlapped"] * has_threads, *["hierarchical"] * (most > 1)]


def make(comm: Comm, state: OptimizerState, t: TrainConfig, say: Say) -> Exchange:
    """Return the exchange that tries all candidates, or the only candidate. Collective."""
    k = state.optimizer.model.kernels
    names = candidates(comm, t, k.capabilities.is_async)

    def named(name: str) -> Exchange:
        return exchange_for(comm, state, replace(t, grad_sync=name), say)

    if len(names) > 1:

        def wait() -> None:
            k.to_host(state.optimizer.norm)

        return Trial(comm, names, named, say, wait)
    say(f"--grad-sync auto: {names[0]}, the only way to try here")
    return named(names[0])
