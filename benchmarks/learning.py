"""What models learn from a text by characters: a learning curve, and what each modern switch brings to it.

    python benchmarks/learning.py curve --data my.txt

trains the course project's size of model, 500 steps of 4,096 tokens, once as the preset is and once with
RoPE, RMSNorm and SwiGLU, draws both and prints their losses. With `--dtypes float32 bfloat16` each in both,
from the same weights and on the same batches, and how far the validation losses lie apart.

    python benchmarks/learning.py ablation --data texts/train --val texts/val

trains by the recipe of the preset `fast`, without each of its parts, by AdamW without all of them, and by
that with each part alone, at the same tokens. It prints the held-out bits per byte and the speed of each.
The variants take turns, seed by seed. Runs that are there are not repeated.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from pathlib import Path
from typing import Any

from record import distgpt, held_out, metrics, save

from distgpt.core.comm.resources import usable_cores
from distgpt.core.config import DTYPES
from distgpt.core.config.presets import PRESETS

BAR = 1.9  # validation loss on tinyshakespeare, of either curve
APART = 0.005  # relative: how far a dtype's validation loss may lie from the first one's
RECIPE = (
    "--preset gpt-mini --tokenizer char --set shift_windows=true --steps 500 --batch-size 16 --seq-len 256 "
    "--schedule cosine --warmup 30 --weight-decay 0.1 --val-fraction 0.1 --eval-every 50"
)
CURVES = {
    "GPT-2's parts": "--lr 1e-3",
    "RoPE, RMSNorm, SwiGLU": "--lr 2e-3 --positions rope --norm rmsnorm --mlp swiglu --no-bias --tied",
}

# Settings that take a part of the recipe away.
WITHOUT: dict[str, dict[str, Any]] = {
    "Muon": {"optimizer": "adamw", "lr": 3e-3, "beta1": 0.9, "weight_decay": 0.1},
    "rates of their own": {"embedding_lr": 0.0, "head_lr": 0.0, "vector_lr": 0.0},
    "wsd": {"schedule": "cosine"},
    "norm of the embedding, no gains": {"embed_norm": False, "norm_gain": True},
    "norm of q and k": {"qk_norm": False},
    "value embeddings": {"value_embeddings": False},
    "ReLU²": {"mlp": "swiglu"},
    "unit weights, output layer of its own": {"init_weights": "gpt2", "tied": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("curve", "ablation"))
    parser.add_argument("--data", default="corpus", help="a text; the bundled one if left out")
    parser.add_argument("--runs", type=Path, help="folder for the runs; build/curve or build/ablation")
    parser.add_argument("--picture", type=Path, help="where the curves go; into that folder if left out")
    parser.add_argument("--curves", nargs="+", default=list(CURVES), choices=CURVES, help="some of them")
    parser.add_argument("--dtypes", nargs="+", default=["float32"], choices=DTYPES, help="of the curves")
    parser.add_argument("--threads", type=int, default=len(usable_cores()))
    parser.add_argument("--val", help="held-out texts of the ablation")
    parser.add_argument("--tokenizer", default="bpe:8192", help="of the ablation")
    parser.add_argument("--val-tokens", type=int, default=98304, help="of the ablation")
    parser.add_argument("--steps", type=int, default=110, help="of 4,096 tokens, in the ablation")
    parser.add_argument("--seeds", type=int, default=3, help="of the ablation")
    parser.add_argument("--variants", nargs="+", help="some of the ablation's, by name")
    parser.add_argument("--out", type=Path, help="JSON file; benchmarks/results/WHAT-DATE.json if left out")
    args = parser.parse_args()
    args.runs = args.runs or Path("build") / args.what
    args.runs.mkdir(parents=True, exist_ok=True)
    found = curve(args) if args.what == "curve" else ablation(args)
    save(args.what, {"data": Path(args.data).name, **found}, args.out)


def curve(args: argparse.Namespace) -> dict[str, Any]:
    runs: dict[str, dict[str, Any]] = {}
    for name in args.curves:
        words = CURVES[name]
        for dtype in args.dtypes:
            folder = args.runs / (name if len(args.dtypes) == 1 else f"{name}, {dtype}")
            shutil.rmtree(folder, ignore_errors=True)
            more = ("--data", args.data, "--dtype", dtype, "--threads", args.threads)
            distgpt("train", *RECIPE.split(), *words.split(), *more, "--progress", "plain", "--out", folder)
            losses = held_out(folder)
            below = next((step for step, loss in losses.items() if loss <= BAR), None)
            found = {
                "settings": words,
                "dtype": dtype,
                "val_losses": losses,
                "first_step_below_the_bar": below,
            }
            if dtype != args.dtypes[0]:
                found |= apart(runs[f"{name}, {args.dtypes[0]}"]["val_losses"], losses)
            print(f"{folder.name}: {summary(found)}", flush=True)
            runs[folder.name] = found
    picture = args.picture or args.runs / "curves.png"
    distgpt("plot", *(args.runs / name for name in runs), "--out", picture, "--title", "")
    return {"bar": BAR, "bar_apart": APART, "recipe": RECIPE, "runs": runs}


def apart(first: dict[int, float], losses: dict[int, float]) -> dict[str, float]:
    """How far validation losses lie from those of another dtype, relative to them."""
    relative = {step: losses[step] / first[step] - 1 for step in losses}
    return {"apart_at_the_end": relative[max(relative)], "apart_at_most": max(relative.values(), key=abs)}


def summary(run: dict[str, Any]) -> str:
    below = run["first_step_below_the_bar"]
    text = f"validation loss {min(run['val_losses'].values()):.4f}; below {BAR} from step {below}"
    if "apart_at_the_end" not in run:
        return text
    end, most = run["apart_at_the_end"], run["apart_at_most"]
    return f"{text}; {end:+.2%} at the end (bar: {APART:.1%}), {most:+.2%} at most"


def ablation(args: argparse.Namespace) -> dict[str, Any]:
    nothing = {key: value for part in WITHOUT.values() for key, value in part.items()}
    recipe = PRESETS["fast"]
    variants: dict[str, dict[str, Any]] = {"the recipe": {}, "AdamW without all parts": nothing}
    variants |= {f"without {part}": settings for part, settings in WITHOUT.items()}
    for part, settings in WITHOUT.items():
        variants[f"only {part}"] = nothing | {key: recipe.get(key, 0.0) for key in settings}
    variants = {name: variants[name] for name in args.variants or variants}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    for seed in range(1, args.seeds + 1):
        for name, settings in variants.items():
            found[name].append(variant(args, name, settings, seed))
            print(name, found[name][-1], flush=True)
    rows = {name: row(runs) for name, runs in found.items()}
    print("| | bits per byte | speed |\n| --- | --- | --- |")
    fastest = rows[next(iter(rows))]["tokens_per_s"]
    for name, r in rows.items():
        spread = f" ± {r['spread']:.3f}" if args.seeds > 1 else ""
        print(f"| {name} | {r['bits_per_byte']:.3f}{spread} | {r['tokens_per_s'] / fastest:.2f} × |")
    return {"steps": args.steps, "variants": rows}


def variant(args: argparse.Namespace, name: str, settings: dict[str, Any], seed: int) -> dict[str, Any]:
    folder = args.runs / f"{name.replace(' ', '-')}-{seed}"
    if not (folder / "weights.safetensors").exists():
        shutil.rmtree(folder, ignore_errors=True)
        config = args.runs / "variant.toml"
        config.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()))
        words = ["--preset", "fast", "--config", config, "--data", args.data, "--val", args.val]
        words += ["--dtype", args.dtypes[0], "--threads", args.threads, "--steps", args.steps, "--seed", seed]
        words += ["--tokenizer", args.tokenizer, "--val-tokens", args.val_tokens, "--eval-every", 0]
        distgpt("train", *words, "--progress", "plain", "--out", folder)
    lines = metrics(folder)
    return {
        "bits_per_byte": next(line["bits_per_byte"] for line in reversed(lines) if "bits_per_byte" in line),
        "tokens_per_s": statistics.median(line["tokens_per_s"] for line in lines if "tokens_per_s" in line),
    }


def row(runs: list[dict[str, Any]]) -> dict[str, Any]:
    means = {key: statistics.mean(run[key] for run in runs) for key in runs[0]}
    spread = statistics.stdev(run["bits_per_byte"] for run in runs) if len(runs) > 1 else 0.0
    return {**means, "spread": spread, "runs": runs}


if __name__ == "__main__":
    main()
