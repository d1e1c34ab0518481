"""`distgpt bench infer`: requests generated side by side, by every dtype, beside peers in turn."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from distgpt.checked import parse_json
from distgpt.comm.cores import usable_cores
from distgpt.config import ModelConfig, nearest
from distgpt.config.presets import preset
from distgpt.errors import UsageError
from distgpt.inference.engine import Engine
from distgpt.inference.request import Request
from distgpt.inference.start import chunk_for, lanes_for, rehearse
from distgpt.kernels.cpu_int8 import Int8Kernels
from distgpt.machine.processes import run
from distgpt.machine.stages import open_stage
from distgpt.measure import jobs
from distgpt.measure.bench.results import BenchOptions, Row, say
from distgpt.model.model import Model
from distgpt.model.packed import int8_of
from distgpt.show.page import Block, Column, tabulated
from distgpt.show.tables import terminal_table
from distgpt.units import duration

PROGRAM = Path(__file__).parents[1] / "peer" / "peer_inference.py"
PEERS = {
    "transformers": ("float32", "bfloat16"),
    "ctranslate2": ("float32", "int8"),
    "llama.cpp": ("float32", "q8_0", "q4_0"),
}
OURS, BYTES = "distgpt", 256  # the vocabulary of a preset that has none: bytes
REPEATS = 4  # of a measurement; the shortest counts


@dataclass(frozen=True, slots=True)
class InferOptions(BenchOptions):
    """The command line. `rounds`: how often everything is measured, in turn."""

    preset: str = "gpt2"
    threads: int | None = None
    dtypes: Sequence[str] = ("float32", "bfloat16", "int8")
    requests: Sequence[int] = (1, 8, 32)
    prompt: int = 256
    new: int = 64
    peers: Sequence[str] = ()
    peer_python: str = sys.executable
    rounds: int = 1


def bench(options: InferOptions) -> None:
    found = measure(options)
    options.finish("infer", options.preset, found, text(found))


def measure(options: InferOptions) -> dict[str, Any]:
    config = config_of(options.preset)
    if options.prompt + options.new > config.seq_len:
        raise UsageError(
            f"{options.prompt} + {options.new} tokens do not fit the context of {config.seq_len}: "
            "choose --prompt and --new"
        )
    options.prepare()
    threads = options.threads or len(usable_cores())
    job: Row = {"threads": threads, "prompt": options.prompt, "new": options.new, "repeats": REPEATS}
    runs: list[Row] = []
    with tempfile.TemporaryDirectory(prefix=".models-", dir=options.out.resolve()) as folder:
        sides = [(OURS, dtype) for dtype in options.dtypes]
        if options.peers:
            job |= {"folder": folder, "shape": _shape(config)}
            sides += _peers(options, job)
        for turn in range(options.rounds):
            for requests in options.requests:
                for who, dtype in sides:
                    say(f"{who}, {dtype}, {requests} at once, round {turn + 1}")
                    asked = job | {"dtype": dtype, "requests": requests, "preset": options.preset}
                    seconds = _seconds(options, who, asked)
                    asked.pop("folder", None)  # which is gone by the time that somebody reads this
                    runs.append(asked | {"who": who} | seconds)
    return {"preset": options.preset, "threads": threads, "rows": _rows(options, runs), "runs": runs}


def config_of(name: str) -> ModelConfig:
    config = preset(name).model
    return config if config.vocab_size else replace(config, vocab_size=BYTES)


def _shape(config: ModelConfig) -> dict[str, int]:
    """Of a GPT-2; the peers compute no others."""
    if config != ModelConfig(**{**asdict(ModelConfig()), **_sizes(config)}):
        raise UsageError("peers are measured on GPT-2's architecture: choose --preset gpt2, or no --peer")
    sizes = _sizes(config)
    names = {"vocab": "vocab_size", "context": "seq_len", "width": "n_embd"}
    names |= {"layers": "n_layer", "heads": "n_head"}
    return {theirs: sizes[ours] for theirs, ours in names.items()}


def _sizes(config: ModelConfig) -> dict[str, int]:
    return {name: getattr(config, name) for name in ("vocab_size", "seq_len", "n_layer", "n_head", "n_embd")}


def _peers(options: InferOptions, job: Row) -> list[tuple[str, str]]:
    for name in options.peers:
        if name not in PEERS:
            raise UsageError(f"unknown peer {name!r}{nearest(name, PEERS)}")
    say("a model for the peers")
    there = _ask_peer(options, "models", job)["peers"]
    if missing := [name for name in options.peers if name not in there]:
        raise UsageError(f"{options.peer_python} lacks what {missing[0]} needs: choose another --peer-python")
    return [(name, dtype) for name in options.peers for dtype in PEERS[name]]


def _ask_peer(options: InferOptions, command: str, job: Row) -> dict[str, Any]:
    ended = run([options.peer_python, PROGRAM, command, json.dumps(job)], env=jobs.unsteered())
    return jobs.answer(ended, f"the peer's {command}")


def _seconds(options: InferOptions, who: str, job: Row) -> dict[str, Any]:
    if who == OURS:
        return jobs.ask("distgpt bench infer", ["bench", "infer", "--measure", json.dumps(job)])
    return _ask_peer(options, "measure", job | {"peer": who})


def _rows(options: InferOptions, runs: Sequence[Row]) -> list[Row]:
    """The middle of all rounds, and what is computed a second."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for each in runs:
        found.setdefault((each["requests"], each["who"], each["dtype"]), []).append(each)
    rows = []
    for (requests, who, dtype), of in found.items():
        first, whole = (median(each[key] for each in of) for key in ("first", "whole"))
        row = {"who": who, "dtype": dtype, "requests": requests, "first": first, "whole_s": whole}
        row |= {"prefill": requests * options.prompt / first, "whole": requests * options.new / whole}
        row["decode"] = requests * (options.new - 1) / max(whole - first, 1e-9)
        rows.append(row)
    return rows


