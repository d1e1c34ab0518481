"""Learning curves of distgpt and another program, by tokens and by seconds, and a plot of both."""

from __future__ import annotations

import itertools
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from record import arguments, distgpt, metrics

from distgpt.show.plot import FONTS, MARKS, series_colour, style

Point = tuple[float, float, float]  # tokens, seconds, loss


def learning_arguments(about: str | None, runs: Path, **options: Any) -> Any:
    """Return the command line of a comparison: its own options and the common ones."""
    options["peer-python"] = {"required": True}
    options["dtype"] = {**options.get("dtype", {}), "choices": ("float32", "bfloat16")}
    options["picture"] = {"type": Path, "help": "where the curves go; into --runs if left out"}
    options["runs"] = {"type": Path, "default": runs}
    args = arguments(about, **options)
    args.runs.mkdir(parents=True, exist_ok=True)
    return args


def trained(out: Path, *words: object, loss: str = "val_loss") -> list[Point]:
    """Train into `out` and return the points. Seconds are of the whole command without evaluations."""
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


def by_peer(args: Any, folder: Path, *words: object, env: Mapping[str, str] | None = None) -> str:
    line = [args.peer_python, *map(str, words)]
    ended = subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True)
    (args.runs / "peer.log").write_text(ended.stdout + ended.stderr)
    if ended.returncode:
        raise SystemExit(f"{' '.join(line[:3])}: {ended.stderr[-2000:]}")
    return ended.stdout


def points_in(text: str, loss: str, milliseconds: str, tokens: int) -> list[Point]:
    """Return the points in the output, given patterns of a step's loss and of its time."""
    took = [float(each) / 1e3 for each in re.findall(milliseconds, text)]
    usual = sorted(took)[len(took) // 2]  # replaces steps that evaluate or compile
    after = list(itertools.accumulate(min(each, 3 * usual) for each in took))
    found = ((int(step), float(value)) for step, value in re.findall(loss, text))
    return [(step * tokens, after[step - 1], value) for step, value in found if step]


def draw(curves: dict[str, Sequence[Point]], args: Any, loss: str, where: str = "") -> None:
    """Draw each curve by tokens and by seconds. The first one, the other program's, is solid."""
    with style(**FONTS):
        figure: Any = Figure(figsize=(9, 4), layout="constrained")
        by_tokens, by_seconds = figure.subplots(1, 2, sharey=True)
        for number, (name, points) in enumerate(curves.items()):
            tokens, seconds, losses = zip(*points, strict=True)
            how = {"color": series_colour(number), "linestyle": "--" if number else "-", "label": name}
            by_tokens.plot([count / 1e6 for count in tokens], losses, **MARKS | how)
            by_seconds.plot(seconds, losses, **MARKS | how)
        by_tokens.set(title=f"{loss} by million tokens", xlim=(0, None))
        by_seconds.set(title=f"by seconds{where}, without evaluations", xlim=(0, None))
        figure.legend(*by_tokens.get_legend_handles_labels(), loc="outside lower center", ncols=2)
        figure.savefig(args.picture or args.runs / "learning.png", dpi=150)
