"""What kernels without a queue do about one: all work is done when it is called, and nothing is recorded."""

from __future__ import annotations

from collections.abc import Callable

from distgpt.kernels.api import Wire, Work


class Immediate:
    """To be inherited by kernels whose calls return when their work is done."""

    queued = beside = False
    wire: Wire | None = None

    def record(self, work: Work) -> Work:
        return work

    def between(self, act: Work) -> None:
        act()

    def join(self) -> None:
        pass

    def agree(self, gather: Callable[[bytes], list[bytes]]) -> None:
        pass
