"""Small measurements for tests of `distgpt bench` and of benchmarks/."""

import importlib.util
import json

from click.testing import CliRunner
from distgpt.commands.bench import train as train_command
from distgpt.core.comm.api import SerialComm
from distgpt.core.cpu.stages import Stage
from forward_work import Job, measure

from conftest import MPIRUN

FEW = Job("microgpt", "batched", 90, repeats=1)
SMALL = ("--n-layer", 1, "--n-embd", 16, "--n-head", 2, "--seq-len", 16, "--batch-size", 4, "--steps", 6)
STAGE, RANKS = ("mpi", 2) if MPIRUN and importlib.util.find_spec("mpi4py") else ("serial", 1)


def here(job, threads=1):
    return measure(job, Stage("serial", SerialComm(), threads))


def found_in(seconds, measured):
    found = {"ranks": 1, "threads": 1, "measured": measured, "seconds": seconds, "all_seconds": [seconds]}
    return found | {"loss": 3.0, "peak_memory": [5_000_000]}


def peak_here(what, words, launcher, ranks):
    assert words[:3] == ["bench", "train", "--measure-peak"] and (launcher is not None) == (RANKS == 2)
    here = ["serial" if word == "mpi" else str(word) for word in words[2:]]
    return json.loads(CliRunner().invoke(train_command, here).stdout)
