"""Bar charts, drawn like the line charts of distgpt.show.charts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distgpt.show.charts import LINE, lines, series_colour


@dataclass(frozen=True)
class Bar:
    """A bar with a label on its left and a text at its end."""

    label: str
    value: float
    text: str


@dataclass(frozen=True)
class BarChart:
    """Horizontal bars from top to bottom."""

    title: str
    description: str
    unit: str
    bars: Sequence[Bar]

    def draw(self, axes: Any) -> float:
        """Draw into axes; return the height that this takes in inches."""
        values = np.array([bar.value for bar in self.bars], float)
        values[~np.isfinite(values)] = 0
        places = np.arange(len(values))
        drawn = axes.barh(places, values, 0.62, color=series_colour(0))
        labels = [lines(bar.label, LINE // 2) for bar in self.bars]
        if self.bars:
            axes.bar_label(drawn, [lines(bar.text, LINE // 2) for bar in self.bars], padding=8)
        axes.set_yticks(places, labels)
        axes.invert_yaxis()
        axes.xaxis.set_visible(False)
        axes.grid(False)
        axes.set_title(lines(self.unit))
        return 0.9 + 0.25 * len(places) + 0.2 * sum(label.count("\n") + 1 for label in labels)
