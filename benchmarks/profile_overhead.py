"""What profiling costs: steps of one model in turn with and without it; how many times as long they take.

python benchmarks/profile_overhead.py [--preset tiny] [--threads 2] [--pairs 200]
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from statistics import median

from distgpt.comm.serial import SerialComm
from distgpt.config.presets import preset
from distgpt.data.batches import Batches
from distgpt.data.loading import DataRequest, load_corpus
from distgpt.kernels.cpu import CpuKernels
from distgpt.measure.profile.session import Profiler
from distgpt.model.model import Model
from distgpt.model.optim import AdamW
from distgpt.training.step import Step

WARM_UP = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=200)
    args = parser.parse_args()
    run, comm = preset(args.preset), SerialComm()
    t, seq_len = run.train, run.model.seq_len
    text = load_corpus(comm, DataRequest(t.data, t.tokenizer, seq_len))
    model = Model(replace(run.model, vocab_size=text.tokenizer.size), CpuKernels("float32", args.threads))
    model.train()
    model.initialise(t.seed)
    step = Step(model, AdamW(model, t), comm, replace(t, recompute="mlp", grad_accum=1))
    batches = Batches(text.train, seq_len, t.batch_size, t.seed)
    plain = step.launch
    Profiler(warm_up=0).watch(step)
    seconds: list[list[float]] = [[], []]  # without, with
    for _ in range(WARM_UP + args.pairs):
        for times, launch in zip(seconds, (plain, step.launch), strict=True):
            begun = time.perf_counter()
            launch(0, batches).read()
            times.append(time.perf_counter() - begun)
    off, on = (times[WARM_UP:] for times in seconds)
    print(
        f"{args.preset}, {args.threads} threads: {1e3 * median(off):.2f} ms without, "
        f"{1e3 * median(on):.2f} with; "
        f"ratio of medians {median(on) / median(off):.3f}, of the fastest {min(on) / min(off):.3f}, "
        f"median of ratios {median(b / a for a, b in zip(off, on, strict=True)):.3f}"
    )


if __name__ == "__main__":
    main()
