"""A profile from first to last step: the steps of a run, the peak, and the file for all ranks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import numpy as np

from distgpt.core.base.errors import Say, UsageError
from distgpt.core.base.files import write_json
from distgpt.core.base.formatting import count
from distgpt.core.comm.agree import collective_error, gather, on_root
from distgpt.core.components import components
from distgpt.core.config import RunConfig
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.cpu.stages import Stage
from distgpt.core.data.batches import Batches
from distgpt.core.ops.api import Affine
from distgpt.core.ops.kernels import Kernels
from distgpt.core.saved.modelfile import load_description
from distgpt.core.train.plan import reject_unsuited
from distgpt.core.train.setup import make_steps, read_texts
from distgpt.core.train.step import Step, StepResult
from distgpt.measure.doctor.facts import environment
from distgpt.measure.jobs import prepare
from distgpt.measure.profile.operations import BETWEEN, GPU_WAITS, ORDER
from distgpt.measure.profile.recorder import Recorder, Taken, Timer, account, no_times
from distgpt.parallel.local_steps import LocalSteps
from distgpt.parallel.sharded import Sharded
from distgpt.show.page import Column, tabulated, terminal

if TYPE_CHECKING:  # a profile of a CPU stage must not import gpu/
    from distgpt.gpu.device import CupyDevice

WARM_UP = 2  # steps that compile, record and choose algorithms
SIDES = (512, 1024, 2048, 4096, 8192)  # sides of square matmuls, as many as fit in the time
SHORTEST = 0.01  # seconds of a measurement: enough calls to fill a queue
REPEATS = 4
SECONDS = 1.6  # seconds to measure the peak

Row = dict[str, Any]

# One rank as JSON: rank, workers, steps, mean and median step_s, peak_gflops, and times by ORDER: seconds per
# worker, calls and FLOPs of a step.
RankProfile = dict[str, Any]


def open_steps(asked: RunConfig, stage: Stage, say: Say) -> tuple[Step, Batches]:
    """Return a run's steps and batches, without its directory and evaluation. Collective."""
    comm, t = stage.comm, asked.train
    on_root(comm, lambda: reject_unsuited(t, comm.size, on_gpu=stage.on_gpu))
    if t.balance == "auto" and comm.size > 1:
        raise collective_error(UsageError("profiles require --balance even"))
    origin = load_description(Path(t.init), comm) if t.init else None
    if origin is not None:
        on_root(comm, lambda: components().model(t).reject_origin(origin, Path(t.init), t, resumed=False))
    texts = read_texts(comm, asked, t.tokenizer, origin, Path("runs"), say)
    return make_steps(texts.config, stage, say), texts.batches


def waits(step: Step) -> list[tuple[object, str]]:
    """Return the methods that wait for other ranks, each with its object."""
    gradient_sync = step.gradient_sync
    result: list[tuple[object, str]]
    if isinstance(gradient_sync, LocalSteps):
        result = [(gradient_sync, "sum_flags"), (gradient_sync.changes, "sum")]
    else:
        result = [(gradient_sync, "sum_gradients")]
    if isinstance(gradient_sync, Sharded):
        result.append((gradient_sync, "after_update"))
    if step.optimizer.update_bounds:
        result.append((step, "gather_updates"))
    return result


class Profiler:
    def __init__(self, step: Step, device: CupyDevice | None = None) -> None:
        self._step = step
        self.clock = Timer() if device is None else Timer.of(device)
        self.on_gpu = device is not None
        self.workers = step.model.kernels.threads
        self.times = no_times()
        self.seconds: list[float] = []  # of each measured step

    def steps(self, batches: Batches, measured: int, warm_up: int = WARM_UP) -> Iterator[float]:
        """Run steps as training does, yield the seconds of each, and measure the ones after the warm-up.

        A GPU gets the next step before the last one is read, so a step ends when the next one starts.
        """
        step, begun = self._step, time.perf_counter()
        for number in range(warm_up):
            step.launch(number, batches).wait()
            yield (ended := time.perf_counter()) - begun
            begun = ended
        recorder = Recorder(self.clock, step.model.kernels, step.comm, batches, waits(step))
        running: deque[tuple[StepResult, Taken]] = deque()
        with recorder.attached():
            for number in range(warm_up, warm_up + measured):
                with recorder.step() as taken:
                    launched = step.launch(number, batches)
                if running:
                    running[-1][1].end = taken.begin
                running.append((launched, taken))
                while len(running) > (self.on_gpu and number < warm_up + measured - 1):
                    launched, taken = running.popleft()
                    launched.wait()
                    ended = time.perf_counter()
                    seconds, times = account(self.clock, self.workers, taken)
                    self.times += times
                    self.seconds.append(seconds)
                    yield ended - begun
                    begun = time.perf_counter()


