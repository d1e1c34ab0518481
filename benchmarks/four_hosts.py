"""Does the α–β model predict four hosts? Exchanges and whole steps, over a switch of a known rate and delay.

The hosts are network namespaces of this machine with an sshd each (tests/helpers/hosts.py). An exchange is
predicted from the rate, the delay and the frames alone; nothing is fitted. A step is the slowest of four
unrelated runs' at the same time, for which the others wait, and the exchange.

Ranks run with UCX_TCP_PUT_ENABLE=n. UCX, which is under MPICH, else lets a long message's hand-shake wait
behind a long message to the same host: one direction after the other. That is measured beside it.

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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import timed_exchanges
from alphabeta import AlphaBeta, Network, OverNetwork, Regime
from predictions import steps_by_exchange
from record import arguments, end_with_errors, metrics, save
from shaped_link import unrelated

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

from hosts import Unavailable, switched_hosts

from distgpt.core.base.formatting import duration
from distgpt.core.config import RunConfig
from distgpt.jobs.launchers import Launcher, find_launcher
from distgpt.jobs.processes import run as run_process
from distgpt.measure import jobs

MTU = 9000
BAR = 0.10  # the largest difference from what was measured that will do
FREE = AlphaBeta((Regime("scatter-gather", 0.0, 0.0),), 2)  # a host itself; MPICH's form above 8 bytes
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
ALONE = 100  # steps of the unrelated runs, which exchange nothing
WARM_UP = 5  # of these
NO_HAND_SHAKE = {"UCX_TCP_PUT_ENABLE": "n"}


@dataclass(frozen=True, slots=True)
class Rig:
    """So many hosts around a switch. `network`: of the way from one to another."""

    hosts: int
    network: Network

    def joined(self, folder: Path, ranks_of_a_host: int = 1) -> Any:
        """The hosts while they exist: an mpirun and a hostfile. Half of the way is each host's cable."""
        cable = (self.network.bits_per_s, self.network.latency * 1e6 / 2)
        return switched_hosts(folder, [cable] * self.hosts, self.network.mtu, ranks_of_a_host)

    def predicted(self, size: int, passes: float, ranks_of_a_host: int = 1) -> dict[str, float]:
        """The step by way; without passes, the exchange."""
        model, ranks = OverNetwork(FREE, self.network, ranks_of_a_host), self.hosts * ranks_of_a_host
        how = partial(model.seconds, ranks), partial(model.in_parts, ranks)
        return steps_by_exchange(passes, 0.0, ranks, size, 4, *how)


