"""Learning curves by tokens and by seconds: the points of our run, and a picture beside a peer's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from record import distgpt, metrics

Point = tuple[float, float, float]  # tokens, seconds, loss


def trained(out: Path, *words: object, loss: str = "val_loss") -> list[Point]:
    """Train into `out`. The seconds are the whole command's, from its start, without evaluations."""
    begun = time.perf_counter()
    distgpt("train", *words, "--progress", "plain", "--out", out)
    whole = time.perf_counter() - begun
    points, spent, tokens = list[Point](), 0.0, 0
    for line in metrics(out):
        spent += line.get("step_s", 0.0)
        tokens = line.get("tokens", tokens)
        whole -= line.get("val_s", 0.0)
        if loss in line and tokens:
            points.append((tokens, spent, line[loss]))
    return [(tokens, whole - spent + seconds, value) for tokens, seconds, value in points]


def draw(curves: dict[str, Sequence[Point]], path: Path, loss: str) -> None:
    """Draw each curve twice; the first is the peer's, with an unbroken line."""
    figure = Figure(figsize=(10, 4))
    by_tokens, by_seconds = figure.subplots(1, 2, sharey=True)
    for number, (name, points) in enumerate(curves.items()):
        tokens, seconds, losses = zip(*points, strict=True)
        style = {"marker": "o", "label": name, "linestyle": "--" if number else "-"}
        by_tokens.plot([count / 1e6 for count in tokens], losses, **style)
        by_seconds.plot(seconds, losses, **style)
    by_tokens.set(xlabel="million tokens", ylabel=loss, xlim=(0, None))
    by_seconds.set(xlabel="seconds, without evaluations", xlim=(0, None))
    by_tokens.legend()
    for axes in (by_tokens, by_seconds):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
