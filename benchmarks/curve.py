"""A learning curve: the course project's size of model on a text by characters, 500 steps of 4,096 tokens.

    python benchmarks/curve.py --data my.txt

trains once as the preset is and once with RoPE, RMSNorm and SwiGLU, draws both and prints their losses.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from record import distgpt, held_out, save

BAR = 1.9  # validation loss on tinyshakespeare, of either
RECIPE = (
    "--preset gpt-mini --tokenizer char --shift-windows --steps 500 --batch-size 16 --seq-len 256 "
    "--schedule cosine --warmup 30 --weight-decay 0.1 --val-fraction 0.1 --eval-every 25"
)
RUNS = {
    "GPT-2's parts": "--lr 1e-3",
    "RoPE, RMSNorm, SwiGLU": "--lr 2e-3 --positions rope --norm rmsnorm --mlp swiglu --no-bias --tied",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="corpus", help="a text; the bundled one if left out")
    parser.add_argument("--runs", type=Path, default=Path("build/curve"), help="folder for the runs")
    parser.add_argument("--picture", type=Path, help="where the picture goes; into that folder if left out")
    parser.add_argument("--out", type=Path, help="JSON file; benchmarks/results/curve-DATE.json if left out")
    args = parser.parse_args()
    found = {name: trained(args.runs / name, args.data, words) for name, words in RUNS.items()}
    picture = args.picture or args.runs / "curves.png"
    distgpt("plot", *(args.runs / name for name in RUNS), "--out", picture, "--title", "")
    save("curve", {"data": Path(args.data).name, "bar": BAR, "recipe": RECIPE, "runs": found}, args.out)


def trained(folder: Path, data: str, words: str) -> dict[str, Any]:
    shutil.rmtree(folder, ignore_errors=True)
    distgpt("train", *RECIPE.split(), *words.split(), "--data", data, "--progress", "plain", "--out", folder)
    losses = held_out(folder)
    below = next((step for step, loss in losses.items() if loss <= BAR), None)
    print(f"{folder.name}: validation loss {min(losses.values()):.4f}; below {BAR} from step {below}")
    return {"settings": words, "val_losses": losses, "first_step_below_the_bar": below}


if __name__ == "__main__":
    main()
