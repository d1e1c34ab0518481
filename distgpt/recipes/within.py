"""--within: measure this job's speed, and choose the depth that learns most in the time there is."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from distgpt.core.base.errors import Say
from distgpt.core.base.formatting import clock, count, parse_duration
from distgpt.core.comm.agree import on_root
from distgpt.core.comm.api import Comm
from distgpt.core.components import components
from distgpt.core.config import RunConfig
from distgpt.core.config.asked import Asked
from distgpt.core.cpu import first_use
from distgpt.core.cpu.stages import Notes, Stage, report_compiling
from distgpt.core.data.batches import ArrayTokens, Batches
from distgpt.core.data.textfile import resolve_data
from distgpt.core.data.tokenizers import AUTO, BYTE, load_tokenizer
from distgpt.core.train.plan import DTYPE, begins_anew, is_open
from distgpt.core.train.resume import saved_run
from distgpt.core.train.run import Run
from distgpt.core.train.seams import KEPT
from distgpt.core.train.setup import compile_once_per_node, make_steps
from distgpt.corpora.tokenizers.bpe import LARGE
from distgpt.corpora.tokenizers.learn import learned_size
from distgpt.recipes.depth import holds_out, text_of, titled
from distgpt.recipes.derived import configured, everywhere
from distgpt.recipes.difficulty import difficulty
from distgpt.recipes.scaling import EXPECTED_WITHIN, Choice, Text, bits_range, choose

STEP_SECONDS = 1.5  # time steps of a depth for this long
MOST_MEASURING = 0.04  # of the time
FEWER = 0.8  # of the planned steps: others use the machine. Evaluations and writing take some of the time.
SHORTER = 0.9  # a run that needs more of its time than this takes all of it


@dataclass(frozen=True, slots=True)
class Probes:
    """The depths to measure first; then comes the one that seems best, until that is measured.

    As long as fewer than `needed` are measured, another one begins before `most` of the time is over, else
    before MOST_MEASURING of it; and `tokens` of a run decide its batch, else what is left of the time by the
    speeds so far. `warms_up`: the first one compiles and chooses kernels, which does not count.
    """

    depths: tuple[int, ...]
    tokens: float
    needed: int
    most: float
    warms_up: bool


# Smaller models leave most of a GPU idle: their tokens/s say nothing of those of larger ones.
GPU_PROBES = Probes((4, 12), 2e8, needed=2, most=0.3, warms_up=True)
CPU_PROBES = Probes((2, 4), 2e6, needed=1, most=MOST_MEASURING, warms_up=False)


def with_clock(asked: Asked, stage: Stage, say: Say) -> Asked:
    """Return what --within stands for: the clock, for a new run a depth or its number of steps too.

    A preset or a model that is given stays, and so does a depth. The run's time begins when its loops are
    compiled: that happens once on a machine, and would take a third of a minute's run. Collective.
    """
    seconds = parse_duration(str(asked.within))
    given = {**asked.given, "train_minutes": seconds / 60, "within_minutes": seconds / 60}
    asked = replace(titled(asked), within=None, given=given)
    if not on_root(stage.comm, lambda: _chooses(asked)):
        asked = everywhere(stage.comm, lambda: _as_before(asked))
        return _with_steps(asked, stage, seconds, say)
    text, held_out = _text(stage.comm, asked)
    probes = GPU_PROBES if stage.on_gpu else CPU_PROBES

    def smallest() -> RunConfig:
        return _run(asked, stage, asked.depth or 1, probes.tokens, text)

    compiled = _compiled(stage, smallest, bool(learned_size(text.tokenizer)), say)
    found, rest = measured_choice(asked, compiled, seconds, text, say, probes)
    if stage.comm.rank == 0:
        _report(found, rest, seconds, text, held_out, say)
    # If it needs little of the time, its steps end it: a clock would count what it does before the first one.
    given["train_minutes"] = 0.0 if rest < seconds and found.seconds < seconds / 2 else rest / 60
    uncounted, bits = compiled.begun - stage.begun, found.bits_per_byte
    asked = replace(asked, given=given, expected_bits=bits, uncounted=uncounted)
    return replace(asked, depth=found.depth, tokens=found.tokens)


def outcome(expected: float, run: Run) -> str:
    """Compare a new run with what was expected of it, and say why it differs; "" if nothing was expected."""
    t, made, best = run.settings, run.progress.step, run.checkpoints.best
    why = []
    if t.train_minutes and made < FEWER * t.steps:
        fewer = f"about {count(t.steps, 'step')}, of which {made:,} were taken in the time"
        why.append(f"{fewer}: do other programs use this machine?")
    reached = run.bits_per_byte(best.loss) if best else None
    if not expected or reached is None:
        return "".join(why)
    trained = run.report.bits_per_byte(run.progress.loss)
    if reached > (most := (1 + EXPECTED_WITHIN) * expected):
        if trained and trained <= most:
            why.append(f"training reached {trained:.2f}, so the text that is held out differs from the rest")
        why = why or ["this text is harder than those that the estimate was made for"]
    return "; ".join([f"{bits_range(expected)} bits per byte, reached {reached:.2f}", *why])


def _chooses(asked: Asked) -> bool:
    """Return whether a new run has a model to be chosen."""
    preset, file, given = asked.layers()
    return not preset and "init" not in {**file, **given} and begins_anew(asked)


def _as_before(asked: Asked) -> Asked:
    """Let a run that needs less time keep its own, by the same command again, as of a requeued job."""
    given = dict(asked.given)
    before = saved_run(asked)
    if before and before.train.within_minutes == given["within_minutes"]:
        del given["train_minutes"]
    return replace(asked, given=given)


def _with_steps(asked: Asked, stage: Stage, seconds: float, say: Say) -> Asked:
    """Return what is asked for with the steps that a new run of this model may take. Collective.

    Its warm-up is a part of them.
    """
    if asked.given.get("chats") or not on_root(stage.comm, lambda: begins_anew(asked)):
        return asked

    def entries() -> int:
        tokenizer = asked.named("tokenizer")
        named = {"tokenizer": BYTE if tokenizer in (None, AUTO) else tokenizer}
        return text_of({"data": asked.named("data") or "corpus", **named}).vocab_size

    text = Text(1.0, on_root(stage.comm, entries))
    run = _run(asked, stage, asked.depth, 0.0, text)
    compiled = _compiled(stage, lambda: run, bool(learned_size(run.train.tokenizer)), say)
    rate, _ = measured_speed(compiled, run, warm_up=1, most=MOST_MEASURING * seconds)
    gc.collect()  # frees the model
    left = on_root(stage.comm, lambda: compiled.begun + KEPT * seconds - time.monotonic())
    steps = max(1, int(rate * left / (run.train.batch_size * run.model.seq_len)))
    if stage.comm.rank == 0:
        say(f"--within: this machine takes about {count(steps, 'step')} with {rate:,.0f} tokens/s")
    return replace(
        asked, derived={"steps": steps}, tokens=rate * left, uncounted=compiled.begun - stage.begun
    )


def _report(found: Choice, rest: float, seconds: float, text: Text, held_out: bool, say: Say) -> None:
    """Say what was chosen, and what the run does not do."""
    whose = "the text that is held out" if held_out else "such text that it has not seen"
    say(
        f"--within: depth {found.depth} reads about {found.tokens / 1e6:.2g} M tokens,"
        f" {found.tokens / text.tokens:.2g} times the text, and should reach"
        f" {bits_range(found.bits_per_byte)} bits per byte on {whose}"
    )
    if rest < seconds:
        say(
            f"--within: the run ends after about {clock(rest)}, as a text this short is learned by heart"
            " if it is read more often; a longer one would use all of the time"
        )
    if not held_out:
        say("--within: no text is held out to check this estimate; --val-fraction 0.1 holds out a tenth")


def _text(comm: Comm, asked: Asked) -> tuple[Text, bool]:
    """Return what is known of the text before it is read, and whether some of it is held out. Collective."""

    def find() -> list[Any]:
        given = asked.settings()
        text = text_of(given)
        hard = difficulty(resolve_data(str(given.get("data", "corpus"))))
        return [text.tokens, text.vocab_size, text.tokenizer, hard, holds_out(given)]

    *found, held_out = on_root(comm, find)
    return Text(*found), held_out


def _compiled(stage: Stage, configured: Callable[[], RunConfig], learns_bpe: bool, say: Say) -> Stage:
    """Compile what training and a sample need, and begin the stage's time after that. Collective."""
    stage.notes.report_to(say)
    report_compiling(stage.comm, say)
    begun = time.monotonic()
    run = configured()
    kernels = stage.kernels(run.train.dtype, run.train.matmul_backend)
    compile_once_per_node(stage, kernels, run, components().strategy(run.train, stage.comm.size))
    if learns_bpe and stage.comm.rank == 0:  # which encodes the text
        load_tokenizer("bpe:257", text := "ab " * (LARGE // 3 + 1)).encode(text)
    stage.comm.barrier()
    # On any rank: the others wait for it.
    has_compiled = stage.comm.allreduce_max(int(first_use.has_compiled()))
    return replace(stage, begun=stage.begun + has_compiled * (time.monotonic() - begun))


def measured_choice(
    asked: Asked,
    stage: Stage,
    seconds: float,
    text: Text,
    say: Say,
    probes: Probes = CPU_PROBES,
) -> tuple[Choice, float]:
    """Measure some depths and choose one. Return it, and the seconds of the run, which may need fewer.

    Collective.
    """
    comm, only = stage.comm, asked.depth or 0
    end, warm = stage.begun + KEPT * seconds, 0.0
    speeds: dict[int, float] = {}

    def is_early(now: float) -> bool:
        most = probes.most if len(speeds) < probes.needed else MOST_MEASURING
        return now - stage.begun - warm < most * seconds

    def best(only: int) -> tuple[Choice, bool]:
        """Return the best choice by the speeds so far, and whether there is time to measure more."""

        def decide() -> list[float]:
            now = time.monotonic()
            found = choose(max(1.0, end - now), speeds, text, only)
            return [found.depth, found.tokens, found.seconds, found.bits_per_byte, is_early(now)]

        *found, more = on_root(comm, decide)
        return Choice(*found), more

    depths = [only] if only else list(probes.depths)
    while depths:
        depth = depths.pop(0)
        tokens = probes.tokens if len(speeds) < probes.needed else best(depth)[0].tokens
        speeds[depth], cold = measured_speed(stage, _run(asked, stage, depth, tokens, text))
        warm = warm or cold * probes.warms_up
        if comm.rank == 0:
            say(f"--within: this machine trains depth {depth} with {speeds[depth]:,.0f} tokens/s")
        gc.collect()  # frees the model
        choice, more = best(only)
        if not more:
            break
        if not depths and choice.depth not in speeds:
            depths.append(choice.depth)
    used = on_root(comm, lambda: time.monotonic() - stage.begun)
    needed = (used + choice.seconds) / KEPT
    return choice, needed if needed < SHORTER * seconds else seconds


def measured_speed(
    stage: Stage, run: RunConfig, warm_up: int = 2, most: float = STEP_SECONDS
) -> tuple[float, float]:
    """Return the tokens/s of a run's steps on random tokens, and the seconds before. Collective."""
    opened = time.monotonic()
    per_step = run.train.batch_size * run.model.seq_len
    ids = np.random.default_rng(0).integers(0, run.model.vocab_size, per_step + 1, np.uint32)
    batches = Batches.of_run(ArrayTokens(ids), run)
    step = make_steps(run, replace(stage, notes=Notes()), lambda text: None)

    def seconds(first: int, steps: int) -> float:
        """Return the mean seconds of these steps, on the slowest rank."""
        begun = time.perf_counter()
        for number in range(first, first + steps):
            result = step.launch(number, batches)
        result.wait()
        step.model.kernels.to_host(step.model.weights.flat[:1])  # the last update, too
        return stage.comm.allreduce_max(int(1e6 * (time.perf_counter() - begun))) / 1e6 / steps

    seconds(0, warm_up)  # compiles, tunes
    cold = time.monotonic() - opened
    once = max(1e-4, seconds(warm_up, 1))
    more = min(50, max(1, int(min(most, STEP_SECONDS) / once)))
    return per_step / min(once, seconds(warm_up + 1, more)), cold


def _run(asked: Asked, stage: Stage, depth: int | None, tokens: float, text: Text) -> RunConfig:
    """Return the run of a depth and these tokens, with what can be measured without a text. Collective."""
    asked = replace(asked, depth=depth, tokens=tokens)
    run = configured(stage.comm, asked)
    if on_root(stage.comm, lambda: is_open(asked)):
        run = run.with_values({DTYPE: stage.auto_dtype(lambda: run.train.matmul).name})
    t = replace(run.train, balance="even")
    return RunConfig(replace(run.model, vocab_size=run.model.vocab_size or text.vocab_size), t)
