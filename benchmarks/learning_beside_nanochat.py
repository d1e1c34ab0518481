r"""Compare the preset `sprint` with nanochat: held-out bits per byte by tokens and by seconds.

    git clone https://github.com/karpathy/nanochat /elsewhere/nanochat
    python benchmarks/learning_beside_nanochat.py --docs DIR --nanochat /elsewhere/nanochat \
        --peer-python PY

DIR has train/docs.jsonl and val/docs.jsonl; PY is a Python with nanochat's packages. Each program trains a
tokenizer of 8,192 entries, then 4 layers of 256 with a context of 512 and 4,096 tokens per step. nanochat
uses its own recipe, compiled. Its seconds count only steps, without compilation. distgpt's seconds count the
whole command, including startup and initial weights, without evaluations.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from curves import Point, by_peer, draw, learning_arguments, points_in, trained
from record import distgpt, end_with_errors, save

ENTRIES, TOKENS = 8192, 4096
# nanochat crops documents that are longer than its context and skips the rest. It also chooses the shortest,
# so it would score the beginnings of a few short documents. It loses less of pieces of half a context.
PIECE = 900  # characters
PREPARE = """
import json, sys
from pathlib import Path
import pyarrow, pyarrow.parquet
docs, out, size = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
def texts(part):
    whole = [json.loads(line)["text"] for line in (docs / part / "docs.jsonl").open()]
    return [text[start : start + size] for text in whole for start in range(0, len(text), size)]
train = texts("train")
for number, part in enumerate((train[0::2], train[1::2], texts("val"))):
    table = pyarrow.table({"text": part})
    pyarrow.parquet.write_table(table, out / f"shard_{number:05d}.parquet", row_group_size=512)
"""


def main() -> None:
    args = learning_arguments(
        __doc__,
        Path("build/nanochat"),
        rounds=1,
        docs={"type": Path, "required": True},
        nanochat={"type": Path, "required": True},
        steps={"type": int, "default": 330},
        ours={"type": int, "nargs": "+", "default": [220, 330], "help": "lengths of our runs"},
        **{"held-out": {"type": int, "default": 60 * TOKENS, "help": "tokens of an evaluation"}},
        dtype={"default": "float32"},
    )
    curves: dict[str, list[Point]] = {"nanochat": nanochat(args)}  # one seed
    for seed in range(1, args.rounds + 1):
        for steps in args.ours:
            curves[f"distgpt, {steps} steps" + f", seed {seed}" * (args.rounds > 1)] = ours(args, steps, seed)
    print("| | tokens | bits per byte at the end | seconds | × nanochat's |")
    print("| --- " * 5 + "|")
    for name, points in curves.items():
        tokens, seconds, bits = points[-1]
        ratio = seconds / curves["nanochat"][-1][1]
        print(f"| {name} | {tokens:,} | {bits:.3f} | {seconds:.0f} | {ratio:.2f} |")
    draw(curves, args, "held-out bits per byte")
    save("learning-beside-nanochat", {"dtype": args.dtype, "curves": curves}, args.out)


def ours(args: Any, steps: int, seed: int) -> list[Point]:
    bpe, out = args.runs / "bpe.json", args.runs / f"{steps}-{seed}"
    if not bpe.exists():
        distgpt("tokenizer", "train", args.docs / "train", "--vocab-size", ENTRIES, "--out", bpe)
    texts = ("--data", args.docs / "train", "--val", args.docs / "val", "--tokenizer", bpe)
    how = ("--steps", steps, "--seed", seed, "--dtype", args.dtype)
    evaluations = ("--eval-every", 110, "--val-tokens", args.held_out)
    return trained(out, "--preset", "sprint", *texts, *how, *evaluations, loss="bits_per_byte")


def nanochat(args: Any) -> list[Point]:
    folder = args.runs.absolute() / "base"
    env = {**os.environ, "NANOCHAT_BASE_DIR": str(folder), "NANOCHAT_DTYPE": args.dtype}
    env.pop("PYTHONPATH", None)
    data = folder / "base_data_climbmix"
    if not data.exists():
        data.mkdir(parents=True)
        by_peer(args, args.nanochat, "-c", PREPARE, args.docs.absolute(), data, PIECE, env=env)
        by_peer(args, args.nanochat, "-m", "scripts.tok_train", "--vocab-size", ENTRIES, env=env)
    sizes = ("--depth=4", "--max-seq-len=512", "--device-batch-size=8", f"--total-batch-size={TOKENS}")
    evaluations = ("--eval-every=110", f"--eval-tokens={args.held_out}", "--core-metric-every=-1")
    steps = (f"--num-iterations={args.steps}", "--sample-every=-1", "--window-pattern=L")
    words = ("-m", "scripts.base_train", *sizes, *evaluations, *steps)
    text = by_peer(args, args.nanochat, *words, env=env)
    return points_in(text, r"Step (\d+) \| Validation bpb: ([\d.]+)", r"\| dt: ([\d.]+)ms", TOKENS)


if __name__ == "__main__":
    end_with_errors(main)