def of_rank(profiler: Profiler, rank: int, peak: float) -> RankProfile:
    """Return the means over the measured steps."""
    times, steps = profiler.times / len(profiler.seconds), profiler.seconds
    times[0] /= profiler.workers
    result: RankProfile = {"rank": rank, "workers": profiler.workers, "steps": len(steps)}
    result |= {"step_s": fmean(steps), "step_s_median": median(steps)}
    return result | {"peak_gflops": peak, "times": times.tolist()}


def measure(stage: Stage, run: RunConfig, measured: int, warm_up: int, folder: Path, say: Say) -> str:
    """Measure steps, write profile.json on rank 0, and return the table. Collective."""
    step, batches = open_steps(run, stage, say)
    comm, kernels, model = stage.comm, step.model.kernels, step.model
    on_root(comm, lambda: prepare(folder))
    if stage.on_gpu:
        stage.notes.add("operations are timed separately, so CUDA graphs are off")
    profiler = Profiler(step, getattr(stage, "device", None))
    for done, seconds in enumerate(profiler.steps(batches, measured, warm_up), 1):
        warming = " (to warm up)" if done <= warm_up else ""
        say(f"step {done} of {warm_up + measured}: {1000 * seconds:,.1f} ms{warming}")
    # Measure at the end, and on all ranks simultaneously, since they share memory bandwidth in a step.
    ranks = gather(comm, of_rank(profiler, comm.rank, peak_gflops(kernels, meet=comm.barrier)))
    about: dict[str, Any] = {
        "environment": environment() if comm.rank == 0 else {},
        "stage": stage.name,
        "ranks": comm.size,
        "threads": stage.threads,
        "matmul": kernels.matmuls.words if isinstance(kernels, CpuKernels) else "",
        "gpu": stage.on_gpu,
        "dtype": run.train.dtype,
        "parameters": model.layout.elements,
        "tokens_per_step": run.train.batch_size * model.config.seq_len,
    }
    found, path = result(ranks, about), folder / "profile.json"
    on_root(comm, lambda: write_json(path, found))
    return f"\n{as_text(found)}\n\nprofile   {path}"


# The peak: how fast a backend multiplies matrices


def seconds_of(k: Kernels, work: Callable[[], None]) -> float:
    """Return the seconds of one call, averaged over enough calls to take SHORTEST."""
    calls, done = 1, k.scalars(1)
    while True:
        k.to_host(done)
        begun = time.perf_counter()
        for _ in range(calls):
            work()
        k.to_host(done)  # waits
        taken = time.perf_counter() - begun
        if taken >= SHORTEST:
            return taken / calls
        calls = max(2 * calls, int(calls * 1.3 * SHORTEST / max(taken, 1e-6)))


def peak_gflops(k: Kernels, seconds: float | None = None, meet: Callable[[], None] = lambda: None) -> float:
    """Return the matmul GFLOP/s of one rank (all its workers) at the best matrix size.

    Measure for about `seconds` (None: SECONDS) after everything is compiled. `meet` returns once all ranks
    have called it, so that all measure at the same time.
    """
    meet()
    best, end = 0.0, float("inf")
    for side in SIDES:
        flops = 2.0 * side**3
        if best and time.perf_counter() + flops / best > end:
            break
        x, y = (k.zeros(side, side) for _ in range(2))
        # With these values matmuls neither overflow nor underflow.
        some = np.random.default_rng(0).standard_normal(1 << 16, np.float32) / side
        k.put(x, np.resize(some, x.shape))
        work = partial(k.linear, y, x, Affine(x, None))
        if not best:
            work()  # may compile, or choose an algorithm
            end = time.perf_counter() + (SECONDS if seconds is None else seconds)
        for _ in range(REPEATS):
            best = max(best, flops / seconds_of(k, work))
            if time.perf_counter() > end:
                break
    return best / 1e9