def main() -> None:
    options: dict[str, dict[str, Any]] = {
        "hosts": {"type": int, "default": 4},
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
            rig = Rig(args.hosts, Network(mbit * 1e6, 2 * args.microseconds * 1e-6, MTU))
            rows += exchanges(rig, 1, FLAT, NO_HAND_SHAKE, args)
            rows += exchanges(rig, 2, BY_HOST, NO_HAND_SHAKE, args)
            rows += exchanges(rig, 1, {"allreduce": {}}, {}, args)
            rows += whole_steps(rig, args)
    except Unavailable as reason:
        sys.exit(f"no hosts here: {reason}")
    judged = [abs(row["difference"]) for row in rows if not row["as_ucx_comes"]]
    missed = sum(difference > BAR for difference in judged)
    print(f"{len(judged) - missed} of {len(judged)} predictions within {BAR:.0%}; {max(judged):.0%} at most")
    save("four-hosts", {"hosts": args.hosts, "mtu": MTU, "model": MODEL, "bar": BAR, "rows": rows}, args.out)


def exchanges(
    rig: Rig, ranks: int, ways: dict[str, Any], how: dict[str, str], args: Any
) -> list[dict[str, Any]]:
    """A row for each size and way, on hosts of so many ranks each."""
    asked = {"parameters": args.parameters, "ways": ways, "rounds": args.rounds}
    command = [sys.executable, timed_exchanges.__file__, json.dumps(asked)]
    with tempfile.TemporaryDirectory() as scratch, rig.joined(Path(scratch), ranks) as (mpirun, hosts):
        launcher = find_launcher(str(mpirun), hosts)
        ended = run_process(launcher.command(ranks * rig.hosts, command), env={**os.environ, **how})
    found = jobs.answer(ended, "the exchanges")
    rows = []
    for each in found["sizes"]:
        predicted = rig.predicted(each["bytes"], 0.0, ranks)
        what = {"what": "exchange", "ranks_of_a_host": ranks, "bytes": each["bytes"], "as_ucx_comes": not how}
        rows += [compared(rig, {**what, "way": way}, predicted[way], each["seconds"][way]) for way in ways]
    return rows


def whole_steps(rig: Rig, args: Any) -> list[dict[str, Any]]:
    """A row for each way, of real training; the rounds take all ways in turn."""
    run = RunConfig().with_values({**MODEL, "steps": args.steps, "save_minutes": 0.0})
    before = dict(os.environ)
    os.environ.update(NO_HAND_SHAKE)
    with tempfile.TemporaryDirectory() as scratch, rig.joined(Path(scratch)) as (mpirun, hosts):
        launcher, folder = find_launcher(str(mpirun), hosts), Path(scratch)
        rounds = [trained(run, launcher, rig.hosts, folder / str(i), args.batch) for i in range(args.rounds)]
    os.environ.clear()
    os.environ.update(before)
    alone, size = statistics.median(row["slowest_s"] for row in rounds), rounds[0]["parameters"] * 4
    predicted = rig.predicted(size, alone)
    what = {"what": "step", "ranks_of_a_host": 1, "bytes": size, "as_ucx_comes": False}
    what["slowest_of_unrelated_s"] = alone
    return [
        compared(rig, {**what, "way": way}, predicted[way], [row["steps"][way] for row in rounds])
        for way in FLAT
    ]


def slowest(run: RunConfig, folder: Path, count: int) -> float:
    """The median of steps as long as the longest of so many unrelated runs takes for it."""
    runs = unrelated(run, folder, count)
    steps = [[line["step_s"] for line in metrics(each) if "step_s" in line] for each in runs]
    return statistics.median(max(same) for same in list(zip(*steps, strict=True))[WARM_UP:])


def trained(run: RunConfig, launcher: Launcher, hosts: int, folder: Path, batch: int) -> dict[str, Any]:
    folder.mkdir()
    steps: dict[str, float] = {}
    for way, how in FLAT.items():
        config = run.with_values({**how, "batch_size": hosts * batch})
        words = ["--stage", "mpi", "--threads", "1"]
        summary = jobs.train(way, config, folder / way.replace(", ", "-"), words, launcher, hosts)
        steps[way] = summary["step_s_median"]
    alone = run.with_values({"batch_size": batch, "steps": ALONE})
    return {
        "slowest_s": slowest(alone, folder, hosts),
        "steps": steps,
        "parameters": summary["parameters"],
    }


def compared(rig: Rig, what: dict[str, Any], predicted: float, seconds: Sequence[float]) -> dict[str, Any]:
    """A row of the result, also as a line of a table."""
    median, rate = statistics.median(seconds), rig.network.bits_per_s
    row = {
        **what,
        "bits_per_s": rate,
        "latency_s": rig.network.latency,
        "predicted_s": predicted,
        "measured_s": median,
        "difference": predicted / median - 1,
        "rounds_s": list(seconds),
        "load": os.getloadavg()[0],
    }
    ranks = f"{rig.hosts} × {what['ranks_of_a_host']}{' as UCX comes' if what['as_ucx_comes'] else ''}"
    about = [what["what"], f"{rate / 1e6:g} Mbit/s", ranks, f"{what['bytes'] / 1e6:.1f} MB", what["way"]]
    found = [duration(predicted), duration(median), f"{row['difference']:+.1%}"]
    print(f"| {' | '.join([*about, *found])} |", flush=True)
    return row


if __name__ == "__main__":
    end_with_errors(main)
