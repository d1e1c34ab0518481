r"""The recipe of `fast` beside nanoGPT's demo for CPUs: validation loss by tokens and by seconds.

    git clone https://github.com/karpathy/nanoGPT /elsewhere/nanoGPT
    python benchmarks/learning_beside_nanogpt.py --text tinyshakespeare.txt --nanogpt /elsewhere/nanoGPT \
        --peer-python PY

Both train 4 layers of 128 with a context of 64 on the text's characters; the last tenth is held out. nanoGPT
takes the settings that its README gives for a CPU. PY is a Python with PyTorch. nanoGPT's seconds are those
of its steps, ours those of the whole command, both without evaluations.
"""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from curves import Point, draw, trained
from record import arguments, end_with_errors, save

CONTEXT, BATCH, PEER_BATCH = 64, 16, 12
SIZE = f"--block_size={CONTEXT} --n_layer=4 --n_head=4 --n_embd=128 --dropout=0.0 --batch_size={PEER_BATCH}"
DEMO = f"{SIZE} --max_iters=2000 --lr_decay_iters=2000 --device=cpu --log_interval=1"


def main() -> None:
    args = arguments(
        __doc__,
        text={"type": Path, "required": True},
        nanogpt={"type": Path, "required": True},
        **{"peer-python": {"required": True}},
        compile={"action": "store_true", "help": "let PyTorch compile nanoGPT"},
        steps={"type": int, "default": 180, "help": f"of ours, of {BATCH * CONTEXT} tokens each"},
        dtype={"default": "bfloat16", "choices": ("float32", "bfloat16")},
        wanted={"type": float, "default": 1.88, "help": "the validation loss that the demo promises"},
        picture={"type": Path, "help": "where the curves go; into --runs if left out"},
        runs={"type": Path, "default": Path("build/nanogpt")},
    )
    args.runs.mkdir(parents=True, exist_ok=True)
    curves: dict[str, list[Point]] = {"nanoGPT": nanogpt(args)}
    for seed in range(1, args.rounds + 1):
        curves[f"distgpt, seed {seed}"] = ours(args, seed)
    print(f"| | end | tokens | seconds | seconds to {args.wanted} |")
    print("| --- " * 5 + "|")
    for name, points in curves.items():
        tokens, seconds, loss = points[-1]
        reached = next((f"{at[1]:.1f}" for at in points if at[2] <= args.wanted), "not reached")
        print(f"| {name} | {loss:.3f} | {tokens:,} | {seconds:.1f} | {reached} |")
    draw(curves, args.picture or args.runs / "learning.png", "validation loss")
    save(
        "learning-beside-nanogpt", {"dtype": args.dtype, "compile": args.compile, "curves": curves}, args.out
    )


def nanogpt(args: Any) -> list[Point]:
    """Train as nanoGPT does; its losses of 200 random batches."""
    data = args.nanogpt / "data" / "shakespeare_char"
    shutil.copyfile(args.text, data / "input.txt")
    run(args, data, "prepare.py")
    words = ["train.py", "config/train_shakespeare_char.py", *DEMO.split(), f"--compile={args.compile}"]
    text = run(args, args.nanogpt, *words)
    losses = re.findall(r"step (\d+): train loss [\d.]+, val loss ([\d.]+)", text)
    took = {int(step): float(ms) / 1e3 for step, ms in re.findall(r"iter (\d+): .* time ([\d.]+)ms", text)}
    usual = sorted(took.values())[len(took) // 2]  # in place of steps that evaluate or compile
    after = list(itertools.accumulate(min(took[step], 3 * usual) for step in sorted(took)))
    return [
        (int(step) * PEER_BATCH * CONTEXT, after[int(step) - 1], float(loss))
        for step, loss in losses
        if step != "0"
    ]


def run(args: Any, folder: Path, *words: str) -> str:
    line = [args.peer_python, *words]
    ended = subprocess.run(line, cwd=folder, capture_output=True, text=True)
    if ended.returncode:
        sys.exit(f"{' '.join(line[:2])}: {ended.stderr[-2000:]}")
    return ended.stdout


def ours(args: Any, seed: int) -> list[Point]:
    text, out = args.text.read_text(encoding="utf-8"), args.runs / f"seed-{seed}"
    files = {part: args.runs / f"{part}.txt" for part in ("train", "val")}
    border = int(0.9 * len(text))
    files["train"].write_text(text[:border], encoding="utf-8")
    files["val"].write_text(text[border:], encoding="utf-8")
    size = ("--n-embd", 128, "--seq-len", CONTEXT, "--batch-size", BATCH, "--tokenizer", "char")
    texts = ("--data", files["train"], "--val", files["val"], "--val-tokens", 1 << 16)
    how = ("--steps", args.steps, "--warmup", 20, "--lr", 0.05, "--eval-every", 20, "--seed", seed)
    return trained(out, "--preset", "fast", *size, *texts, *how, "--dtype", args.dtype)


if __name__ == "__main__":
    end_with_errors(main)
