"""How far the bits per byte that --within expects are from those that a run reaches, on texts of all kinds.

    python benchmarks/predicted_bits.py shakespeare.txt code.txt --depths 1 2 --tokens 0.4 1.6

holds out the last tenth of each text, trains every depth on every number of tokens (in millions) by the
laws of distgpt/recipes/scaling.py, and prints what was expected, what came, and their ratio. --tokenizer byte
asks the same of bytes. Runs that are there are not repeated, so a larger grid adds to a smaller one.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

from record import distgpt, metrics, save

from distgpt.core.config import DTYPES
from distgpt.recipes.depth import text_of
from distgpt.recipes.difficulty import difficulty
from distgpt.recipes.scaling import EXPECTED_WITHIN, expected_bits, recipe

HELD_OUT = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tokens", type=float, nargs="+", default=[0.4, 1.6], help="in millions")
    parser.add_argument("--tokenizer", default="auto")
    parser.add_argument("--val-tokens", type=int, default=1 << 16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument("--runs", type=Path, default=Path("build/predicted_bits"))
    parser.add_argument("--out", type=Path, help="JSON file; benchmarks/results/WHAT-DATE.json if left out")
    args = parser.parse_args()
    args.runs.mkdir(parents=True, exist_ok=True)
    points = [point(args, *each) for each in itertools.product(args.texts, args.depths, args.tokens)]
    off = sorted(each["ratio"] for each in points)
    inside = sum(abs(ratio - 1) <= EXPECTED_WITHIN for ratio in off)
    print(f"{inside} of {len(off)} within {EXPECTED_WITHIN:.0%}: {off[0]:.2f} to {off[-1]:.2f} times it")
    save("predicted-bits", {"points": points}, args.out)


def point(args: argparse.Namespace, source: Path, depth: int, millions: float) -> dict[str, Any]:
    """Train one model, unless that is done, and return what was expected of it and what came."""
    train, held_out = halves(args.runs, source)
    given = {"data": str(train), "tokenizer": args.tokenizer}
    text = replace(text_of(given), difficulty=difficulty(train))
    settings = {"tokenizer": args.tokenizer} | recipe(depth, 1e6 * millions, text, given=given)
    folder = args.runs / f"{source.stem}-{args.tokenizer.replace(':', '')}-{depth}-{millions:g}"
    if not (folder / "weights.safetensors").exists():
        more = {name: getattr(args, name) for name in ("val_tokens", "threads", "dtype")}
        more["eval_every"] = max(1, settings["steps"] // 8)
        options = [(f"--{name.replace('_', '-')}", value) for name, value in (settings | more).items()]
        words = itertools.chain(*options, ("--data", train, "--val", held_out, "--out", folder))
        distgpt("train", "--preset", "fast", "--progress", "plain", *words)
    curve = {line["step"]: line["bits_per_byte"] for line in metrics(folder) if "bits_per_byte" in line}
    read = settings["steps"] * settings["batch_size"] * settings["seq_len"]
    expected, came = expected_bits(depth, read, text), min(curve.values())
    print(
        f"{source.stem}, {args.tokenizer}, depth {depth}, {read / 1e6:.2f} M tokens, {read / text.tokens:.1f}"
        f" times the text: expected {expected:.3f}, came {came:.3f}, at the end {curve[max(curve)]:.3f}"
    )
    about = {"text": source.stem, "tokenizer": args.tokenizer, "depth": depth, "tokens": read}
    found = {"expected": expected, "came": came, "ratio": came / expected, "curve": curve}
    return about | {"epochs": read / text.tokens, "difficulty": text.difficulty} | found


def halves(folder: Path, source: Path) -> tuple[Path, Path]:
    """Write a text's two parts, to learn from and to hold out, and return where they are."""
    data = source.read_bytes()
    cut = data.rfind(b"\n", 0, int((1 - HELD_OUT) * len(data))) + 1
    found = folder / f"{source.stem}.train.txt", folder / f"{source.stem}.val.txt"
    for path, part in zip(found, (data[:cut], data[cut:]), strict=True):
        path.write_bytes(part)
    return found


if __name__ == "__main__":
    main()
