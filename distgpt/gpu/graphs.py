"""Recorded work that is launched as one, with calls in between."""

from __future__ import annotations

from typing import Any

from distgpt.gpu.api import Work


class Graphs:
    """Recorded work in parts, and what is called behind each part but the last one."""

    def __init__(self, cut: list[tuple[Any, Work]], last: Any) -> None:
        self._cut, self._last = cut, last

    def launch(self, stream: Any) -> None:
        for graph, act in self._cut:
            graph.launch(stream)
            act()
        self._last.launch(stream)
