"""Which way to sum gradients is the fastest here: the first steps try each in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from distgpt.comm.agree import on_root
from distgpt.comm.api import Comm
from distgpt.errors import Say
from distgpt.model.optim import AdamW
from distgpt.model.passes import Ready
from distgpt.training.gradsync.schedules import AtTheEnd
from distgpt.units import duration

WARM_UP = 2  # steps of each way that do not count: on a GPU one compiles, and the next one records
EACH = 3  # steps of each way that count, of which the fastest counts: a save may come between two


class Auto:
    """One of several, by name; all sum alike up to rounding. The same on all ranks at every step."""

    def __init__(
        self,
        comm: Comm,
        names: Sequence[str],
        make: Callable[[str], AtTheEnd],
        say: Say,
        wait: Callable[[], None],
    ) -> None:
        """`wait`: until what was begun is done."""
        self._comm, self._say, self._wait = comm, say, wait
        self._ways = {name: make(name) for name in names}
        self._to_try = list(names) * (WARM_UP + EACH)
        self._seconds: dict[str, list[float]] = {name: [] for name in names}
        self._name, self._begun, self._steps = names[0], 0.0, 0
        self.name = "auto"
        self.is_settled = False

    @property
    def ready(self) -> Ready | None:
        return self._ways[self._name].ready

    def begin(self, step: int) -> None:
        if not self.is_settled:
            self._next()
        self._ways[self._name].begin(step)

    def finish(self, step: int) -> None:
        self._ways[self._name].finish(step)

    def measure(self, optimizer: AdamW) -> None:
        self._ways[self._name].measure(optimizer)

    def share(self, step: int, is_changed: bool) -> None:
        self._ways[self._name].share(step, is_changed)

    def _next(self) -> None:
        """Take the time of the step that has just ended, and another way for the next one."""
        self._wait()
        now = time.perf_counter()
        if self._steps > len(self._seconds) * WARM_UP:
            self._seconds[self._name].append(now - self._begun)
        if self._steps < len(self._to_try):
            self._name, self._begun = self._to_try[self._steps], now
            self._steps += 1
            return
        best = {name: min(seconds) for name, seconds in self._seconds.items()}
        self._name, line = on_root(self._comm, lambda: self._judge(best))
        self.name = self._name
        for name in best:
            if name != self._name:
                self._ways.pop(name).free()
        self.is_settled = True
        self._say(line)

    def _judge(self, best: dict[str, float]) -> tuple[str, str]:
        """By rank 0's clock: a step takes as long on all ranks."""
        name = min(best, key=lambda name: best[name])
        others = ", ".join(f"{other} {duration(seconds)}" for other, seconds in best.items() if other != name)
        return name, f"--grad-sync {name} is the fastest here: {duration(best[name])} a step ({others})"
