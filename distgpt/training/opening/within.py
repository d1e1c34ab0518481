"""--within: measure this job's speed, and choose the depth that learns most in the time there is."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from distgpt.comm.agree import on_root
from distgpt.config import RunConfig
from distgpt.config.dial import Choice, Text, choose
from distgpt.config.presets import merged
from distgpt.data.batches import ArrayTokens
from distgpt.errors import Say
from distgpt.formatting import clock, parse_duration
from distgpt.stages import Notes, Stage, report_compiling
from distgpt.training.opening.dial import DEPTH, TOKENS, WITHIN, text_of
from distgpt.training.opening.open import make_steps
from distgpt.training.opening.plan import begins_anew, configure

KEPT = 0.985  # of the time: the last checkpoint and the weights are written after the last step
PROBES = (2, 4)  # depths to measure first; then the one that seems best, until that is measured
PROBE_TOKENS = 2e6  # of a run, by which the first probe's batch is chosen
STEP_SECONDS = 1.5  # time steps of a depth for this long
MOST_MEASURING = 0.04  # of the time


def with_clock(
    stage: Stage,
    preset: str | None,
    toml: Path | None,
    flags: Mapping[str, Any],
    out: Path | None,
    resume: str | None,
    say: Say,
) -> dict[str, Any]:
    """Return the flags with what --within stands for: the clock, and for a new run a depth too. Collective.

    A preset or a model that is given stays, and so does a depth.
    """
    if WITHIN not in flags:
        return dict(flags)
    seconds = KEPT * parse_duration(str(flags[WITHIN]))
    flags = {"train_minutes": seconds / 60, **flags}

    def is_open() -> bool:
        given = merged(toml, flags)
        stays = preset or given.keys() & {"preset", "init"}
        return not stays and begins_anew(preset, toml, flags, out, resume)

    if not on_root(stage.comm, is_open):
        return flags
    found = measured_choice(stage, toml, flags, seconds, say)
    return {**flags, DEPTH: found.depth, TOKENS: found.tokens}


def measured_choice(
    stage: Stage, toml: Path | None, flags: Mapping[str, Any], seconds: float, say: Say
) -> Choice:
    """Measure some depths and choose one. Collective."""
    comm, only = stage.comm, flags.get(DEPTH, 0)
    text = Text(*on_root(comm, lambda: [(t := text_of(merged(toml, flags))).tokens, t.vocab_size]))
    end, latest = stage.begun + seconds, stage.begun + MOST_MEASURING * seconds
    speeds: dict[int, float] = {}

    def best(only: int) -> tuple[Choice, bool]:
        """Return the best choice by the speeds so far, and whether there is time to measure more."""

        def decide() -> list[float]:
            now = time.monotonic()
            found, is_early = choose(max(1.0, end - now), speeds, text, only), now < latest
            return [found.depth, found.tokens, found.bits_per_byte, is_early]

        depth, tokens, bits, is_early = on_root(comm, decide)
        return Choice(depth, tokens, bits), is_early

    report_compiling(comm, say)
    if comm.rank == 0:
        say("--within: measuring this machine")
    probes = [only] if only else list(PROBES)
    while probes:
        depth = probes.pop(0)
        tokens = best(depth)[0].tokens if speeds else PROBE_TOKENS
        speeds[depth] = measured_speed(stage, _run(stage, toml, flags, depth, tokens, text))
        gc.collect()  # frees the model
        choice, is_early = best(only)
        if not is_early:
            break
        if not probes and choice.depth not in speeds:
            probes.append(choice.depth)
    known = ", ".join(f"{depth}: {rate:,.0f}" for depth, rate in sorted(speeds.items()))
    if comm.rank == 0:
        say(
            f"--within: tokens/s by depth {known}. In {clock(max(0.0, end - time.monotonic()))} depth"
            f" {choice.depth} reads about {choice.tokens / 1e6:.2g} M tokens and comes to about"
            f" {choice.bits_per_byte:.2f} bits per byte"
        )
    return choice


def measured_speed(stage: Stage, run: RunConfig) -> float:
    """Return the tokens/s of a run's steps on random tokens. Collective."""
    per_step = run.train.batch_size * run.model.seq_len
    ids = np.random.default_rng(0).integers(0, run.model.vocab_size, per_step + 1, np.uint32)
    step, batches = make_steps(run, replace(stage, notes=Notes()), ArrayTokens(ids), lambda text: None)

    def seconds(first: int, steps: int) -> float:
        """Return the mean seconds of these steps, on the slowest rank."""
        begun = time.perf_counter()
        for number in range(first, first + steps):
            result = step.launch(number, batches)
        result.read()
        return stage.comm.allreduce_max(int(1e6 * (time.perf_counter() - begun))) / 1e6 / steps

    seconds(0, 2)  # compiles, tunes
    once = max(1e-4, seconds(2, 1))
    return per_step / min(once, seconds(3, min(50, max(1, int(STEP_SECONDS / once)))))


def _run(
    stage: Stage, toml: Path | None, flags: Mapping[str, Any], depth: int, tokens: float, text: Text
) -> RunConfig:
    """Return the run of a depth and these tokens, with what can be measured without a text. Collective."""
    _, run = configure(stage.comm, None, toml, {**flags, DEPTH: depth, TOKENS: tokens})
    t = replace(run.train, grad_sync="allreduce" if run.train.grad_sync == "auto" else run.train.grad_sync)
    t = replace(t, balance="even")
    return RunConfig(replace(run.model, vocab_size=text.vocab_size), t)
