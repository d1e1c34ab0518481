"""What each modern switch brings: the same tokens, the same number of parameters, one change at a time.

    python benchmarks/ablation.py --data my.txt

trains a model as GPT-2 is built, then with RoPE, RMSNorm and SwiGLU, one at a time and together, and prints
the validation loss and the speed of each. The MLP of every variant is made as wide as it takes to have the
baseline's number of parameters; the variants take turns, seed by seed.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from record import held_out, metrics, save

from distgpt.config import ModelConfig
from distgpt.config.presets import preset
from distgpt.measure import jobs
from distgpt.model.model import Architecture

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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="corpus", help="a text; the bundled one if left out")
    parser.add_argument("--steps", type=int, default=1000, help="of 4,096 tokens")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument(
        "--out", type=Path, help="JSON file; benchmarks/results/ablation-DATE.json if left out"
    )
    parser.add_argument("--keep", type=Path, help="folder to keep the runs in, for distgpt plot")
    args = parser.parse_args()
    models = {name: of_equal_size(replace(BASELINE, **changes)) for name, changes in VARIANTS.items()}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in models}
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(1, args.seeds + 1):
            for name, config in models.items():
                folder = Path(args.keep or scratch) / f"{name.replace(' ', '-')}-{seed}"
                found[name].append(trained(folder, config, args.data, args.steps, seed))
                print(name, found[name][-1], flush=True)
    rows = {name: row(models[name], runs) for name, runs in found.items()}
    print(table(rows))
    save("ablation", {"data": Path(args.data).name, "steps": args.steps, "variants": rows}, args.out)


def parameters(config: ModelConfig) -> int:
    return Architecture(config).layout.size


def of_equal_size(config: ModelConfig) -> ModelConfig:
    """With the MLP's width that comes closest to the baseline's number of parameters."""
    widths = (replace(config, mlp_width=width) for width in range(64, 8 * config.n_embd, 4))
    return min(widths, key=lambda c: abs(parameters(c) - parameters(BASELINE)))


def trained(folder: Path, config: ModelConfig, data: str, steps: int, seed: int) -> dict[str, Any]:
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    shape = {key: getattr(config, key) for key in MODEL_KEYS}
    recipe = {"data": data, "steps": steps, "seed": seed, "warmup": max(1, steps // 20)}
    jobs.train("training", preset("tiny", {**TRAIN, **shape, **recipe}), folder, [], None, 1)
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


def table(rows: dict[str, dict[str, Any]]) -> str:
    first = next(iter(rows.values()))
    columns = ("model", "parameters", "best validation loss", "at step", "training loss at the end", "speed")
    cells = [
        f"{name} | {r['parameters']:,} | {r['best_val_loss']:.3f} | {r['best_step']:.0f} | "
        f"{r['train_loss']:.3f} | {r['tokens_per_s'] / first['tokens_per_s']:.2f} ×"
        for name, r in rows.items()
    ]
    return "\n".join(f"| {line} |" for line in (" | ".join(columns), " | ".join(["---"] * 6), *cells))


if __name__ == "__main__":
    main()
