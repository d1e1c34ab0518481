"""Train presets in full width on a GPU and compare the losses with losses computed on a CPU in advance.

    python benchmarks/gpu_agreement.py make FILE                        on a CPU: seconds to minutes
    python benchmarks/gpu_agreement.py check FILE [--stage cuda] [--out FILE] [--only NAME …]

Models have few layers and rows, to be fast on a CPU, but the presets' widths, heads, groups, windows and
optimizers. The CPU uses float32. Exit code 1: a loss exceeds its type's tolerance. `--quick`: toy sizes.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distgpt.core.config import STAGES, GpuConfig, RunConfig
from distgpt.core.config.presets import preset
from distgpt.core.cpu.stages import Stage, open_stage
from distgpt.core.data.batches import ArrayTokens, Batches
from distgpt.core.generate.engine import Engine, complete
from distgpt.core.generate.engine_setup import slots_for
from distgpt.core.generate.request import Request
from distgpt.core.train.setup import make_steps

SMALLER: dict[str, Any] = {"n_layer": 4, "vocab_size": 4096, "batch_size": 2, "seq_len": 512}
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "tiny": ("tiny", {"vocab_size": 256}, 30),
    "fast": ("fast", {"vocab_size": 4096}, 20),
    "sprint": ("sprint", {"vocab_size": 4096, "init_weights": "unit"}, 20),
    "gpt-mini": ("gpt-mini", {"vocab_size": 300}, 20),
    "gpt2": ("gpt2", SMALLER, 10),
    "gpt2-fast": ("gpt2-fast", SMALLER, 10),
    "smollm2": ("smollm2-135m", SMALLER, 10),
    "qwen3": ("qwen3-0.6b", SMALLER | {"n_layer": 3}, 6),
}
TOY = {"n_layer": 1, "n_head": 2, "n_kv_head": 0, "n_embd": 32, "seq_len": 16, "batch_size": 2}
WITHIN = {"float32": 1e-4, "bfloat16": 2e-2}  # maximum relative error of a loss
NEW = 32  # new tokens, decoded greedily by the trained model


class Found(NamedTuple):
    losses: list[float]
    tokens: list[int]


def run_of(name: str, dtype: str, quick: bool) -> tuple[RunConfig, int]:
    base, changes, steps = CASES[name]
    given = changes | {"steps": 40, "warmup": 2, "grad_accum": 1, "dtype": dtype}
    if quick:
        given |= TOY | {"head_dim": 0, "mlp_width": 0, "steps": 3, "vocab_size": 64}
    return preset(base, given), 3 if quick else steps


def trained(stage: Stage, run: RunConfig, steps: int) -> Found:
    size = run.train.batch_size * run.model.seq_len * 4 + 1
    ids = np.random.default_rng(0).zipf(1.5, size) % run.model.vocab_size
    step = make_steps(run, stage, lambda text: None)
    batches = Batches.of_run(ArrayTokens(ids.astype(np.uint32)), run)
    losses = [step.launch(number, batches).wait().loss for number in range(steps)]
    request = Request([1, 2, 3], min(NEW, run.model.seq_len - 4))
    ((text,),) = complete(Engine(slots_for(step.model, 1)), [request])
    return Found(losses, [int(token) for token in text.tokens])


def compared(found: Found, wanted: Found, within: float) -> dict[str, Any]:
    off = max(abs(a / b - 1) for a, b in zip(found.losses, wanted.losses, strict=True))
    pairs = enumerate(zip(found.tokens, wanted.tokens, strict=True))
    alike = next((i for i, (a, b) in pairs if a != b), len(wanted.tokens))
    return {"right": bool(off <= within), "off": off, "last": found.losses[-1], "tokens_alike": alike}


def check(args: Any) -> int:
    wanted = {name: Found(**each) for name, each in json.loads(args.file.read_text()).items()}
    stage = open_stage(args.stage, None, GpuConfig(deterministic=True) if args.stage == "cuda" else None)
    rows = []
    for name in [each for each in args.only or wanted if each in wanted]:
        for dtype, within in WITHIN.items():
            began = time.monotonic()
            try:
                row = compared(trained(stage, *run_of(name, dtype, args.quick)), wanted[name], within)
            except Exception as error:
                row = {"right": False, "error": f"{type(error).__name__}: {error}"}
            rows.append({"row": f"{name} {dtype}", **row, "seconds": round(time.monotonic() - began, 1)})
            print(json.dumps(rows[-1]), flush=True)
            if args.out:
                args.out.write_text(json.dumps(rows, indent=1) + "\n")
            gc.collect()
    return int(not all(row["right"] for row in rows))


def make(args: Any) -> int:
    stage, found = open_stage("serial"), {}
    for name in args.only or CASES:
        began = time.monotonic()
        found[name] = trained(stage, *run_of(name, "float32", args.quick))._asdict()
        print(f"{name}: {found[name]['losses'][-1]:.4f} ({time.monotonic() - began:.1f} s)", flush=True)
        args.file.write_text(json.dumps(found) + "\n")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare training on a GPU with losses of a CPU.")
    parser.add_argument("what", choices=("make", "check"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--stage", choices=STAGES, default="cuda")
    parser.add_argument("--only", nargs="+", choices=CASES)
    parser.add_argument("--out", type=Path, help="JSON of all rows")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    return {"make": make, "check": check}[args.what](args)


if __name__ == "__main__":
    sys.exit(main())