# -- one measurement of ours, in a process of its own


def measure_own(asked: str) -> None:
    """Print the seconds to the first new tokens of all requests, and to their last."""
    job = parse_json(asked)
    dtype, requests = job["dtype"], job["requests"]
    stage = open_stage("serial", job["threads"])
    model = Model(config_of(job["preset"]), stage.kernels("float32" if dtype == "int8" else dtype))
    model.initialise(1)
    if dtype == "int8":
        model = int8_of(model, Int8Kernels(job["threads"]))
    rehearse(model)
    lanes = lanes_for(model, requests)
    random = np.random.default_rng(1)
    shape = requests, job["prompt"]
    prompts = random.integers(0, model.config.vocab_size, shape).tolist()

    def seconds(new: int) -> float:
        begun = time.perf_counter()
        engine = Engine(lanes, None, chunk_for(model))
        for prompt in prompts:
            engine.submit(Request(prompt, new))
        while not engine.is_idle:
            engine.step()
        return time.perf_counter() - begun

    seconds(2)
    both = [(seconds(1), seconds(job["new"])) for _ in range(job["repeats"])]
    first, whole = (min(each) for each in zip(*both, strict=True))
    print(json.dumps({"first": first, "whole": whole}))


# -- showing

COLUMNS: tuple[Column, ...] = (
    ("requests", "requests", str),
    ("who", "who", str),
    ("dtype", "dtype", str),
    ("prefill, tokens/s", "prefill", "{:,.0f}".format),
    ("decode, tokens/s", "decode", "{:,.1f}".format),
    ("whole, tokens/s", "whole", "{:,.1f}".format),
    ("first tokens", "first", duration),
    ("all", "whole_s", duration),
)


def text(found: dict[str, Any]) -> str:
    """For a terminal."""
    table = tabulated(COLUMNS, found["rows"])
    return "\n".join([terminal_table(table.columns, table.rows), "", _note(found)])


def blocks(found: dict[str, Any]) -> list[Block]:
    """For the report."""
    return [tabulated(COLUMNS, found["rows"], "Inference", _note(found))]


def _note(found: dict[str, Any]) -> str:
    asked = found["runs"][0]
    return (
        f"{found['preset']} with random weights, greedy, {asked['prompt']} + {asked['new']} tokens a request,"
        f" {found['threads']} threads; whole: new tokens over all of the time, prompts included."
    )
