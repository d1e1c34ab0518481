"""What kernels without a queue do about one: all work is done when it is called, and nothing is recorded."""

from __future__ import annotations

from collections.abc import Callable

from distgpt.kernels.api import Work


class Immediate:
    """Half of such kernels."""

    def record(self, work: Work) -> Work:
        return work

    def between(self, act: Work) -> None:
        act()

    def agree(self, gather: Callable[[bytes], list[bytes]]) -> None:
        pass
