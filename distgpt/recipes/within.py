"""--within: measure this job's speed, and choose the depth with the lowest expected loss in time."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from distgpt.callbacks.forecast import Forecast, bits_range
from distgpt.core.base.errors import Say
from distgpt.core.base.formatting import clock, count, parse_duration
from distgpt.core.comm.agree import on_root
from distgpt.core.components import components
from distgpt.core.config import SETTINGS, RunConfig
from distgpt.core.config.run_request import RunRequest
from distgpt.core.cpu import first_use
from distgpt.core.cpu.stages import Notes, Stage, report_compiling
from distgpt.core.data.batches import ArrayTokens, Batches
from distgpt.core.data.tokenizers import AUTO, BYTE, load_tokenizer
from distgpt.core.train.interfaces import KEPT
from distgpt.core.train.plan import DTYPE, begins_anew, is_open
from distgpt.core.train.resume import saved_run
from distgpt.core.train.run import Run
from distgpt.core.train.setup import compile_once_per_node, make_steps
from distgpt.corpora.mixture import paths_of
from distgpt.corpora.tokenizers.bpe import LARGE, learned_size
from distgpt.recipes.depth import difficulty, holds_out, text_of, titled
from distgpt.recipes.derived import configured
from distgpt.recipes.ensemble import is_possible
from distgpt.recipes.scaling import Choice, Text, choose, ensemble_factor, member_seconds

STEP_SECONDS = 1.5  # timing of one depth
MOST_MEASURING = 0.04  # fraction of the time
# If a run takes a smaller fraction of its planned steps, other programs probably use the machine. Evaluations
# and writing need some of the time.
FEWER = 0.8
MANY = 3  # passes over the text
# Relative error of the prediction before the run, from the laws and zlib (docs/explanation/learning.md).
UNMEASURED = 0.2
SHORTER = 0.9  # a run that needs a larger fraction takes all its time


# Depths to measure first, on GPUs or not. Then the expected best depth is measured, repeatedly. Small models
# leave most of a GPU idle, so their tokens/s do not predict the speed of larger models.
FIRST = {True: (4, 12), False: (2, 4)}
FIRST_TOKENS = {True: 2e8, False: 2e6}  # tokens of the run that sets their batch
NEEDED = {True: 2, False: 1}  # depths measured before a choice
MOST_FOR_NEEDED = 0.3  # larger than MOST_MEASURING, as a GPU's first depth selects kernels


def with_clock(request: RunRequest, stage: Stage, say: Say) -> RunRequest:
    """Replace --within by a time limit and, in a new run, by a depth or a number of steps.

    A given preset, model or depth stays. The run's time starts after its loops are compiled, which happens
    once per machine and would take 1/3 of a one-minute run. Collective.
    """
    seconds = parse_duration(str(request.within))

    def models() -> int:
        """Return the number of models of an ensemble; 0: choose."""
        before = saved_run(request)
        usual = before.train.ensemble if before else int(bool(request.family))  # others have no ensembles
        given = request.settings().get("ensemble", usual)
        SETTINGS["ensemble"].check("ensemble", given or 1)
        assert isinstance(given, int)
        return given

    size = on_root(stage.comm, models)
    request = replace(titled(_timed(request, seconds, size or 1)), within=None)

    def chooses() -> bool:
        """Return whether a new run needs a choice of model."""
        preset, file, given = request.layers()
        return not preset and "init" not in {**file, **given} and begins_anew(request)

    if not on_root(stage.comm, chooses):
        return _with_steps(request, stage, member_seconds(seconds, size or 1), size or 1, say)
    text, held_out = on_root(stage.comm, lambda: _text(request.settings()))

    def smallest() -> RunConfig:
        return _run(request, stage, request.depth or 1, FIRST_TOKENS[stage.on_gpu], text)

    compiled = _compiled(stage, smallest, bool(learned_size(text.tokenizer)), say)
    if size == 0 and not is_possible(smallest()):
        size = 1
    result, rest = measured_choice(request, compiled, seconds, text, size, say)
    if stage.comm.rank == 0:
        read = f"{result.tokens / 1e6:.2g} M tokens"
        times = f"{result.tokens / text.tokens:.2g} times the text"
        likely = f"{bits_range(result.bits_per_byte, UNMEASURED)} bits per byte on unseen text"
        model = f"depth {result.depth}"
        if result.ensemble > 1:
            model = f"an ensemble of {result.ensemble} models of {model}, each of which"
        say(f"--within: {model} reads about {read}, {times}; predicted: {likely}")
        if rest < seconds:
            say(f"--within: the run ends after about {clock(rest)}, with a pass over the text")
        if not held_out:
            say("--within: no validation data to check this estimate; set --val-fraction 0.1")
    uncounted, bits = _uncounted(stage, compiled, result.ensemble), result.bits_per_byte
    request = replace(_timed(request, seconds, result.ensemble), expected_bits=bits, uncounted=uncounted)
    return replace(request, depth=result.depth, tokens=result.tokens)


def _timed(request: RunRequest, seconds: float, size: int) -> RunRequest:
    """Return the request with the time of each model of an ensemble of this size."""
    minutes = member_seconds(seconds, size) / 60
    given = {**request.given, "train_minutes": minutes, "within_minutes": minutes, "ensemble": size}
    return replace(request, given=given)


def _text(given: Mapping[str, Any]) -> tuple[Text, bool]:
    """Return the estimated facts of the text, and whether part is held out. Only on rank 0."""
    shares = paths_of(str(given.get("data", "corpus")))
    hard = sum(share * difficulty(path) for path, share in shares.items())
    return replace(text_of(given), difficulty=hard), holds_out(given)


def outcome(expected: float, run: Run) -> tuple[str, str]:
    """Compare a run with its last prediction and explain a difference. Return a label and the text.

    `expected`: the bits per byte predicted before the run, or 0. Without a prediction, the text only says if
    the run took few steps.
    """
    t, made, best = run.settings, run.progress.step, run.checkpoints.best
    why = []
    if t.train_minutes and made < FEWER * t.steps:
        fewer = f"{made:,} of about {count(t.steps, 'step')} were possible in the time"
        why.append(f"{fewer}; other programs may be using this machine")
    reached = run.bits_per_byte(best.loss) if best else None
    bits, off = _predicted(expected, run)
    if not bits or reached is None:
        return "note", "".join(why)
    trained = run.report.bits_per_byte(run.progress.loss)
    passes = made * t.batch_size / run.batches.windows_per_epoch
    if reached > (most := (1 + off) * bits):
        if trained and trained <= most:
            why.append(f"training reached {trained:.2f}, so the held-out text differs from the rest")
        if passes > MANY:
            why.append(f"the text was read {passes:.1f} times")
        why = why or ["this text is harder than the text the estimate is based on"]
    return "predicted", "; ".join([f"{bits_range(bits, off)} bits per byte, reached {reached:.2f}", *why])


def outcome_of_ensemble(expected: float, run: Run, size: int, reached: float) -> str:
    """Compare an ensemble with the prediction from its last run, or with `expected`, from before the run."""
    alone, off = _predicted(expected / ensemble_factor(size), run)
    return f"{bits_range(ensemble_factor(size) * alone, off)} bits per byte, reached {reached:.2f}"


def _predicted(expected: float, run: Run) -> tuple[float, float]:
    """Return the last prediction of a run's bits per byte, and its relative error."""
    known = [each.predicted for each in run.callbacks if isinstance(each, Forecast) and each.predicted]
    return known[0] if known else (expected, UNMEASURED)


