"""`distgpt bench infer`: time concurrent generation in each dtype."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from distgpt.core.base.errors import UsageError
from distgpt.core.base.formatting import duration
from distgpt.core.comm.affinity import affinity
from distgpt.core.comm.api import SerialComm
from distgpt.core.config import QUANTIZED_DTYPES, ModelConfig
from distgpt.core.config.presets import preset
from distgpt.core.cpu.stages import open_stage
from distgpt.core.generate.engine import Engine
from distgpt.core.generate.engine_setup import slots_for, warmup_pass
from distgpt.core.generate.request import Request
from distgpt.core.saved.modelfile import random_model
from distgpt.measure.jobs import BenchOptions, Row, say
from distgpt.show.page import Block, Column, tabulated

OURS, BYTES = "distgpt", 256  # bytes: the vocabulary of presets that set none
REPEATS = 4  # measurements; the shortest counts


@dataclass(frozen=True, slots=True)
class InferOptions(BenchOptions):
    """Options of the command. `rounds`: how often everything is measured."""

    preset: str = "gpt2"
    threads: int | None = None
    dtypes: Sequence[str] = ("float32", "bfloat16", *QUANTIZED_DTYPES)
    requests: Sequence[int] = (1, 8, 32)
    prompt: int = 256
    new: int = 64
    rounds: int = 1


def bench(options: InferOptions) -> None:
    job = job_of(options)
    options.prepare()
    sides = [(OURS, dtype) for dtype in options.dtypes]
    result = measure(options, sides, job, lambda who, job: own_seconds(job))
    options.finish("infer", options.preset, result, blocks(result))


def job_of(options: InferOptions) -> Row:
    """Return the job of every process. Raise an error if it does not fit the context."""
    config = config_of(options.preset)
    if options.prompt + options.new > config.seq_len:
        raise UsageError(
            f"{options.prompt} + {options.new} tokens exceed the context of {config.seq_len}; "
            "lower --prompt or --new"
        )
    threads = options.threads or affinity().threads(SerialComm())
    return {"threads": threads, "prompt": options.prompt, "new": options.new, "repeats": REPEATS}


def measure(
    options: InferOptions,
    sides: Sequence[tuple[str, str]],
    job: Row,
    seconds: Callable[[str, Row], dict[str, Any]],
) -> dict[str, Any]:
    """Measure all sides (name, dtype) alternately. `seconds` measures one."""
    runs: list[Row] = []
    for turn in range(options.rounds):
        for requests in options.requests:
            for who, dtype in sides:
                say(f"{who}, {dtype}, {requests} at once, round {turn + 1}")
                asked = job | {"dtype": dtype, "requests": requests, "preset": options.preset}
                runs.append(asked | {"who": who} | seconds(who, asked))
    rows = _rows(options, runs)
    return {"preset": options.preset, "threads": job["threads"], "rows": rows, "runs": runs}


def config_of(name: str) -> ModelConfig:
    config = preset(name).model
    return config if config.vocab_size else replace(config, vocab_size=BYTES)


def _rows(options: InferOptions, runs: Sequence[Row]) -> list[Row]:
    """Return the medians over all rounds, and the resulting rates."""
    result: dict[tuple[Any, ...], list[Row]] = {}
    for each in runs:
        result.setdefault((each["requests"], each["who"], each["dtype"]), []).append(each)
    rows = []
    for (requests, who, dtype), of in result.items():
        first, whole = (median(each[key] for each in of) for key in ("first", "whole"))
        row = {"who": who, "dtype": dtype, "requests": requests, "first": first, "whole_s": whole}
        row |= {"prefill": requests * options.prompt / first, "whole": requests * options.new / whole}
        row["decode"] = requests * (options.new - 1) / max(whole - first, 1e-9)
        rows.append(row)
    return rows


def own_seconds(job: Row) -> dict[str, Any]:
    """Return the seconds until all requests have their first new token, and their last."""
    dtype, requests = job["dtype"], job["requests"]
    stage = open_stage("serial", job["threads"])
    model = random_model(config_of(job["preset"]), dtype, stage.kernels, 1)
    warmup_pass(model)
    slots = slots_for(model, requests)
    random = np.random.default_rng(1)
    shape = requests, job["prompt"]
    prompts = random.integers(0, model.config.vocab_size, shape).tolist()

    def seconds(new: int) -> float:
        begun = time.perf_counter()
        engine = Engine(slots, None)
        for prompt in prompts:
            engine.submit(Request(prompt, new))
        while not engine.is_idle:
            engine.step()
        return time.perf_counter() - begun

    seconds(2)
    both = [(seconds(1), seconds(job["new"])) for _ in range(job["repeats"])]
    first, whole = (min(each) for each in zip(*both, strict=True))
    return {"first": first, "whole": whole}


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


def blocks(found: dict[str, Any]) -> list[Block]:
    asked = found["runs"][0]
    note = (
        f"{found['preset']} with random weights, greedy, {asked['prompt']} + {asked['new']} tokens each,"
        f" {found['threads']} threads; whole: new tokens over all of the time, prompts included."
    )
    return [tabulated(COLUMNS, found["rows"], "Inference", note)]
