r"""Compare the recipe of `fast` with nanoGPT's demo for CPUs: validation loss by tokens and by seconds.

    git clone https://github.com/karpathy/nanoGPT /elsewhere/nanoGPT
    python benchmarks/learning_beside_nanogpt.py --text tinyshakespeare.txt --nanogpt /elsewhere/nanoGPT \
        --peer-python PY

Both train 4 layers of 128 with a context of 64 on characters; the last 10% are held out. nanoGPT uses its
README's settings for a CPU. PY is a Python with PyTorch. nanoGPT's seconds count its steps, distgpt's the
whole command, both without evaluations.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from curves import Point, by_peer, draw, learning_arguments, points_in, trained
from record import end_with_errors, save

CONTEXT, BATCH, PEER_BATCH = 64, 16, 12
SIZE = f"--block_size={CONTEXT} --n_layer=4 --n_head=4 --n_embd=128 --dropout=0.0 --batch_size={PEER_BATCH}"
DEMO = f"{SIZE} --max_iters=2000 --lr_decay_iters=2000 --device=cpu --log_interval=1"


def main() -> None:
    args = learning_arguments(
        __doc__,
        Path("build/nanogpt"),
        text={"type": Path, "required": True},
        nanogpt={"type": Path, "required": True},
        compile={"action": "store_true", "help": "let PyTorch compile nanoGPT"},
        steps={"type": int, "default": 180, "help": f"steps of distgpt, {BATCH * CONTEXT} tokens each"},
        dtype={"default": "bfloat16"},
        wanted={"type": float, "default": 1.88, "help": "the validation loss that the demo promises"},
    )
    curves: dict[str, list[Point]] = {"nanoGPT": nanogpt(args)}
    for seed in range(1, args.rounds + 1):
        curves[f"distgpt, seed {seed}"] = ours(args, seed)
    print(f"| | end | tokens | seconds | seconds to {args.wanted} |")
    print("| --- " * 5 + "|")
    for name, points in curves.items():
        tokens, seconds, loss = points[-1]
        reached = next((f"{at[1]:.1f}" for at in points if at[2] <= args.wanted), "not reached")
        print(f"| {name} | {loss:.3f} | {tokens:,} | {seconds:.1f} | {reached} |")
    draw(curves, args, "validation loss")
    save(
        "learning-beside-nanogpt", {"dtype": args.dtype, "compile": args.compile, "curves": curves}, args.out
    )


def nanogpt(args: Any) -> list[Point]:
    """Train nanoGPT; its losses are of 200 random batches."""
    data = args.nanogpt / "data" / "shakespeare_char"
    shutil.copyfile(args.text, data / "input.txt")
    by_peer(args, data, "prepare.py")
    words = ["train.py", "config/train_shakespeare_char.py", *DEMO.split(), f"--compile={args.compile}"]
    text = by_peer(args, args.nanogpt, *words)
    loss, time = r"step (\d+): train loss [\d.]+, val loss ([\d.]+)", r"iter \d+: .* time ([\d.]+)ms"
    return points_in(text, loss, time, PEER_BATCH * CONTEXT)


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