def _uncounted(stage: Stage, compiled: Stage, size: int) -> float:
    """Return the seconds so far that do not count: compilation, and the other models' part of measuring."""
    measuring = time.monotonic() - compiled.begun
    return compiled.begun - stage.begun + (1 - 1 / size) * measuring


def _with_steps(request: RunRequest, stage: Stage, seconds: float, size: int, say: Say) -> RunRequest:
    """Return the request with the number of steps that a new run of this model may take. Collective.

    Warm-up depends on the number of steps. `seconds` are of each of `size` models.
    """
    if request.given.get("chats") or not on_root(stage.comm, lambda: begins_anew(request)):
        return request

    def entries() -> int:
        tokenizer = request.named("tokenizer")
        named = {"tokenizer": BYTE if tokenizer in (None, AUTO) else tokenizer}
        return text_of({"data": request.named("data") or "corpus", **named}).vocab_size

    text = Text(1.0, on_root(stage.comm, entries))
    run = _run(request, stage, request.depth, 0.0, text)
    compiled = _compiled(stage, lambda: run, bool(learned_size(run.train.tokenizer)), say)
    rate, _ = measured_speed(compiled, run, warm_up=1, most=MOST_MEASURING * seconds)
    gc.collect()  # frees the model
    uncounted = _uncounted(stage, compiled, size)
    left = on_root(stage.comm, lambda: stage.begun + uncounted + KEPT * seconds - time.monotonic())
    steps = max(1, int(rate * left / (run.train.batch_size * run.model.seq_len)))
    if stage.comm.rank == 0:
        say(f"--within: this machine runs about {count(steps, 'step')} at {rate:,.0f} tokens/s")
    return replace(request, derived={"steps": steps}, tokens=rate * left, uncounted=uncounted)


