r"""The preset `sprint` beside nanochat: held-out bits per byte by tokens and by seconds.

    git clone https://github.com/karpathy/nanochat /elsewhere/nanochat
    python benchmarks/learning_beside_nanochat.py --docs FOLDER --nanochat /elsewhere/nanochat \
        --peer-python PY

FOLDER has train/docs.jsonl and val/docs.jsonl; PY is a Python with PyTorch and what nanochat needs. Each side
learns a tokenizer of its own of 8,192 entries and trains 4 layers of 256, context 512, 4,096 tokens a step,
nanochat by its own recipe and compiled. nanochat's seconds are those of its steps, without compiling. Ours
are those of the whole command without evaluations: they include its start and the first weights.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from pathlib import Path
from typing import Any

from curves import Point, draw, trained
from record import arguments, distgpt, end_with_errors, save

ENTRIES, TOKENS = 8192, 4096
PREPARE = """
import json, sys
from pathlib import Path
import pyarrow, pyarrow.parquet
docs, out = map(Path, sys.argv[1:])
def texts(part):
    return [json.loads(line)["text"] for line in (docs / part / "docs.jsonl").open()]
train = texts("train")
for number, part in enumerate((train[0::2], train[1::2], texts("val"))):
    table = pyarrow.table({"text": part})
    pyarrow.parquet.write_table(table, out / f"shard_{number:05d}.parquet", row_group_size=512)
"""


def main() -> None:
    args = arguments(
        __doc__,
        rounds=1,
        docs={"type": Path, "required": True},
        nanochat={"type": Path, "required": True},
        **{"peer-python": {"required": True}},
        steps={"type": int, "default": 330},
        ours={"type": int, "nargs": "+", "default": [220, 330], "help": "lengths of our runs"},
        **{"held-out": {"type": int, "default": 60 * TOKENS, "help": "tokens of an evaluation"}},
        dtype={"default": "float32", "choices": ("float32", "bfloat16")},
        picture={"type": Path, "help": "where the curves go; into --runs if left out"},
        runs={"type": Path, "default": Path("build/nanochat")},
    )
    peer = Nanochat(args)
    curves: dict[str, list[Point]] = {"nanochat": peer.train()}  # which has one seed
    for seed in range(1, args.rounds + 1):
        for steps in args.ours:
            curves[f"distgpt, {steps} steps" + f", seed {seed}" * (args.rounds > 1)] = ours(args, steps, seed)
    print("| | tokens | bits per byte at the end | seconds | × nanochat's |")
    print("| --- " * 5 + "|")
    for name, points in curves.items():
        tokens, seconds, bits = points[-1]
        ratio = seconds / curves["nanochat"][-1][1]
        print(f"| {name} | {tokens:,} | {bits:.3f} | {seconds:.0f} | {ratio:.2f} |")
    draw(curves, args.picture or args.runs / "learning.png", "held-out bits per byte")
    save("learning-beside-nanochat", {"dtype": args.dtype, "curves": curves}, args.out)


def ours(args: Any, steps: int, seed: int) -> list[Point]:
    bpe, out = args.runs / "bpe.json", args.runs / f"{steps}-{seed}"
    if not bpe.exists():
        distgpt("tokenizer", "train", args.docs / "train", "--vocab-size", ENTRIES, "--out", bpe)
    texts = ("--data", args.docs / "train", "--val", args.docs / "val", "--tokenizer", bpe)
    how = ("--steps", steps, "--seed", seed, "--dtype", args.dtype)
    evaluations = ("--eval-every", 110, "--val-tokens", args.held_out)
    return trained(out, "--preset", "sprint", *texts, *how, *evaluations, loss="bits_per_byte")


class Nanochat:
    """A checkout of nanochat, with the documents where it looks for them."""

    def __init__(self, args: Any) -> None:
        self._args, folder = args, args.runs.absolute() / "base"
        self._env = {**os.environ, "NANOCHAT_BASE_DIR": str(folder), "NANOCHAT_DTYPE": args.dtype}
        self._env.pop("PYTHONPATH", None)
        data = folder / "base_data_climbmix"
        if not data.exists():
            data.mkdir(parents=True)
            self._run("-c", PREPARE, args.docs.absolute(), data)
            self._run("-m", "scripts.tok_train", "--vocab-size", ENTRIES)

    def train(self) -> list[Point]:
        sizes = ("--depth=4", "--max-seq-len=512", "--device-batch-size=8", f"--total-batch-size={TOKENS}")
        evaluations = ("--eval-every=110", f"--eval-tokens={self._args.held_out}", "--core-metric-every=-1")
        steps = (f"--num-iterations={self._args.steps}", "--sample-every=-1", "--window-pattern=L")
        text = self._run("-m", "scripts.base_train", *sizes, *evaluations, *steps)
        bits = re.findall(r"Step (\d+) \| Validation bpb: ([\d.]+)", text)
        seconds = [float(ms) / 1e3 for ms in re.findall(r"\| dt: ([\d.]+)ms", text)]
        usual = sorted(seconds)[len(seconds) // 2]  # in place of the first steps, which compile
        after = list(itertools.accumulate(min(each, 3 * usual) for each in seconds))
        return [
            (int(step) * TOKENS, after[int(step) - 1], float(value)) for step, value in bits if step != "0"
        ]

    def _run(self, *words: object) -> str:
        line = [self._args.peer_python, *map(str, words)]
        ended = subprocess.run(line, cwd=self._args.nanochat, env=self._env, capture_output=True, text=True)
        (self._args.runs / "nanochat.log").write_text(ended.stdout + ended.stderr)
        if ended.returncode:
            raise SystemExit(f"{' '.join(line[:3])}: {ended.stderr[-2000:]}")
        return ended.stdout


if __name__ == "__main__":
    end_with_errors(main)
