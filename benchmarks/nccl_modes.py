"""Train a few steps with each way to exchange gradients by NCCL, and compare with a run through the host.

    mpirun -n 2 python benchmarks/nccl_modes.py DIR [--quick] [--only NAME …]

The ranks share one GPU. The reference uses page-locked memory and MPI, as tested on an H100. On two ranks
the order of a sum does not matter, so losses must be bitwise identical. Exit code 1: losses differ, or a
run failed. `--quick`: a tiny model. DIR/modes.json has the table.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from distgpt.cluster.launch.environment import launched_rank
from distgpt.commands.cli import main as distgpt
from distgpt.gpu.transport import SHARED_GPU

TRAIN = shlex.split(
    "train --stage mpi-cuda --preset gpt-mini --data corpus --tokenizer byte --n-layer 3 --dtype bfloat16"
    " --deterministic --recompute none --batch-size 16 --steps 6 --sample-every 0"
    " --val-fraction 0 --progress plain"
)
QUICK = shlex.split("--n-layer 1 --n-head 2 --n-embd 16 --seq-len 8 --batch-size 4 --steps 3")
MUON = "--optimizer muon --lr 0.02"


class Mode(NamedTuple):
    """A way to train. `like`: the mode through the host with bitwise identical losses on two ranks."""

    options: str
    like: str = "host"


HOST = {
    "host": Mode("--grad-sync allreduce"),
    "host, accumulating": Mode("--grad-sync allreduce --grad-accum 2"),
    "host, bfloat16 on the wire": Mode("--grad-sync allreduce --gradient-dtype bfloat16"),
    "host, Muon": Mode(f"--grad-sync allreduce {MUON}"),
    "host, local steps": Mode("--outer-every 2"),
}
BY_NCCL = {
    "allreduce": Mode("--grad-sync allreduce"),
    "overlapped": Mode("--grad-sync overlapped"),
    "sharded": Mode("--grad-sync sharded"),
    "muon": Mode(f"--grad-sync allreduce {MUON}", "host, Muon"),
    "muon-sharded": Mode(f"--grad-sync sharded {MUON}", "host, Muon"),
    "muon-overlapped": Mode(f"--grad-sync overlapped {MUON}", "host, Muon"),
    "narrow": Mode("--grad-sync allreduce --gradient-dtype bfloat16", "host, bfloat16 on the wire"),
    "narrow-overlapped": Mode(
        "--grad-sync overlapped --gradient-dtype bfloat16", "host, bfloat16 on the wire"
    ),
    "accumulating": Mode("--grad-sync overlapped --grad-accum 2", "host, accumulating"),
    "local": Mode("--outer-every 2", "host, local steps"),
}
LINE = "{mode:28} {verdict} ({seconds} s)"  # a row of the table
MORE_RANKS = 1e-3  # tolerance: three or more ranks sum in another order, in bfloat16


def losses(folder: Path) -> list[float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


def run(words: list[str]) -> tuple[int, float]:
    sys.argv, began, code = ["distgpt", *words], time.perf_counter(), 0
    try:
        distgpt()
    except SystemExit as end:
        code = int(end.code or 0)
    return code, time.perf_counter() - began


def verdict(found: list[float], wanted: list[float], within: float) -> tuple[bool, str]:
    if found == wanted:
        return True, "same bits"
    if len(found) != len(wanted) or not found:
        return False, f"{len(found)} losses, not {len(wanted)}"
    off = max(abs(a / b - 1) for a, b in zip(found, wanted, strict=True))
    return off <= within, f"{'' if off <= within else 'DIFFERS: '}{off:.1e} away at most"


def row_of(name: str, mode: Mode, out: Path, ended: tuple[int, float], ranks: int) -> dict[str, Any]:
    code, took = ended
    row: dict[str, Any] = {"mode": name, "ranks": ranks, "exit_code": code, "seconds": round(took, 2)}
    if code:
        return row | {"right": False, "verdict": "failed"}
    found = losses(out / slug(name))
    if name in HOST:
        return row | {"right": True, "verdict": "by the host", "losses": found}
    right, text = verdict(found, losses(out / slug(mode.like)), 0.0 if ranks == 2 else MORE_RANKS)
    return row | {"right": right, "verdict": text, "losses": found}


def slug(name: str) -> str:
    return name.replace(", ", "-").replace(" ", "-")


def main() -> int:
    parser = argparse.ArgumentParser(description="Train by NCCL on one GPU, and compare with the host's way.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=BY_NCCL, default=list(BY_NCCL))
    args = parser.parse_args()
    os.environ[SHARED_GPU] = "1"
    ranks = int(next(os.environ[name] for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE") if name in os.environ))
    needed = {BY_NCCL[name].like for name in args.only}
    modes = {name: mode for name, mode in HOST.items() if name in needed}
    modes |= {name: BY_NCCL[name] for name in args.only}
    rows = []
    for name, mode in modes.items():
        way = "host" if name in HOST else "nccl"
        words = [*TRAIN, *(QUICK if args.quick else ()), "--allreduce", way, *mode.options.split()]
        ended = run([*words, "--out", str(args.out / slug(name))])
        if launched_rank() != 0:
            continue
        rows.append(row_of(name, mode, args.out, ended, ranks))
        print(LINE.format(**rows[-1]), flush=True)
        (args.out / "modes.json").write_text(json.dumps(rows, indent=1) + "\n")
    print("\n".join(LINE.format(**row) for row in rows))
    return int(not all(row["right"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
