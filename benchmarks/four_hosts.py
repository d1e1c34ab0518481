"""Does the α–β model predict four hosts? Exchanges and whole steps, over a switch of a known rate and delay.

The hosts are network namespaces of this machine with an sshd each (tests/helpers/hosts.py). An exchange is
predicted from two levels. Of the network the rate, the delay and the frames are known; what messages cost the
hosts themselves is fitted to sums of two hosts on a cable as fast as the machine. What a byte takes in memory
is fitted to sums of two ranks on one host, by way of exchange. Nothing is fitted to what is predicted. As all
hosts are this machine, they share its memory and its cores: with four of them a byte takes twice as long
there as with the two that were measured. Nothing is computed but the exchange. A step is the slowest of four
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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import timed_exchanges
from alphabeta import AlphaBeta, Network, OverNetwork, Regime, fit
from predictions import steps_by_exchange
from record import arguments, end_with_errors, metrics, save
from shaped_link import unrelated

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

from hosts import SHARING_CORES, Unavailable, switched_hosts

from distgpt.cluster.jobs.launchers import Launcher, find_launcher
from distgpt.cluster.jobs.processes import run as run_process
from distgpt.core.base.formatting import duration
from distgpt.core.config import RunConfig
from distgpt.measure import jobs
from distgpt.parallel.reductions import PIECE

MTU = 9000
BAR = 0.10  # the largest difference from what was measured that will do
FREE = AlphaBeta((Regime("scatter-gather", 0.0, 0.0),), 2)  # a host itself; MPICH's form above 8 bytes
SENT = {"allreduce": 1.0, "bfloat16": 0.5, "sharded": 1.0, "sharded, bfloat16": 0.75}  # of an array's bytes
OWN_WAY = "sharded"  # which sends to all at once; in one call messages wait for each other
LEVEL_ROUNDS = 12  # of milliseconds each; the fastest counts, as other work only adds
FITTED = [1 << 16, 1 << 18, 1 << 20, 1 << 22]  # parameters that the levels are fitted to
FAST = 1e11  # bits per second of a cable that is none
# By the words of predictions.py.
FLAT: dict[str, dict[str, Any]] = {
    "allreduce": {},
    "bfloat16": {"gradient_dtype": "bfloat16"},
    "sharded": {"grad_sync": "sharded"},
    "sharded, bfloat16": {"grad_sync": "sharded", "gradient_dtype": "bfloat16"},
}
# What --grad-sync allreduce comes down to where hosts have several ranks.
BY_HOST = {f"hierarchical, {way}": FLAT[way] for way in ("allreduce", "bfloat16")}
# A step computes for a small part of what its exchange takes.
MODEL = {"n_layer": 2, "n_head": 4, "n_embd": 128, "seq_len": 32, "vocab_size": 256, "tokenizer": "byte"}
ALONE = 100  # steps of the unrelated runs, which exchange nothing
WARM_UP = 5  # of these
NO_HAND_SHAKE = {"UCX_TCP_PUT_ENABLE": "n"}
# More processes than cores wait in the predicted runs, so also where two hosts are measured for them.
SLEEPING = dict(word.split("=") for word in SHARING_CORES.split())
PARTS = ("exchanges", "as UCX comes", "steps")


@dataclass(frozen=True, slots=True)
class Levels:
    """`memory`: by way, what ranks of one host do with a byte that they would send. `own`: of messages."""

    memory: Mapping[str, AlphaBeta]
    own: AlphaBeta


NOTHING = Levels(dict.fromkeys(FLAT, FREE), FREE)


@dataclass(frozen=True, slots=True)
class Rig:
    """So many hosts around a switch. `network`: of the way from one to another."""

    hosts: int
    network: Network

    def joined(self, folder: Path, ranks_of_a_host: int = 1) -> Any:
        """The hosts while they exist: an mpirun and a hostfile. Half of the way is each host's cable."""
        cable = (self.network.bits_per_s, self.network.latency * 1e6 / 2)
        return switched_hosts(folder, [cable] * self.hosts, self.network.mtu, ranks_of_a_host)

    def predicted(
        self, size: int, passes: float, levels: Levels = NOTHING, ranks: int = 1
    ) -> dict[str, float]:
        """The step by way; without passes, the exchange. So many ranks of a host."""
        every, found = self.hosts * ranks, {}
        for way, memory in levels.memory.items():
            model = OverNetwork(memory, self.network, ranks, levels.own, rehearsed=self.hosts)
            steps = partial(steps_by_exchange, passes, 0.0, every, size, 4, partial(model.seconds, every))
            found[way] = steps(partial(model.flat_in_parts, every))[way]
            if (name := f"hierarchical, {way}") in BY_HOST:  # each rank of a host has a part of its own
                found[name] = steps(partial(model.in_parts, every), PIECE * ranks)[way]
        return found


