"""Does the α–β model predict a step over a network? Two hosts are joined by one cable, 1 Gbit/s and 200 µs.

They are network namespaces of this machine with an sshd each. The step of two ranks there is predicted from
the step of one rank and from `distgpt bench allreduce` on that cable, and then measured. Since both hosts are
one machine, which gets slower when both of its cores work, the prediction is also made from one rank's step
while the other host takes steps of its own. Says nothing on a machine with other work: the load is noted.

Needs root, g++, openssh-server, iproute2 and the mpich wheel: python benchmarks/shaped_link.py
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from record import arguments, save
from scaling import ScalingOptions, scaling

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

from hosts import Unavailable, shaped_link

from distgpt.cluster.jobs.processes import distgpt_command
from distgpt.core.base.formatting import duration
from distgpt.core.config import RunConfig
from distgpt.measure.jobs import read_summary

BAR = 0.25  # the largest difference from what was measured that will do
# About a third of its step over such a link is communication.
MODEL = {"n_layer": 4, "n_head": 4, "n_embd": 128, "seq_len": 64, "vocab_size": 256, "batch_size": 24}


def main() -> None:
    link = {"gbit": {"type": float, "default": 1.0}, "microseconds": {"type": float, "default": 200.0}}
    args = arguments(__doc__, 5, steps={"type": int, "default": 60}, **link)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the hosts go
    with tempfile.TemporaryDirectory() as scratch:
        try:
            with shaped_link(Path(scratch), args.gbit * 1e9, args.microseconds) as (mpirun, hosts):
                rounds = [measured(mpirun, hosts, args.steps) for _ in range(args.rounds)]
        except Unavailable as reason:
            sys.exit(f"no two hosts here: {reason}")
    alone, beside = (
        statistics.median(row[f"difference_from_{what}"] for row in rounds)
        for what in ("alone", "side_by_side")
    )
    print(f"median difference, from the step of one rank alone: {alone:+.1%} (the bar: {BAR:.0%})")
    print(f"median difference, from the step of one rank while another host's works: {beside:+.1%}")
    found = {
        "link": {"bits_per_s": args.gbit * 1e9, "latency_s": args.microseconds * 1e-6},
        "model": MODEL,
        "bar": BAR,
        "median_difference_from_alone": alone,
        "median_difference_from_side_by_side": beside,
        "met": abs(alone) <= BAR,
        "rounds": rounds,
    }
    save("shaped-link", found, args.out)


def measured(mpirun: Path, hosts: Path, steps: int) -> dict[str, Any]:
    """One rank, the sums by size, two ranks with as much to do each."""
    run = RunConfig().with_values({**MODEL, "steps": steps, "tokenizer": "byte"})
    options = ScalingOptions(hostfile=hosts, launcher=str(mpirun), threads=1, weak=True, out=hosts.parent)
    found = scaling(options, run, lambda line: None)
    one, two = found["measured"]
    both = side_by_side(run, hosts.parent)
    exchange, size = two["predicted_step_s"] - one["step_s"], found["gradient_bytes"]
    row = {"one_rank_alone_s": one["step_s"], "one_rank_on_each_host_s": both, "two_ranks_s": two["step_s"]}
    for what, alone in (("alone", one["step_s"]), ("side_by_side", both)):
        row[f"predicted_from_{what}_s"] = alone + exchange
        row[f"difference_from_{what}"] = (alone + exchange) / two["step_s"] - 1
    row |= {
        "predicted_exchange_s": exchange,
        "measured_sum_s": next(r["seconds"] for r in found["allreduce"]["rows"] if r["bytes"] == size),
        "gradient_bytes": size,
        "load": os.getloadavg()[0],
        "model": found["model"],
        "allreduce": found["allreduce"]["rows"],
    }
    print(
        f"1 rank {duration(one['step_s'])} (side by side {duration(both)}), sum {duration(exchange)}: "
        f"2 ranks predicted {duration(row['predicted_from_alone_s'])}, measured {duration(two['step_s'])}, "
        f"{row['difference_from_alone']:+.1%} (from side by side {row['difference_from_side_by_side']:+.1%})",
        flush=True,
    )
    return row


def side_by_side(run: RunConfig, folder: Path) -> float:
    """The step of one rank while an unrelated one trains too."""
    return statistics.mean(read_summary(each)["step_s_median"] for each in unrelated(run, folder, 2))


def unrelated(run: RunConfig, folder: Path, count: int) -> list[Path]:
    """Train as so many runs of one rank each, at the same time."""
    config = folder / "alone.toml"
    config.write_text(run.to_toml())
    outs = [Path(tempfile.mkdtemp(dir=folder)) / "run" for _ in range(count)]
    words = ("train", "--threads", "1", "--config", config, "--progress", "plain", "--out")
    trained = [subprocess.Popen(distgpt_command(*words, out), stdout=subprocess.DEVNULL) for out in outs]
    codes = [job.wait() for job in trained]
    if any(codes):
        sys.exit("training on one rank failed")
    return outs


if __name__ == "__main__":
    main()
