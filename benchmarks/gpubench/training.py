"""Training steps, ours and PyTorch's in turn: GPT-2 124M in bfloat16 and in float32, and `gpt-mini`."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from distgpt.comm.serial import SerialComm
from distgpt.config import ModelConfig, TrainConfig
from distgpt.config.presets import preset
from distgpt.data.batches import ArrayTokens, Batches
from distgpt.measure.jobs import for_torch
from distgpt.model.model import Model
from distgpt.model.optim import AdamW
from distgpt.training.step import Step
from gpubench.machine import DATASHEET_TFLOPS, Machine
from gpubench.section import Section

SETTLING = 2  # steps at the start of each turn that are not counted
Turn = Callable[[int], dict[str, Any]]

TOY = ModelConfig(vocab_size=13, seq_len=8, n_layer=2, n_head=3, n_embd=24, vocab_multiple=8)

COMPILED = {"compile": "default", "attention": "default"}
CUDNN = {"compile": "default", "attention": "cudnn"}
GRAPHS = {"compile": "reduce-overhead", "attention": "default"}
EAGER = {"compile": "", "attention": "default"}


class Ours:
    """A model in training, on random tokens."""

    def __init__(self, machine: Machine, shape: ModelConfig, batch: int, **how: Any) -> None:
        self._machine, tf32 = machine, how.pop("tf32", False)
        machine.free()
        before = machine.used()
        config = TrainConfig(
            steps=100_000, batch_size=batch, lr=3e-4, schedule="constant", warmup=0, clip=1.0, **how
        )
        model = Model(shape, machine.kernels(config.dtype, tf32=tf32))
        model.train()
        model.initialise(1)
        text = np.random.default_rng(1).integers(0, shape.vocab_size, 1 << 20).astype(np.int32)
        self._batches = Batches(ArrayTokens(text), shape.seq_len, batch, 1)
        self._step = Step(model, AdamW(model, config), SerialComm(), config)
        self._done = 0
        self.first_loss = self(1)["loss"]  # plans, compiles and chooses
        self(2)  # records
        self.bytes = None if before is None else machine.used() - before

    def __call__(self, steps: int) -> dict[str, Any]:
        marks = [self._machine.mark()]
        for _ in range(steps):
            outcome = self._step.launch(self._done, self._batches)
            self._done += 1
            marks.append(self._machine.mark())
        loss, _ = outcome.read()
        seconds = [self._machine.between(a, b) for a, b in pairwise(marks)]
        return {"seconds": seconds, "loss": loss}


def alternate(section: Section, name: str, turns: dict[str, Turn], rounds: int, steps: int) -> None:
    """Each in turn, round by round; whoever fails is out. Fills a row per contestant."""
    seconds: dict[str, list[float]] = {}
    turns = dict(turns)
    for _ in range(rounds):
        for who in list(turns):
            turn = turns.pop(who)
            with section.report.attempt(f"{name}: {who}"):
                answer = turn(steps + SETTLING)
                known = {key: value for key, value in answer.items() if key != "seconds"}
                seconds.setdefault(who, []).append(statistics.median(answer["seconds"][SETTLING:]))
                turns[who] = turn
                section.report.row(
                    f"{name}/{who}",
                    step_s=statistics.median(seconds[who]),
                    step_s_rounds=list(seconds[who]),
                    **known,
                )


def contest(
    section: Section,
    name: str,
    shape: ModelConfig,
    batch: int,
    ours: dict[str, dict[str, Any]],
    theirs: dict[str, dict[str, Any]],
    steps: int,
    rounds: int = 3,
) -> None:
    """One workload. `ours` and `theirs` are the contestants by name, and how they are to work.

    Peak memory is what CuPy's and PyTorch's allocators have taken from the device.
    """
    turns: dict[str, Turn] = {}
    for who, how in ours.items():
        with section.report.attempt(f"{name}: {who}"):
            mine = turns[who] = Ours(section.machine, shape, batch, **how)
            section.report.row(f"{name}/{who}", first_loss=mine.first_loss, peak_bytes=mine.bytes)
    task = {"do": "train", "batch": batch, "shape": for_torch(shape)}
    ready = section.start_peers({who: task | how for who, how in theirs.items()})
    for who, answer in ready.items():
        section.report.row(f"{name}/{who}", **answer)
        turns[who] = partial(_peer_turn, section, who)
    alternate(section, name, turns, rounds, steps)
    turns.clear()
    mine = None  # its memory goes with it
    section.free()
    rows, tokens = section.report.found["rows"], batch * shape.seq_len
    for who in (*ours, *ready):
        if "step_s" in rows.get(f"{name}/{who}", {}):
            section.report.row(f"{name}/{who}", tokens_per_s=tokens / rows[f"{name}/{who}"]["step_s"])
    crowded = {who: how for who, how in theirs.items() if who not in ready and _found_no_memory(section, who)}
    if crowded and ready and section.report.left > 90:
        section.report.note(f"{name}: {', '.join(crowded)} found no memory beside the others: again, alone")
        section.close()
        contest(section, name, shape, batch, ours, crowded, steps, rounds)


def _found_no_memory(section: Section, who: str) -> bool:
    errors = section.report.found["errors"]
    return any(who in each["where"] and "memory" in each["error"] for each in errors)


def _peer_turn(section: Section, who: str, steps: int) -> dict[str, Any]:
    return section.peers[who].ask(60, do="steps", steps=steps)


def gpt2(section: Section) -> ModelConfig:
    return TOY if section.quick else preset("gpt2").model


def utilization(section: Section, shape: ModelConfig, prefix: str) -> None:
    """Model FLOP/s over the peak: (6 N + 6 L C T) per token. N: all parameters but the position embedding,
    with the tied table counted once, as the head. 6 L C T is causal attention, half of the full square."""
    with section.report.attempt("peak"):
        peak = section.machine.peak_tflops(64 if section.quick else 8192)
        section.report.row("peak", bfloat16_tflops=peak, datasheet_tflops=DATASHEET_TFLOPS)
        c = shape.n_embd
        n = shape.padded_vocab * c + shape.n_layer * (4 * c * c + 2 * c * shape.hidden)
        flops = 6 * n + 6 * shape.n_layer * c * shape.seq_len
        for name, row in list(section.report.found["rows"].items()):
            if name.startswith(prefix) and "tokens_per_s" in row:
                reached = row["tokens_per_s"] * flops / 1e12
                section.report.row(
                    name, tflops=reached, mfu=reached / peak, mfu_datasheet=reached / DATASHEET_TFLOPS
                )


def train_gpt2(section: Section) -> None:
    shape = gpt2(section)
    low = {"precision": "bfloat16"}
    theirs = {"compiled": COMPILED | low, "compiled, cuDNN attention": CUDNN | low}
    for batch, steps, need in (
        ((2, 2, 0), (3, 2, 0), (4, 2, 0))
        if section.quick
        else (
            (64, 8, 0),
            (16, 16, 45),
            (32, 10, 60),
        )
    ):
        against = theirs if section.report.left > need else {}
        if not against:
            section.report.note(f"B = {batch}: no time left for PyTorch")
        for what, opponents, rounds in (("none", against, 3), ("mlp", {}, 1)):
            ours = {f"ours, recompute {what}": {"dtype": "bfloat16", "recompute": what}}
            contest(section, f"B={batch}", shape, batch, ours, opponents, steps, rounds)
    section.close()
    utilization(section, shape, "B=")


def train_mini(section: Section) -> None:
    shape = TOY if section.quick else replace(preset("gpt-mini").model, vocab_size=164)
    steps = 2 if section.quick else 50
    for dtype in ("float32", "bfloat16"):
        how = {"precision": dtype}
        theirs = {"compiled": COMPILED | how, "compiled, CUDA graphs": GRAPHS | how}
        contest(section, dtype, shape, 16, {"ours": {"dtype": dtype, "recompute": "none"}}, theirs, steps)
    section.close()


def train_float32(section: Section) -> None:
    shape, batch = gpt2(section), 2 if section.quick else 16
    ours = {
        "ours": {"dtype": "float32", "recompute": "none"},
        "ours, TF32": {"dtype": "float32", "recompute": "none", "tf32": True},
    }
    theirs = {"eager, TF32": EAGER, "compiled, TF32": COMPILED}
    theirs = {who: how | {"precision": "tf32"} for who, how in theirs.items()}
    contest(section, f"B={batch}", shape, batch, ours, theirs, 2 if section.quick else 8, rounds=2)
    section.close()