def _compiled(stage: Stage, configured: Callable[[], RunConfig], learns_bpe: bool, say: Say) -> Stage:
    """Compile the code for training and a sample, and start the stage's time afterwards. Collective."""
    stage.notes.report_to(say)
    report_compiling(stage.comm, say)
    begun = time.monotonic()
    run = configured()
    kernels = stage.kernels(run.train.dtype, run.train.matmul_backend)
    compile_once_per_node(stage, kernels, run, components().strategy(run.train, stage.comm.size))
    if learns_bpe and stage.comm.rank == 0:  # encodes the text
        load_tokenizer("bpe:257", text := "ab " * (LARGE // 3 + 1)).encode(text)
    stage.comm.barrier()
    # On any rank: the other ranks wait.
    has_compiled = stage.comm.allreduce_max(int(first_use.has_compiled()))
    return replace(stage, begun=stage.begun + has_compiled * (time.monotonic() - begun))


def measured_choice(
    request: RunRequest, stage: Stage, seconds: float, text: Text, ensemble: int, say: Say
) -> tuple[Choice, float]:
    """Measure some depths and choose one. Return it, and the seconds of the run, which may need fewer.

    `ensemble`: the number of models; 0: choose. Collective.
    """
    comm, only, on_gpu = stage.comm, request.depth or 0, stage.on_gpu
    end, warm = stage.begun + KEPT * seconds, 0.0
    speeds: dict[int, float] = {}

    def best(only: int) -> tuple[Choice, bool]:
        """Return the best choice given the measured speeds, and whether there is time to measure more."""

        def decide() -> tuple[Choice, bool]:
            now = time.monotonic()
            result = choose(max(1.0, end - now), speeds, text, only, ensemble)
            most = MOST_FOR_NEEDED if len(speeds) < NEEDED[on_gpu] else MOST_MEASURING
            return result, now - stage.begun - warm < most * seconds

        return on_root(comm, decide)

    depths = [only] if only else list(FIRST[on_gpu])
    while depths:
        depth = depths.pop(0)
        tokens = FIRST_TOKENS[on_gpu] if len(speeds) < NEEDED[on_gpu] else best(depth)[0].tokens
        speeds[depth], cold = measured_speed(stage, _run(request, stage, depth, tokens, text))
        warm = warm or cold * on_gpu  # the first depth compiles and selects kernels, which does not count
        if comm.rank == 0:
            say(f"--within: this machine trains depth {depth} at {speeds[depth]:,.0f} tokens/s")
        gc.collect()  # frees the model
        choice, more = best(only)
        if not more:
            break
        if not depths and choice.depth not in speeds:
            depths.append(choice.depth)
    used = on_root(comm, lambda: time.monotonic() - stage.begun)
    needed = (used + choice.ensemble * choice.seconds) / KEPT
    return choice, needed if needed < SHORTER * seconds else seconds


def measured_speed(
    stage: Stage, run: RunConfig, warm_up: int = 2, most: float = STEP_SECONDS
) -> tuple[float, float]:
    """Return the tokens/s of a run's steps on random tokens, and the seconds of setup. Collective."""
    opened = time.monotonic()
    per_step = run.train.batch_size * run.model.seq_len
    ids = np.random.default_rng(0).integers(0, run.model.vocab_size, per_step + 1, np.uint32)
    batches = Batches.of_run(ArrayTokens(ids), run)
    step = make_steps(run, replace(stage, notes=Notes()), lambda text: None)

    def seconds(first: int, steps: int) -> float:
        """Return the seconds per step on the slowest rank."""
        begun = time.perf_counter()
        for number in range(first, first + steps):
            result = step.launch(number, batches)
        result.wait()
        step.model.kernels.to_host(step.model.weights.flat[:1])  # waits for the last update
        return stage.comm.allreduce_max(int(1e6 * (time.perf_counter() - begun))) / 1e6 / steps

    seconds(0, warm_up)  # compiles, tunes
    cold = time.monotonic() - opened
    once = max(1e-4, seconds(warm_up, 1))
    more = min(50, max(1, int(min(most, STEP_SECONDS) / once)))
    return per_step / min(once, seconds(warm_up + 1, more)), cold


def _run(request: RunRequest, stage: Stage, depth: int | None, tokens: float, text: Text) -> RunConfig:
    """Return a run of this depth and number of tokens that can be measured without text. Collective."""
    request = replace(request, depth=depth, tokens=tokens)
    run = configured(stage.comm, request)
    if on_root(stage.comm, lambda: is_open(request)):
        run = run.with_values({DTYPE: stage.auto_dtype(lambda: run.train.matmul).name})
    t = replace(run.train, balance="even")
    return RunConfig(replace(run.model, vocab_size=run.model.vocab_size or text.vocab_size), t)
