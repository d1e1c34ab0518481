"""The charts that reports are made of, by the names that others use; and a chart as a file of its own."""

from distgpt.show.reporting.bars import Bar, BarChart, StackedBars
from distgpt.show.reporting.canvas import Chart
from distgpt.show.reporting.lines import LineChart, Series

__all__ = ["Bar", "BarChart", "Chart", "LineChart", "Series", "StackedBars", "standalone"]


def standalone(chart: Chart) -> str:
    """An .svg file of its own, with its title, and with a background and colours for light and for dark."""
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + chart.svg(alone=True) + "\n"
