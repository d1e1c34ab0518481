"""Does the α–β model predict four hosts? Exchanges and whole steps, over a switch of a known rate and delay.

The hosts are network namespaces of this machine with an sshd each (tests/helpers/hosts.py). Predicted are the
exchanges from the rate, the delay and the frames alone; nothing is fitted. A step is that of one rank while three
others take steps of their own, and the exchange. Slow cables leave the processor little to do with the result.

The default of UCX, which is under MPICH, is measured beside it: it lets a long message's hand-shake wait behind
another long message, so that of two ways at once one may come after the other.

Needs root, g++, openssh-server, iproute2 and the mpich wheel: python benchmarks/four_hosts.py
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import timed_exchanges
from alphabeta import AlphaBeta, Network, OverNetwork, Regime
from predictions import steps_by_exchange
from record import arguments, end_with_errors, save
from shaped_link import side_by_side

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

from hosts import Unavailable, switched_hosts

from distgpt.config import RunConfig
from distgpt.formatting import duration
from distgpt.jobs.launchers import Launcher, find_launcher
from distgpt.jobs.processes import run as run_process
from distgpt.measure import jobs

HOSTS = 4
MTU = 9000
BAR = 0.10  # the largest difference from what was measured that will do
FREE = AlphaBeta((Regime("scatter-gather", 0.0, 0.0),), HOSTS)  # a host itself; MPICH's form above 8 bytes
# By the words of predictions.py.
FLAT: dict[str, dict[str, Any]] = {
    "allreduce": {},
    "bfloat16": {"gradient_dtype": "bfloat16"},
    "sharded": {"grad_sync": "sharded"},
    "sharded, bfloat16": {"grad_sync": "sharded", "gradient_dtype": "bfloat16"},
}
BY_HOST = {way: {"grad_sync": "hierarchical", **FLAT[way]} for way in ("allreduce", "bfloat16")}
# A step computes for a small part of what its exchange takes.
MODEL = {"n_layer": 2, "n_head": 4, "n_embd": 128, "seq_len": 32, "vocab_size": 256, "tokenizer": "byte"}
NO_HAND_SHAKE = {"UCX_TCP_PUT_ENABLE": "n"}


def main() -> None:
    options: dict[str, dict[str, Any]] = {
        "mbit": {"type": float, "nargs": "+", "default": [50.0, 100.0, 200.0]},
        "microseconds": {"type": float, "default": 500.0, "help": "from a host to the switch"},
        "parameters": {"type": int, "nargs": "+", "default": [1 << 18, 1 << 20, 1 << 22]},
        "steps": {"type": int, "default": 12},
        "batch": {"type": int, "default": 2, "help": "sequences of each rank, in the steps"},
    }
    args = arguments(__doc__, 3, **options)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the hosts go
    rows: list[dict[str, Any]] = []
    try:
        for mbit in args.mbit:
            network = Network(mbit * 1e6, 2 * args.microseconds * 1e-6, MTU)
            rows += exchanges(network, 1, FLAT, NO_HAND_SHAKE, args)
            rows += exchanges(network, 2, BY_HOST, NO_HAND_SHAKE, args)
            rows += exchanges(network, 1, {"allreduce": {}}, {}, args)
            rows += whole_steps(network, args)
    except Unavailable as reason:
        sys.exit(f"no hosts here: {reason}")
    judged = [abs(row["difference"]) for row in rows if not row["as_ucx_comes"]]
    missed = sum(difference > BAR for difference in judged)
    print(f"{len(judged) - missed} of {len(judged)} predictions within {BAR:.0%}; {max(judged):.0%} at most")
    save("four-hosts", {"hosts": HOSTS, "mtu": MTU, "model": MODEL, "bar": BAR, "rows": rows}, args.out)


def exchanges(
    network: Network, ranks: int, ways: dict[str, Any], how: dict[str, str], args: Any
) -> list[dict[str, Any]]:
    """A row for each size and way, on hosts of so many ranks each."""
    asked = {"parameters": args.parameters, "ways": ways, "rounds": args.rounds}
    command = [sys.executable, timed_exchanges.__file__, json.dumps(asked)]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with switched_hosts(folder, cables(network), MTU, ranks) as (mpirun, hosts):
            ended = run_process(
                find_launcher(str(mpirun), hosts).command(ranks * HOSTS, command), env={**os.environ, **how}
            )
    found = jobs.answer(ended, "the exchanges")
    return [
        compared(
            network,
            {"what": "exchange", "way": way, "ranks_of_a_host": ranks, "bytes": each["bytes"]},
            exchange(network, ranks, each["bytes"], 0.0)[way],
            each["seconds"][way],
            how,
        )
        for each in found["sizes"]
        for way in ways
    ]


def whole_steps(network: Network, args: Any) -> list[dict[str, Any]]:
    """A row for each way, of real training on four hosts; the rounds take all ways in turn."""
    run = RunConfig().with_values({**MODEL, "steps": args.steps, "save_minutes": 0.0})
    os.environ.update(NO_HAND_SHAKE)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with switched_hosts(folder, cables(network), MTU) as (mpirun, hosts):
            launcher = find_launcher(str(mpirun), hosts)
            rounds = [trained(run, launcher, folder / str(i), args.batch) for i in range(args.rounds)]
    for name in NO_HAND_SHAKE:
        del os.environ[name]
    beside = statistics.median(row["beside_s"] for row in rounds)
    size = rounds[0]["parameters"] * 4
    predicted = exchange(network, 1, size, beside)
    what = {"what": "step", "ranks_of_a_host": 1, "bytes": size, "beside_others_s": beside}
    return [
        compared(
            network, {**what, "way": way}, predicted[way], [row["steps"][way] for row in rounds], NO_HAND_SHAKE
        )
        for way in FLAT
    ]


def trained(run: RunConfig, launcher: Launcher, folder: Path, batch: int) -> dict[str, Any]:
    folder.mkdir()
    beside = side_by_side(run.with_values({"batch_size": batch}), folder, HOSTS)
    steps = {}
    for way, how in FLAT.items():
        config = run.with_values({**how, "batch_size": HOSTS * batch})
        words = ["--stage", "mpi", "--threads", "1"]
        summary = jobs.train(way, config, folder / way.replace(", ", "-"), words, launcher, HOSTS)
        steps[way] = summary["step_s_median"]
    return {"beside_s": beside, "steps": steps, "parameters": summary["parameters"]}


def cables(network: Network) -> list[tuple[float, float]]:
    """Those of all hosts, each with half of the way from host to host."""
    return [(network.bits_per_s, network.latency * 1e6 / 2)] * HOSTS


def exchange(network: Network, ranks_of_a_host: int, size: int, passes: float) -> dict[str, float]:
    """The predictions by way."""
    model, ranks = OverNetwork(FREE, network, ranks_of_a_host), ranks_of_a_host * HOSTS
    how = partial(model.seconds, ranks), partial(model.in_parts, ranks)
    return steps_by_exchange(passes, 0.0, ranks, size, 4, *how)


def compared(
    network: Network, what: dict[str, Any], predicted: float, seconds: Sequence[float], how: dict[str, str]
) -> dict[str, Any]:
    """A row of the result, also as a line of a table."""
    median = statistics.median(seconds)
    row = {
        **what,
        "bits_per_s": network.bits_per_s,
        "latency_s": network.latency,
        "as_ucx_comes": not how,
        "predicted_s": predicted,
        "measured_s": median,
        "difference": predicted / median - 1,
        "rounds_s": list(seconds),
        "load": os.getloadavg()[0],
    }
    hosts = f"4 × {what['ranks_of_a_host']}{' as UCX comes' if not how else ''}"
    print(
        f"| {what['what']} | {network.bits_per_s / 1e6:g} Mbit/s | {hosts} | {what['bytes'] / 1e6:.1f} MB | "
        f"{what['way']} | {duration(predicted)} | {duration(median)} | {row['difference']:+.1%} |",
        flush=True,
    )
    return row


if __name__ == "__main__":
    end_with_errors(main)
