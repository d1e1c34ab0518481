"""How the loss falls with the size of a model and with the tokens it has read: the laws behind --within.

    python benchmarks/scaling_laws.py --data shards --depths 1 2 3 --tokens 0.2 0.4 0.8

trains every depth on every number of tokens (in millions), each run with its own schedule by the laws of
distgpt/recipes/scaling.py. Then it fits

    bits per byte = E + A / N^a + B / D^b

with N the parameters of the layers' matrices, and D the tokens: once to the runs that begin with pairs of
tokens, and once to the longer ones. It prints what belongs into distgpt/recipes/scaling.py, and draws it.
Runs that are there are not repeated, and count too: a larger grid adds, and so does --also with finished
runs of --depth or --within. Sizes as few as these do not tell E and a apart, so a is given.
"""

from __future__ import annotations

import argparse
import itertools
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
from record import distgpt, metrics, save

from distgpt.core.config import DTYPES
from distgpt.corpora.shards import ShardTokens, read_manifest
from distgpt.recipes.scaling import PAIRS_UP_TO, Text, matrices, recipe

EXPONENTS = np.arange(0.05, 0.401, 0.005)  # of the tokens, to try; few points would take far larger ones


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="shards with a part for validation")
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--tokens", type=float, nargs="+", default=[0.2, 0.4, 0.8], help="in millions")
    parser.add_argument("--also", type=Path, nargs="+", default=[], help="runs by the dial that count too")
    parser.add_argument("--exponent", type=float, default=0.3, help="a, of the parameters")
    parser.add_argument("--val-tokens", type=int, default=1 << 16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument("--runs", type=Path, default=Path("build/scaling_laws"))
    parser.add_argument("--picture", type=Path, help="where the curves go; into that folder if left out")
    parser.add_argument("--out", type=Path, help="JSON file; benchmarks/results/WHAT-DATE.json if left out")
    args = parser.parse_args()
    args.runs.mkdir(parents=True, exist_ok=True)
    there = (path.parent.name for path in args.runs.glob("depth*-*/weights.safetensors"))
    known = {tuple(map(int, name.removeprefix("depth").split("-"))) for name in there}
    asked = {(depth, round(1e6 * tokens)) for depth in args.depths for tokens in args.tokens}
    points = [point(args, *each) for each in sorted(known | asked, key=lambda each: each[::-1])]
    points += [
        found(run, tomllib.loads((run / "config.toml").read_text())["model"]["n_layer"]) for run in args.also
    ]
    laws = {}
    for name, short in (("PAIRS_LAW", True), ("LAW", False)):
        own = [each for each in points if (each["tokens"] <= PAIRS_UP_TO) is short]
        laws[name] = law = fit(own, args.exponent)
        for each in own:
            each["fitted"] = float(predicted(law, each["parameters"], each["tokens"]))
            print("depth {depth}, {tokens:,} tokens: {bits_per_byte:.3f}, law {fitted:.3f}".format(**each))
        print(f"{name} =", {key: round(value, 4) for key, value in law.items()})
    draw(points, laws, args.picture or args.runs / "laws.png")
    save("scaling-laws", {"laws": laws, "points": points}, args.out)


def point(args: argparse.Namespace, depth: int, tokens: int) -> dict[str, Any]:
    """Train one model, unless that is done."""
    manifest = read_manifest(args.data)
    text = Text(len(ShardTokens(args.data, manifest, "train")), manifest.vocab_size)
    folder = args.runs / f"depth{depth}-{tokens}"
    settings = recipe(depth, tokens, text)
    if not (folder / "weights.safetensors").exists():
        options = [(f"--{name.replace('_', '-')}", value) for name, value in settings.items()]
        more = ("--val-tokens", args.val_tokens, "--threads", args.threads, "--dtype", args.dtype)
        words = itertools.chain(*options, more, ("--data", args.data, "--out", folder))
        distgpt("train", "--preset", "fast", "--progress", "plain", *words)
    return found(folder, depth) | {"settings": settings}


def found(run: Path, depth: int) -> dict[str, Any]:
    """Return how many tokens a finished run has read, and its bits per byte."""
    last: dict[str, Any] = {}
    for line in metrics(run):
        last |= line
    return {
        "depth": depth,
        "parameters": matrices(depth),
        "tokens": last["tokens"],
        "bits_per_byte": last["bits_per_byte"],
        "tokens_per_s": last["tokens_per_s"],
    }


def fit(points: list[dict[str, Any]], a: float) -> dict[str, float]:
    """Return the law of the least squared relative error: b by trying, E, A and B by least squares."""
    keys = ("parameters", "tokens", "bits_per_byte")
    n, d, loss = (np.array([p[key] for p in points], float) for key in keys)

    def attempt(b: float) -> tuple[float, dict[str, float]]:
        x = np.stack([np.ones_like(n), n**-a, d**-b], axis=1) / loss[:, None]
        found, *_ = np.linalg.lstsq(x, np.ones_like(n), rcond=None)
        law = dict(zip(("E", "A", "B"), map(float, found), strict=True)) | {"a": a, "b": float(b)}
        return float(np.sum((x @ found - 1) ** 2)) if min(found) > 0 else np.inf, law

    return min(map(attempt, EXPONENTS), key=lambda each: each[0])[1]


def predicted(law: dict[str, float], n: Any, d: Any) -> Any:
    return law["E"] + law["A"] / n ** law["a"] + law["B"] / d ** law["b"]


def draw(points: list[dict[str, Any]], laws: dict[str, dict[str, float]], picture: Path) -> None:
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(7, 4.2), layout="constrained")).subplots()
    least, most = (edge(p["tokens"] for p in points) for edge in (min, max))
    stretches = {
        "PAIRS_LAW": np.geomspace(least / 1.5, PAIRS_UP_TO, 50),
        "LAW": np.geomspace(PAIRS_UP_TO, 3 * most, 50),
    }
    for color, depth in enumerate(sorted({p["depth"] for p in points})):
        own = [p for p in points if p["depth"] == depth]
        for name, tokens in stretches.items():
            label = f"depth {depth}" if name == "LAW" else None
            curve = predicted(laws[name], own[0]["parameters"], tokens)
            axes.plot(tokens, curve, color=f"C{color}", label=label)
        dots = zip(*((p["tokens"], p["bits_per_byte"]) for p in own), strict=True)
        axes.plot(*dots, "o", color=f"C{color}")
    axes.set(xscale="log", xlabel="tokens", ylabel="held-out bits per byte")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    main()