def main() -> None:
    options: dict[str, dict[str, Any]] = {
        "hosts": {"type": int, "default": 4},
        "mbit": {"type": float, "nargs": "+", "default": [50.0, 100.0, 200.0]},
        "microseconds": {"type": float, "default": 500.0, "help": "from a host to the switch"},
        "parameters": {"type": int, "nargs": "+", "default": [1 << 18, 1 << 20, 1 << 22]},
        "steps": {"type": int, "default": 12},
        "batch": {"type": int, "default": 2, "help": "sequences of each rank, in the steps"},
        "parts": {"nargs": "+", "choices": PARTS, "default": PARTS},
    }
    args = arguments(__doc__, 3, **options)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the hosts go
    about = {"hosts": args.hosts, "mtu": MTU, "model": MODEL, "bar": BAR}
    rows: list[dict[str, Any]] = []
    try:
        levels = fitted_levels()
        about["levels"] = asdict(levels)
        for mbit in args.mbit:
            rig = Rig(args.hosts, Network(mbit * 1e6, 2 * args.microseconds * 1e-6, MTU))
            if "exchanges" in args.parts:
                rows += exchanges(rig, 1, FLAT, NO_HAND_SHAKE, levels, args)
                of_two = BY_HOST | {way: how for way, how in FLAT.items() if "sharded" in way}
                rows += exchanges(rig, 2, of_two, NO_HAND_SHAKE, levels, args)
            if "as UCX comes" in args.parts:
                rows += exchanges(rig, 1, {"allreduce": {}}, {}, levels, args)
            if "steps" in args.parts:
                rows += whole_steps(rig, levels, args)
    except Unavailable as reason:
        sys.exit(f"no hosts here: {reason}")
    finally:  # what was measured before it was ended
        if judged := [abs(row["difference"]) for row in rows if not row["as_ucx_comes"]]:
            within = sum(difference <= BAR for difference in judged)
            print(f"{within} of {len(judged)} predictions within {BAR:.0%}; {max(judged):.0%} at most")
            save("four-hosts", about | {"rows": rows}, args.out)


def fitted_levels() -> Levels:
    """Measure two ranks of this machine, and two hosts that no slow network joins, and fit both levels."""
    within = timed(find_launcher(None, None), 2, FITTED, FLAT, {}, LEVEL_ROUNDS)
    rig = Rig(2, Network(FAST, 0.0, MTU))
    with tempfile.TemporaryDirectory() as scratch, rig.joined(Path(scratch)) as (mpirun, hosts):
        launcher = find_launcher(str(mpirun), hosts)
        apart = timed(launcher, 2, FITTED, {OWN_WAY: FLAT[OWN_WAY]}, NO_HAND_SHAKE | SLEEPING, LEVEL_ROUNDS)
    memory = {way: fitted(within, way, f"memory, {way}") for way in FLAT}
    return Levels(memory, fitted(apart, OWN_WAY, "own work"))


def fitted(found: list[dict[str, Any]], way: str, what: str) -> AlphaBeta:
    """The α and β of a way between two ranks, each of whom sends a part of an array's bytes and gets one."""
    points = [(SENT[way] * row["bytes"], min(row["seconds"][way])) for row in found]
    model = fit(points, 2, most_regimes=1)
    (line,), off = model.regimes, model.worst_error(points)
    numbers = f"α {duration(line.alpha)}, β {1e9 * line.beta:.3f} ns a byte"
    print(f"{what}: {numbers}, off by {off:.0%} at most for what it is fitted to", flush=True)
    return model


def timed(
    launcher: Launcher,
    ranks: int,
    sizes: Sequence[int],
    ways: dict[str, Any],
    how: dict[str, str],
    rounds: int,
) -> list[dict[str, Any]]:
    """Bytes of each size, and the seconds of its exchange by way and round."""
    asked = {"parameters": sizes, "ways": ways, "rounds": rounds}
    command = [sys.executable, timed_exchanges.__file__, json.dumps(asked)]
    ended = run_process(launcher.command(ranks, command), env={**os.environ, **how})
    found: list[dict[str, Any]] = jobs.answer(ended, "the exchanges")["sizes"]
    return found


def exchanges(
    rig: Rig, ranks: int, ways: dict[str, Any], how: dict[str, str], levels: Levels, args: Any
) -> list[dict[str, Any]]:
    """A row for each size and way, on hosts of so many ranks each."""
    with tempfile.TemporaryDirectory() as scratch, rig.joined(Path(scratch), ranks) as (mpirun, hosts):
        launcher = find_launcher(str(mpirun), hosts)
        found = timed(launcher, ranks * rig.hosts, args.parameters, ways, how, args.rounds)
    rows = []
    for each in found:
        predicted = rig.predicted(each["bytes"], 0.0, levels, ranks)
        what = {"what": "exchange", "ranks_of_a_host": ranks, "bytes": each["bytes"], "as_ucx_comes": not how}
        rows += [compared(rig, {**what, "way": way}, predicted[way], each["seconds"][way]) for way in ways]
    return rows


def whole_steps(rig: Rig, levels: Levels, args: Any) -> list[dict[str, Any]]:
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
    predicted = rig.predicted(size, alone, levels)
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
