"""Time ways to train in PyTorch on CPUs, each in a process, on random tokens; print tokens/s.

    python benchmarks/torch_ways.py [--ways MODE MODE:RANKS …] [--threads 16] [--out FILE] [--python PYTHON]

The model and the batch match `training_ways.py node`. A way is a mode of train_beside_torch.py;
`:4` adds DDP over gloo with 4 processes that share the threads. `--quick`: toy sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from peer_process import ask_peer, training
from training_ways import NODE, TOY, with_flops

from distgpt.cluster.affinity.machine import read_machine
from distgpt.core.base.errors import DistgptError
from distgpt.core.config.presets import preset

# The most promising ways first. Compiling autotune took minutes and did not help on two cores.
WAYS = ["keep-freed+autocast", "compile+keep-freed+autocast", "keep-freed", "compile+keep-freed"]


def main() -> int:
    parser = argparse.ArgumentParser(description="Time ways to train in PyTorch on cores.")
    parser.add_argument("--ways", nargs="+", default=WAYS, metavar="MODE[:RANKS]")
    here = len(read_machine(allowed=os.sched_getaffinity(0)).cores)
    parser.add_argument("--threads", nargs="+", type=int, default=[here], help="threads of all ranks")
    parser.add_argument("--row", default="GPT-2 bfloat16", choices=NODE)
    parser.add_argument("--steps", type=int, default=3, help="that are timed, after two")
    parser.add_argument("--python", default=sys.executable, help="one that has PyTorch")
    parser.add_argument("--out", type=Path, help="JSON of all rows")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for threads in args.threads:
        for way in args.ways:
            rows.append(measured(way, threads, args))
            print(json.dumps(rows[-1]), flush=True)
            if args.out:
                args.out.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any("error" in row for row in rows))


def measured(way: str, threads: int, args: argparse.Namespace) -> dict[str, Any]:
    mode, _, ranks = way.partition(":")
    count, began = int(ranks or 1), time.monotonic()
    run = preset(NODE[args.row].preset, NODE[args.row].changes | (TOY if args.quick else {}))
    request = training(run, mode, max(1, threads // count), args.steps)
    row: dict[str, Any] = {"row": args.row, "mode": mode, "threads": request["threads"], "ranks": count}
    try:
        found = ask_peer(args.python, "train", request, ranks=count)
        row |= {"tokens_per_s": round(found["tokens_per_s"], 1), "torch": found["torch"]}
        row = with_flops(row, run)
    except DistgptError as error:
        row["error"] = str(error)
    return row | {"seconds": round(time.monotonic() - began, 1)}


if __name__ == "__main__":
    sys.exit(main())
