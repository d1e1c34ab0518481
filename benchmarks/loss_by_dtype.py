"""Whether bfloat16 costs loss: presets trained in float32 and in bfloat16, from the same seeds and batches.

    python benchmarks/loss_by_dtype.py --runs tiny=corpus:600
    python benchmarks/loss_by_dtype.py --runs fast=texts/train:110 sprint=texts/train:110 --val texts/val

Each of `--runs` is PRESET=TEXT:STEPS. Without --val a tenth of the text is held out. Prints the lowest
held-out bits per byte of each seed and their difference: a short text is learned by heart before a run ends.
Runs that are there are not repeated.
"""

from __future__ import annotations

import argparse
import statistics
import tomllib
from pathlib import Path
from typing import Any

from record import distgpt, metrics, save

from distgpt.core.saved.rundir import RunDirectory

HELD_OUT = 0.1
DTYPES = ("float32", "bfloat16")
MAY_DIFFER = {"dtype"}  # within a seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", nargs="+", required=True, metavar="PRESET=TEXT:STEPS")
    parser.add_argument("--val", help="held-out texts, for all of them")
    parser.add_argument("--val-tokens", type=int, default=98304)
    parser.add_argument("--tokenizer", default="bpe:8192", help="beside --val")
    parser.add_argument("--evaluations", type=int, default=12, help="of a run; the lowest one counts")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("build/loss_by_dtype"))
    parser.add_argument("--out", type=Path, help="JSON file; benchmarks/results/WHAT-DATE.json if left out")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    save("loss-by-dtype", {"presets": [compared(args, each) for each in args.runs]}, args.out)


def compared(args: argparse.Namespace, asked: str) -> dict[str, Any]:
    """Train one preset in both types from each seed; return what came of it."""
    preset, _, rest = asked.partition("=")
    text, _, steps = rest.rpartition(":")
    seeds = []
    for seed in range(1, args.seeds + 1):
        runs = {dtype: trained(args, preset, text, int(steps), seed, dtype) for dtype in DTYPES}
        refuse_other_differences(*runs.values())
        curves = {dtype: held_out_bits(run) for dtype, run in runs.items()}
        lowest = {dtype: min(curve.values()) for dtype, curve in curves.items()}
        difference = lowest["bfloat16"] - lowest["float32"]
        seeds.append({"seed": seed, "lowest": lowest, "difference": difference, "curves": curves})
        print(f"{preset}, {steps} steps, seed {seed}: {lowest}, {difference:+.4f}", flush=True)
    mean = statistics.mean(each["difference"] for each in seeds)
    spread = statistics.stdev(each["lowest"]["float32"] for each in seeds) if args.seeds > 1 else 0.0
    print(f"{preset}: bfloat16 differs by {mean:+.4f}; seeds of float32 by {spread:.4f} (standard deviation)")
    about = {"preset": preset, "text": Path(text).name, "steps": int(steps), "seeds": seeds}
    return about | {"mean_difference": mean, "spread_of_float32": spread}


def trained(
    args: argparse.Namespace, preset: str, text: str, steps: int, seed: int, dtype: str
) -> RunDirectory:
    """Return a run. Train it, unless that is done."""
    folder = args.folder / f"{preset}-{steps}-{seed}-{dtype}"
    if not (folder / "weights.safetensors").exists():
        held_out = ["--val-fraction", HELD_OUT]
        if args.val:
            held_out = ["--val", args.val, "--tokenizer", args.tokenizer, "--val-tokens", args.val_tokens]
        words = ["--preset", preset, "--data", text, *held_out, "--steps", steps, "--seed", seed]
        words += ["--eval-every", max(1, steps // args.evaluations), "--threads", args.threads]
        distgpt("train", *words, "--dtype", dtype, "--progress", "plain", "--out", folder)
    return RunDirectory(folder)


def held_out_bits(run: RunDirectory) -> dict[int, float]:
    lines = metrics(run.path)
    return {line["step"]: line["bits_per_byte"] for line in lines if "bits_per_byte" in line}


def refuse_other_differences(*runs: RunDirectory) -> None:
    """End the program if the runs' own settings differ in more than the type."""
    first, second = ({**toml["model"], **toml["train"]} for toml in map(settings, runs))
    differing = {name for name in first if first[name] != second[name]}
    if differing != MAY_DIFFER:
        raise SystemExit(f"the runs differ in {differing}")


def settings(run: RunDirectory) -> dict[str, Any]:
    return tomllib.loads(run.config.read_text())


if __name__ == "__main__":
    main()
