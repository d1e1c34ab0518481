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

import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from record import arguments, distgpt, end_with_errors, metrics, save

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
    found: dict[str, list[dict[str, Any]]] = {"nanochat": []}
    for seed in range(1, args.rounds + 1):
        found["nanochat"].append(peer.train())  # which has one seed
        for steps in args.ours:
            found.setdefault(f"distgpt, {steps} steps", []).append(ours(args, steps, seed))
    print("| | tokens | bits per byte at the end | seconds of steps | × nanochat's |")
    print("| --- " * 5 + "|")
    for name, runs in found.items():
        for run, beside in zip(runs, found["nanochat"], strict=True):
            end, ratio = run["bits_per_byte"][-1], run["seconds"] / beside["seconds"]
            print(f"| {name} | {end[0] * TOKENS:,} | {end[1]:.3f} | {run['seconds']:.0f} | {ratio:.2f} |")
    draw(found, args.picture or args.runs / "learning.png")
    save("learning-beside-nanochat", {"dtype": args.dtype, "sides": found}, args.out)


def draw(found: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Draw bits per byte by tokens and by seconds; of several seeds the first."""
    figure = Figure(figsize=(10, 4))
    by_tokens, by_seconds = figure.subplots(1, 2, sharey=True)
    for name, runs in found.items():
        steps, bits = zip(*runs[0]["bits_per_byte"][1:], strict=True)
        style = {"marker": "o", "label": name, "linestyle": "-" if name == "nanochat" else "--"}
        by_tokens.plot([step * TOKENS / 1e6 for step in steps], bits, **style)
        by_seconds.plot([step / steps[-1] * runs[0]["seconds"] for step in steps], bits, **style)
    by_tokens.set(xlabel="million tokens", ylabel="held-out bits per byte")
    by_seconds.set(xlabel="seconds, without evaluations", xlim=(0, None))
    by_tokens.legend()
    for axes in (by_tokens, by_seconds):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def ours(args: Any, steps: int, seed: int) -> dict[str, Any]:
    bpe, out = args.runs / "bpe.json", args.runs / f"{steps}-{seed}"
    if not bpe.exists():
        distgpt("tokenizer", "train", args.docs / "train", "--vocab-size", ENTRIES, "--out", bpe)
    texts = ("--data", args.docs / "train", "--val", args.docs / "val", "--tokenizer", bpe)
    how = (
        "--steps",
        steps,
        "--seed",
        seed,
        "--eval-every",
        110,
        "--val-tokens",
        args.held_out,
        "--dtype",
        args.dtype,
    )
    begun = time.perf_counter()
    distgpt("train", "--preset", "sprint", *texts, *how, "--progress", "plain", "--out", out)
    seconds = time.perf_counter() - begun - sum(line.get("val_s", 0.0) for line in metrics(out))
    lines = metrics(out)
    bits = [[line["step"], line["bits_per_byte"]] for line in lines if "bits_per_byte" in line]
    return {"bits_per_byte": bits, "seconds": seconds}


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

    def train(self) -> dict[str, Any]:
        sizes = ("--depth=4", "--max-seq-len=512", "--device-batch-size=8", f"--total-batch-size={TOKENS}")
        evaluations = ("--eval-every=110", f"--eval-tokens={self._args.held_out}", "--core-metric-every=-1")
        steps = (f"--num-iterations={self._args.steps}", "--sample-every=-1", "--window-pattern=L")
        text = self._run("-m", "scripts.base_train", *sizes, *evaluations, *steps)
        bits = re.findall(r"Step (\d+) \| Validation bpb: ([\d.]+)", text)
        seconds = [float(ms) / 1e3 for ms in re.findall(r"\| dt: ([\d.]+)ms", text)]
        usual = sorted(seconds)[len(seconds) // 2]  # in place of the first steps, which compile
        return {
            "bits_per_byte": [[int(step), float(value)] for step, value in bits],
            "seconds": sum(min(each, 3 * usual) for each in seconds),
        }

    def _run(self, *words: object) -> str:
        line = [self._args.peer_python, *map(str, words)]
        ended = subprocess.run(line, cwd=self._args.nanochat, env=self._env, capture_output=True, text=True)
        (self._args.runs / "nanochat.log").write_text(ended.stdout + ended.stderr)
        if ended.returncode:
            raise SystemExit(f"{' '.join(line[:3])}: {ended.stderr[-2000:]}")
        return ended.stdout


if __name__ == "__main__":
    end_with_errors(main)
