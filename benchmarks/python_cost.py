"""Time a training step whose kernels do nothing: the cost of Python, threads and locks by number of threads.

    python benchmarks/python_cost.py [--presets tiny fast gpt2] [--threads 1 2 4 8 16 32 64]
        [--steps 20] [--by-python]

Compiled loops return immediately, so any number of threads can be measured on few cores. Also prints the
time of the kernels on one thread, divided by the threads: the lower limit of a step. `--floor-only` skips it.
"""

from __future__ import annotations

import argparse
import inspect
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from cProfile import Profile
from pathlib import Path
from statistics import median
from typing import Any

from distgpt.core.config.presets import preset
from distgpt.core.cpu.compiling.processor import processor

# At least one sequence for each of 16 threads.
CHANGES: dict[str, dict[str, Any]] = {
    "tiny": {"vocab_size": 256},
    "fast": {"vocab_size": 2048},
    "gpt2": {"vocab_size": 50257, "batch_size": 16, "seq_len": 512, "grad_accum": 1},
}


def do_nothing() -> None:
    """Make every loop that is compiled after this call return immediately."""
    from distgpt.core.cpu.compiling import jit
    from distgpt.core.cpu.graphs import loops  # they replace Python, so they still run

    assert loops
    compiled = jit.njit

    def emptied(function: Callable[..., Any]) -> Any:
        names = ", ".join(inspect.signature(function).parameters)
        made: dict[str, Any] = {}
        exec(f"def {function.__name__}({names}): pass", made)
        return compiled(nogil=True, _nrt=False)(made[function.__name__])

    jit.jit = emptied


def forget_recordings() -> None:
    """Make Python execute every call, without recorded steps."""
    from distgpt.core.cpu.graphs import capture

    capture.record = lambda kernels, work: work


def step_cost(name: str, threads: int, dtype: str, steps: int, is_empty: bool) -> tuple[float, int]:
    """Return the median seconds of a step and the number of calls of its first thread."""
    if is_empty:
        do_nothing()
    import numpy as np

    from distgpt.core.cpu.stages import open_stage
    from distgpt.core.data.batches import Batches
    from distgpt.core.data.loading import ArrayTokens
    from distgpt.core.train.setup import make_steps

    run = preset(name, CHANGES[name] | {"dtype": dtype, "recompute": "mlp", "matmul": "own"})
    count = run.train.batch_size * run.model.seq_len
    ids = np.random.default_rng(0).integers(0, run.model.vocab_size, count + 1, np.uint32)
    batches = Batches.of_run(ArrayTokens(ids), run)
    step = make_steps(run, open_stage("serial", threads), lambda text: None)
    kernels: Any = step.model.kernels
    if is_empty:  # uninitialized memory may not be a number
        kind = type(kernels)
        summed = kind.sum_squares

        def one(self: Any, total: Any, g: Any) -> None:
            summed(self, total, g)
            total[0] = 1.0

        kind.sum_squares = one
    seconds = []
    for number in range(3 + steps):
        begun = time.perf_counter()
        step.launch(number, batches).wait()
        seconds.append(time.perf_counter() - begun)
    profile = Profile()
    profile.runcall(lambda: step.launch(number + 1, batches).wait())
    return median(seconds[3:]), sum(entry.callcount for entry in profile.getstats())


def measured(
    name: str, threads: int, dtype: str, steps: int, is_empty: bool, flags: Sequence[str]
) -> tuple[float, int]:
    alone = map(str, ("--alone", name, threads, dtype, steps, int(is_empty)))
    words = [sys.executable, __file__, *flags, *alone]
    seconds, calls = subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()
    return float(seconds), int(calls)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time a step whose kernels do nothing.")
    parser.add_argument("--presets", nargs="+", choices=CHANGES, default=list(CHANGES))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--floor-only", action="store_true")
    parser.add_argument("--by-python", action="store_true", help="run each step in Python, not recorded")
    parser.add_argument("--out", type=Path, help="JSON of all rows")
    parser.add_argument("--alone", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.by_python:
        forget_recordings()
    if args.alone:
        name, threads, dtype, steps, is_empty = args.alone
        print(*step_cost(name, int(threads), dtype, int(steps), bool(int(is_empty))))
        return
    rows = []
    flags = ["--by-python"] * args.by_python
    for name in args.presets:
        whole = 0.0 if args.floor_only else measured(name, 1, args.dtype, 3, False, flags)[0]
        for threads in args.threads:
            seconds, calls = measured(name, threads, args.dtype, args.steps, True, flags)
            row = {"preset": name, "threads": threads, "ms": 1e3 * seconds, "calls": calls}
            allowed = 1e3 * whole / threads
            if whole:
                row |= {"kernels_ms": allowed, "share": row["ms"] / allowed}
            rows.append(row)
            share = f"{allowed:10.1f} ms allowed {row['share']:8.1%}" if whole else ""
            cost = f"{row['ms']:9.2f} ms of Python, {calls:6,} calls"
            print(f"{name:6} {threads:3} threads {cost}{share}", flush=True)
    if args.out:
        about = {"processor": processor()[0], "dtype": args.dtype, "by_python": args.by_python}
        args.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
