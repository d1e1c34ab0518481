"""What models learn from a text by characters: a learning curve, and what each modern switch brings to it.

    python benchmarks/learning.py curve --data my.txt

trains the course project's size of model, 500 steps of 4,096 tokens, once as the preset is and once with
RoPE, RMSNorm and SwiGLU, draws both and prints their losses. With `--dtypes float32 bfloat16` each in both,
from the same weights and on the same batches, and how far the validation losses lie apart.

    python benchmarks/learning.py ablation --data my.txt

trains a model as GPT-2 is built, then with these three one at a time and together, at the same tokens and
number of parameters (by the width of the MLP), and prints the validation loss and the speed of each. The
variants take turns, seed by seed.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from record import distgpt, held_out, metrics, save

from distgpt.comm.cores import usable_cores
from distgpt.config import DTYPES, ModelConfig
from distgpt.config.presets import preset
from distgpt.measure import jobs
from distgpt.model.model import Architecture

BAR = 1.9  # validation loss on tinyshakespeare, of either curve
APART = 0.005  # relative: how far a dtype's validation loss may lie from the first one's
RECIPE = (
    "--preset gpt-mini --tokenizer char --shift-windows --steps 500 --batch-size 16 --seq-len 256 "
    "--schedule cosine --warmup 30 --weight-decay 0.1 --val-fraction 0.1 --eval-every 50"
)
CURVES = {
    "GPT-2's parts": "--lr 1e-3",
    "RoPE, RMSNorm, SwiGLU": "--lr 2e-3 --positions rope --norm rmsnorm --mlp swiglu --no-bias --tied",
}

BASELINE = ModelConfig(vocab_size=65, seq_len=256, n_layer=4, n_head=4, n_embd=256)
VARIANTS: dict[str, dict[str, Any]] = {
    "as GPT-2": {},
    "RoPE": {"positions": "rope"},
    "RMSNorm": {"norm": "rmsnorm"},
    "SwiGLU": {"mlp": "swiglu"},
    "all three": {"positions": "rope", "norm": "rmsnorm", "mlp": "swiglu"},
}
TRAIN = {"tokenizer": "char", "val_fraction": 0.1, "eval_every": 100, "batch_size": 16}
TRAIN |= {"lr": 1e-3, "min_lr": 1e-4, "bias": True, "norm_gain": True}
MODEL_KEYS = ("seq_len", "n_layer", "n_head", "n_embd", "mlp_width", "positions", "norm", "mlp")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("curve", "ablation"))
    parser.add_argument("--data", default="corpus", help="a text; the bundled one if left out")
    parser.add_argument("--runs", type=Path, help="folder for the runs; build/curve or build/ablation")
    parser.add_argument("--picture", type=Path, help="where the curves go; into that folder if left out")
    parser.add_argument("--curves", nargs="+", default=list(CURVES), choices=CURVES, help="some of them")
    parser.add_argument("--dtypes", nargs="+", default=["float32"], choices=DTYPES, help="of the curves")
    parser.add_argument("--threads", type=int, default=len(usable_cores()), help="of the curves")
    parser.add_argument("--steps", type=int, default=1000, help="of 4,096 tokens, in the ablation")
    parser.add_argument("--seeds", type=int, default=2, help="of the ablation")
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
    models = {name: of_equal_size(replace(BASELINE, **changes)) for name, changes in VARIANTS.items()}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in models}
    for seed in range(1, args.seeds + 1):
        for name, config in models.items():
            folder = args.runs / f"{name.replace(' ', '-')}-{seed}"
            found[name].append(variant(folder, config, args.data, args.steps, seed))
            print(name, found[name][-1], flush=True)
    rows = {name: row(models[name], runs) for name, runs in found.items()}
    print("| model | parameters | best validation loss | at step | training loss at the end | speed |")
    print("| --- " * 6 + "|")
    for name, r in rows.items():
        speed = r["tokens_per_s"] / rows["as GPT-2"]["tokens_per_s"]
        losses = f"{r['best_val_loss']:.3f} | {r['best_step']:.0f} | {r['train_loss']:.3f}"
        print(f"| {name} | {r['parameters']:,} | {losses} | {speed:.2f} × |")
    return {"steps": args.steps, "variants": rows}


def parameters(config: ModelConfig) -> int:
    return Architecture(config).layout.elements


def of_equal_size(config: ModelConfig) -> ModelConfig:
    """With the MLP's width that comes closest to the baseline's number of parameters."""
    widths = (replace(config, mlp_width=width) for width in range(64, 8 * config.n_embd, 4))
    return min(widths, key=lambda c: abs(parameters(c) - parameters(BASELINE)))


def variant(folder: Path, config: ModelConfig, data: str, steps: int, seed: int) -> dict[str, Any]:
    shutil.rmtree(folder, ignore_errors=True)
    shape = {key: getattr(config, key) for key in MODEL_KEYS}
    recipe = {"data": data, "steps": steps, "seed": seed, "warmup": max(1, steps // 20)}
    jobs.train("training", preset("tiny-adamw", {**TRAIN, **shape, **recipe}), folder, [], None, 1)
    lines, losses = metrics(folder), held_out(folder)
    return {
        "best_val_loss": min(losses.values()),
        "best_step": min(losses, key=losses.__getitem__),
        "val_losses": losses,
        "train_loss": statistics.mean(line["loss"] for line in lines[-50:] if "loss" in line),
        "tokens_per_s": statistics.median(line["tokens_per_s"] for line in lines if "tokens_per_s" in line),
    }


def row(config: ModelConfig, runs: list[dict[str, Any]]) -> dict[str, Any]:
    keys = ("best_val_loss", "best_step", "train_loss", "tokens_per_s")
    means = {key: statistics.mean(run[key] for run in runs) for key in keys}
    return {"parameters": parameters(config), "mlp_width": config.mlp_width, **means, "runs": runs}


if __name__ == "__main__":
    main()