# Results: shares and speeds of each rank and of all


def _about(profile: RankProfile, on_gpu: bool) -> dict[str, Any]:
    """Return the part of profile.json that each rank and the mean of all ranks have: means of a step.

    There is one row per kind of operation that occurred, and one for the rest of the step.
    """
    result = [_row(profile, *each) for each in zip(ORDER, *profile["times"], strict=True) if each[1]]
    between = profile["step_s"] - sum(row["ms"] for row in result) / 1000
    result.append(_row(profile, GPU_WAITS if on_gpu else BETWEEN, between))
    return {**{key: profile[key] for key in ("step_s", "step_s_median", "peak_gflops")}, "rows": result}


def _row(profile: RankProfile, name: str, seconds: float, calls: float = 0, flops: float = 0) -> Row:
    """Make a row. `seconds` is per worker; the speed is the rank's if all workers did only this."""
    row: Row = {"row": name, "share": seconds / profile["step_s"], "calls": calls, "ms": 1000 * seconds}
    gflops = flops / seconds / 1e9 if flops else None
    of_peak = gflops and gflops / profile["peak_gflops"]
    return row | {"gflop": flops / 1e9, "gflops": gflops, "of_peak": of_peak}


def result(ranks: Sequence[RankProfile], about: dict[str, Any]) -> dict[str, Any]:
    """Return profile.json. Times are means over ranks and steps, per worker; `gflops` sums over ranks."""
    keys = ("step_s", "step_s_median", "peak_gflops", "times")
    mean = {key: np.mean([each[key] for each in ranks], axis=0).tolist() for key in keys}
    gflop = float(np.sum([each["times"][2] for each in ranks])) / 1e9
    return {
        **about,
        "steps": ranks[0]["steps"],
        "tokens_per_s": about["tokens_per_step"] / mean["step_s"],
        "gflops": gflop / mean["step_s"],
        "of_peak": gflop / mean["step_s"] / len(ranks) / mean["peak_gflops"],
        **_about(mean, about["gpu"]),
        "per_rank": [{"rank": each["rank"], **_about(each, about["gpu"])} for each in ranks],
    }


# -- showing

COLUMNS: tuple[Column, ...] = (
    ("operation", "row", str),
    ("share", "share", "{:.1%}".format),
    ("calls", "calls", lambda calls: f"{calls:,.0f}" if calls else ""),
    ("ms a step", "ms", "{:,.2f}".format),
    ("GFLOP/s", "gflops", lambda speed: f"{speed:,.0f}" if speed >= 10 else f"{speed:.2f}"),
    ("of peak", "of_peak", "{:.0%}".format),
)


def as_text(found: dict[str, Any]) -> str:
    """Format a profile for a terminal: a headline, the table, and the peak."""
    threads = f" of {count(found['threads'], 'thread')}" if found["threads"] else ""
    headline = (
        f"{count(found['steps'], 'step')} of {1000 * found['step_s']:,.1f} ms"
        f" ({found['tokens_per_s']:,.0f} tokens/s); stage {found['stage']},"
        f" {count(found['ranks'], 'rank')}{threads}; {found['parameters']:,} parameters, {found['dtype']}"
    )
    each = "each rank, concurrently" if found["ranks"] > 1 else "measured here"
    by = f", by {found['matmul']}" if found["matmul"] else ""
    peak = (
        f"Peak ({each}): {found['peak_gflops']:,.0f} GFLOP/s in matmuls{by}.\n"
        f"The whole step: {found['gflops']:,.0f} GFLOP/s, {found['of_peak']:.0%} of the peak."
    )
    return f"{headline}\n\n{terminal([tabulated(COLUMNS, found['rows'])])}\n\n{peak}"
