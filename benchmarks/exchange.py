"""Measure the part of a step that is exchange of gradients, over a slow cable between hosts.

The hosts are network namespaces of this machine with an sshd each, one rank of one thread on each. What is
left of a step's time beside that of two unrelated runs, side by side with as much to do, is exposed exchange.
All ways are measured in turn in every round, and compared with allreduce float32 by the medians.

Needs root, g++, openssh-server, iproute2 and the mpich wheel: python benchmarks/exchange.py
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from record import arguments, save
from shaped_link import side_by_side

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

from hosts import Unavailable, shaped_link

from distgpt.cluster.jobs.launchers import find_launcher
from distgpt.core.base.formatting import duration
from distgpt.core.config import RunConfig
from distgpt.measure import jobs

ROUND = 16  # local steps between two exchanges
# Its Allreduce is between a quarter and a half of the step over 1 Gbit/s.
MODEL = {"n_layer": 6, "n_head": 8, "n_embd": 512, "seq_len": 128, "vocab_size": 512, "tokenizer": "byte"}
WAYS = {
    "allreduce float32": {},
    "allreduce bfloat16": {"gradient_dtype": "bfloat16"},
    "overlapped float32": {"grad_sync": "overlapped"},
    "overlapped bfloat16": {"grad_sync": "overlapped", "gradient_dtype": "bfloat16"},
    "sharded float32": {"grad_sync": "sharded"},
    "sharded bfloat16": {"grad_sync": "sharded", "gradient_dtype": "bfloat16"},
    "local float32": {"outer_every": ROUND},
    "local bfloat16": {"outer_every": ROUND, "gradient_dtype": "bfloat16"},
}
BARS = {"overlapped bfloat16": 0.35, "local float32": 0.08, "local bfloat16": 0.08}
FIRST = "allreduce float32"


def main() -> None:
    link = {"gbit": {"type": float, "default": 1.0}, "microseconds": {"type": float, "default": 200.0}}
    batch = {"type": int, "default": 16, "help": "sequences of each rank"}
    words = {"nargs": "*", "choices": list(WAYS), "default": list(WAYS), "help": "the ways to measure"}
    args = arguments(__doc__, 5, steps={"type": int, "default": 12}, batch=batch, only=words, **link)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the hosts go
    run = RunConfig().with_values({**MODEL, "steps": args.steps, "save_minutes": 0.0})
    with tempfile.TemporaryDirectory() as scratch:
        try:
            with shaped_link(Path(scratch), args.gbit * 1e9, args.microseconds) as (mpirun, hosts):
                rounds = [
                    measured(mpirun, hosts, run, args.batch, [FIRST, *args.only]) for _ in range(args.rounds)
                ]
        except Unavailable as reason:
            sys.exit(f"no two hosts here: {reason}")
    steps = {way: statistics.median(row["steps"][way] for row in rounds) for way in rounds[0]["steps"]}
    alone = statistics.median(row["alone_s"] for row in rounds)
    exposed = {way: (step - alone) / (steps[FIRST] - alone) for way, step in steps.items()}
    print(f"without exchange {duration(alone)}; allreduce {1 - alone / steps[FIRST]:.0%} of its step")
    for way, step in steps.items():
        bar = f" (the bar: {BARS[way]})" if way in BARS else ""
        print(f"{way:20} step {duration(step):>8}   exposed exchange {exposed[way]:5.2f} of allreduce{bar}")
    found = {
        "link": {"bits_per_s": args.gbit * 1e9, "latency_s": args.microseconds * 1e-6},
        "model": MODEL,
        "batch_size": 2 * args.batch,
        "bars": BARS,
        "step_without_exchange_s": alone,
        "median_step_s": steps,
        "exposed_of_packed": exposed,
        "rounds": rounds,
    }
    save("exchange", found, args.out)


def measured(mpirun: Path, hosts: Path, run: RunConfig, batch: int, ways: list[str]) -> dict[str, Any]:
    """The median step of each way, and of two runs that know nothing of each other."""
    launcher, folder = find_launcher(str(mpirun), hosts), Path(tempfile.mkdtemp(dir=hosts.parent))
    row: dict[str, Any] = {"load": os.getloadavg()[0], "steps": {}}
    row["alone_s"] = side_by_side(run.with_values({"batch_size": batch}), folder)
    for way in dict.fromkeys(ways):
        out, how = folder / way.replace(" ", "-"), {**WAYS[way], "batch_size": 2 * batch}
        if "outer_every" in how:
            how["steps"] = 2 * ROUND
        words = ["--stage", "mpi", "--threads", "1"]
        summary = jobs.train(way, run.with_values(how), out, words, launcher, 2)
        row["steps"][way] = summary["step_s_median"]
    said = ", ".join(f"{way} {duration(step)}" for way, step in row["steps"].items())
    print(f"without exchange {duration(row['alone_s'])}, {said}", flush=True)
    return row


if __name__ == "__main__":
    main()
