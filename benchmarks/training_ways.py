"""Time ways to train in one process on random tokens, without data and files; print tokens/s.

    python benchmarks/training_ways.py gpu|node [--only NAME …] [--turns 2] [--out FILE]
    mpirun -n 4 python benchmarks/training_ways.py node --stage mpi --threads 4 --only 'GPT-2 bfloat16'

`distgpt bench train` took 25 s for GPT-2 on an H100, including 2 s for its 20 steps. `--quick`: toy sizes.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from distgpt.core.config import ON_GPU, STAGES, GpuConfig, RunConfig
from distgpt.core.config.presets import preset
from distgpt.core.cpu.kernels import Bfloat16Kernels, CpuKernels
from distgpt.core.cpu.stages import Stage, open_stage
from distgpt.core.model.counts import operations
from distgpt.core.model.model import Architecture
from distgpt.measure.profile.session import peak_gflops
from distgpt.recipes.within import measured_speed


class Way(NamedTuple):
    preset: str
    changes: dict[str, Any]


GPT2 = {"vocab_size": 50257, "batch_size": 64, "grad_accum": 1, "recompute": "none", "dtype": "bfloat16"}
# The same batch for all numbers of cores. The time difference is not only the update.
ON_NODE = {"vocab_size": 50257, "grad_accum": 1, "seq_len": 512, "batch_size": 16}
BYTES = {"vocab_size": 256, "grad_accum": 1}
GPU = {
    "bfloat16": Way("gpt2", GPT2),
    "heads of 128": Way("gpt2", GPT2 | {"n_head": 6}),
    "fast, 8k tokens": Way("gpt2-fast", GPT2 | {"batch_size": 8}),
    "fast by AdamW, 8k tokens": Way("gpt2-fast", GPT2 | {"batch_size": 8, "optimizer": "adamw"}),
    "fast, 64k tokens": Way("gpt2-fast", GPT2),
    "smollm2": Way("smollm2-135m", {"batch_size": 16, "grad_accum": 1, "dtype": "bfloat16"}),
    "qwen3": Way("qwen3-0.6b", {"batch_size": 4, "grad_accum": 1, "dtype": "bfloat16"}),
    "gpt2-xl": Way("gpt2-xl", GPT2 | {"batch_size": 8, "recompute": "auto"}),
    "tiny": Way("tiny", BYTES | {"dtype": "bfloat16"}),
    "tiny, float32": Way("tiny", BYTES | {"dtype": "float32"}),
}
NODE = {
    "GPT-2 bfloat16": Way("gpt2", ON_NODE | {"dtype": "bfloat16"}),
    "GPT-2 float32": Way("gpt2", ON_NODE | {"dtype": "float32"}),
    "fast bfloat16": Way("fast", BYTES | {"dtype": "bfloat16"}),
    "fast float32": Way("fast", BYTES | {"dtype": "float32"}),
    "tiny bfloat16": Way("tiny", BYTES | {"dtype": "bfloat16"}),
    "tiny float32": Way("tiny", BYTES | {"dtype": "float32"}),
}
WAYS = {"gpu": GPU, "node": NODE}
# Large enough to be valid and to compile whole tiles, like the real sizes. In all models, with 0,
# k and v have as many heads as q.
TOY = {"n_layer": 1, "n_head": 2, "n_kv_head": 0, "head_dim": 0, "n_embd": 128, "mlp_width": 0}
TOY |= {"seq_len": 16, "batch_size": 4, "vocab_size": 64}


def measured(stage: Stage, way: Way, args: Any) -> dict[str, Any]:
    run = preset(way.preset, way.changes | (TOY if args.quick else {}))
    tokens_per_s, _ = measured_speed(stage, run, args.warm_up)
    return with_flops({"tokens_per_s": round(tokens_per_s, 1)}, run)


def with_flops(row: dict[str, Any], run: RunConfig) -> dict[str, Any]:
    counted = operations(Architecture(run.model))
    row["gflops"] = round(row["tokens_per_s"] * (counted.forward + counted.backward) / 1e9, 1)
    return row


def peaks(stage: Stage) -> dict[str, Any]:
    """Measure GFLOP/s of square matmuls with these threads."""
    kernels = [CpuKernels("float32", stage.threads), Bfloat16Kernels(stage.threads)]
    float32, bfloat16 = (round(peak_gflops(each, 0.7), 1) for each in kernels)
    rates = {"float32": float32, "bfloat16": bfloat16}
    return {"row": "peaks", "threads": stage.threads, "ranks": 1, **rates}


def main() -> int:
    parser = argparse.ArgumentParser(description="Time ways to train in one process.")
    parser.add_argument("what", choices=WAYS)
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--stage", choices=STAGES)
    parser.add_argument("--threads", nargs="+", type=int, default=[0], help="threads per rank")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON of all rows")
    parser.add_argument("--warm-up", type=int, default=2, help="steps that are not timed")
    parser.add_argument("--peaks", action="store_true", help="also measure matmuls with these threads")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    every, rows = WAYS[args.what], []
    if unknown := [name for name in args.only or () if name not in every]:
        parser.error(f"there is no way {unknown[0]!r}; there are {', '.join(every)}")
    for threads in args.threads:
        name = args.stage or {"gpu": "cuda", "node": "serial"}[args.what]
        stage = open_stage(name, threads or None, GpuConfig() if name in ON_GPU else None)
        if args.peaks:
            rows.append(peaks(stage))
            print(json.dumps(rows[-1]), flush=True)
        for turn in range(args.turns):
            for way in args.only or every:
                began = time.monotonic()
                row = {"row": way, "turn": turn, "threads": stage.threads, "ranks": stage.comm.size}
                try:
                    row |= measured(stage, every[way], args)
                except Exception as error:
                    row |= {"error": f"{type(error).__name__}: {error}"}
                gc.collect()  # free the model
                if stage.comm.rank == 0:
                    rows.append(row | {"seconds": round(time.monotonic() - began, 1)})
                    print(json.dumps(rows[-1]), flush=True)
                    if args.out:
                        args.out.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
