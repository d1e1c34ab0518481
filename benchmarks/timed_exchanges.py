"""One rank of four_hosts.py: the exchanges of real steps, without the passes, timed by size and by way.

    mpirun -n 4 python benchmarks/timed_exchanges.py \\
        '{"parameters": [262144], "ways": {"in one call": {"grad_sync": "allreduce"}}, "rounds": 3}'

Rank 0 prints a JSON object: for each number of parameters its bytes, and seconds by way and round.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

from distgpt.core.comm.agree import gather_bytes
from distgpt.core.comm.api import Comm
from distgpt.core.config import RunConfig
from distgpt.core.cpu.stages import Stage, open_stage
from distgpt.core.train.setup import make_steps
from distgpt.core.train.step import Step

AHEAD = 0.02  # seconds, in which all ranks hear when they begin
WIDTH = 64  # of models of one layer, whose vocabulary makes up the parameters
MODEL = {"n_layer": 1, "n_head": 1, "n_embd": WIDTH, "seq_len": 8, "tied": True}


def main() -> None:
    asked = json.loads(sys.argv[1])
    stage = open_stage("mpi", 1)
    found = [measured(stage, count, asked["ways"], asked["rounds"]) for count in asked["parameters"]]
    if stage.comm.rank == 0:
        print(json.dumps({"ranks": stage.comm.size, "sizes": found}))


def measured(stage: Stage, parameters: int, ways: dict[str, Any], rounds: int) -> dict[str, Any]:
    """All ways in turn, round by round, after one of each that warms up. Collective."""
    model = {**MODEL, "vocab_size": parameters // WIDTH}
    base = RunConfig().with_values({**model, "batch_size": stage.comm.size})
    steps = {way: make_steps(base.with_values(how), stage, lambda line: None) for way, how in ways.items()}
    seconds = [
        {way: slowest(stage.comm, exchanged(step, number)) for way, step in steps.items()}
        for number in range(rounds + 1)
    ]
    size = next(iter(steps.values())).model.layout.size * 4
    return {"bytes": size, "seconds": {way: [row[way] for row in seconds[1:]] for way in ways}}


def exchanged(step: Step, number: int) -> float:
    """The seconds that a step's exchange takes, begun by all ranks at once. Collective.

    All hosts are one machine and have one clock; ranks leave a barrier up to a message's way apart.
    """
    gradients, optimizer = step.model.grads.flat, step.optimizer
    gradients[:] = 1
    begun = step.comm.allreduce_max(int(1e9 * (time.perf_counter() + AHEAD))) / 1e9
    time.sleep(max(0.0, begun - time.perf_counter()))
    step.exchange.sum_gradients(number)
    step.exchange.compute_norm(optimizer)
    step.exchange.after_update(number, True)
    ended = time.perf_counter()
    assert (gradients[optimizer.own] == step.comm.size).all(), "a sum is wrong"
    return ended - begun


def slowest(comm: Comm, own: float) -> float:
    return float(max(np.frombuffer(each)[0] for each in gather_bytes(comm, np.float64(own).tobytes())))


if __name__ == "__main__":
    main()
