"""A profile from its first to its last step: the steps of a run, peaks, and the files of all ranks."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any
from zlib import compress, decompress

import numpy as np

from distgpt.core.base.errors import Say, UsageError
from distgpt.core.base.files import atomic_file
from distgpt.core.base.formatting import count
from distgpt.core.comm.agree import gather_bytes, on_root, shared
from distgpt.core.components import components
from distgpt.core.config import RunConfig
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.cpu.stages import Stage
from distgpt.core.data.batches import Batches
from distgpt.core.ops.api import Array
from distgpt.core.saved.modelfile import load_description
from distgpt.core.train.plan import refuse_unsuited
from distgpt.core.train.setup import make_steps, read_texts
from distgpt.core.train.step import Step, StepResult
from distgpt.measure.doctor.facts import environment
from distgpt.measure.doctor.speed import Peaks, measure_peaks
from distgpt.measure.jobs import prepare
from distgpt.measure.profile.operations import BETWEEN, DATA, GPU_WAITS, ORDER, TRANSFER
from distgpt.measure.profile.recorder import Account, Clock, Recorder, Taken, account, no_times
from distgpt.parallel.local_steps import LocalSteps
from distgpt.parallel.sharded import Sharded
from distgpt.show.page import terminal_table

if TYPE_CHECKING:  # a profile of a CPU stage needs nothing of gpu/
    from distgpt.gpu.device import CupyDevice

WARM_UP = 2  # steps that compile, record and choose algorithms
TRACED = 10  # steps whose every operation is kept
TABLE, TRACE = "profile.json", "trace.json"
MATMUL, MEMORY = "matmul", "memory"  # the peaks that a row is compared with
WITHOUT_PEAK = (DATA, TRANSFER)  # bound by something else

Row = dict[str, Any]
Event = dict[str, Any]

COLUMNS = ("operation", "share", "calls", "ms a step", "achieved", "of peak")
IN_CACHE = 1.05  # times the memory peak: above that, data came from a cache
SHORTEST_WAIT = 1e-6  # seconds


# Of one rank, as JSON: rank, workers, steps, step_s and its median, peaks, and times by ORDER: seconds of
# each worker, calls, FLOPs and bytes of a step.
RankProfile = dict[str, Any]


def open_steps(asked: RunConfig, stage: Stage, say: Say) -> tuple[Step, Batches]:
    """Return the steps of a run alone, without its directory and evaluation. Collective."""
    comm, t = stage.comm, asked.train
    on_root(comm, lambda: refuse_unsuited(t, comm.size, on_gpu=stage.on_gpu))
    if t.balance == "auto" and comm.size > 1:
        raise shared(UsageError("--balance auto is for training: ranks are measured with even shares"))
    origin = load_description(Path(t.init), comm) if t.init else None
    if origin is not None:
        on_root(comm, lambda: components().model(t).refuse_origin(origin, Path(t.init), t, resumed=False))
    texts = read_texts(comm, asked, t.tokenizer, origin, Path("runs"), say)
    return make_steps(texts.config, stage, say), texts.batches


def waits(step: Step) -> list[tuple[object, str, Array]]:
    """Return the methods that wait for other ranks, each with its object and what it sums or sends."""
    exchange, model = step.exchange, step.model
    found: list[tuple[object, str, Array]]
    if isinstance(exchange, LocalSteps):
        found = [(exchange, "sum_votes", model.grads.flags), (exchange.changes, "sum", model.grads.flat)]
    else:
        found = [(exchange, "sum_gradients", model.grads.with_flags)]
    if isinstance(exchange, Sharded):
        found.append((exchange, "after_update", model.params.flat))
    if step.optimizer.update_bounds:
        found.append((step, "gather_updates", model.grads.flat))
    return found


class Profiler:
    """Runs one rank's steps and measures them: sums over all, every operation of the first."""

    def __init__(self, step: Step, device: CupyDevice | None = None) -> None:
        """`device`: the GPU, if any. Collective."""
        self._step = step
        self.clock = Clock() if device is None else Clock.of(device)
        self.on_gpu = device is not None
        self.workers = step.model.kernels.threads
        self.times = no_times()
        self.seconds: list[float] = []  # of each measured step
        self.traced: list[Account] = []
        self.clock.settle()
        step.comm.barrier()
        self._zero = self.clock.now()

    def steps(self, batches: Batches, measured: int, warm_up: int = WARM_UP) -> Iterator[float]:
        """Run steps as training does, and measure those after the warm-up; yield the seconds of each.

        A GPU gets the next step before the last one is read, so a step ends where the next one begins.
        """
        step, begun = self._step, time.perf_counter()
        for number in range(warm_up):
            step.launch(number, batches).wait()
            yield (ended := time.perf_counter()) - begun
            begun = ended
        recorder = Recorder(self.clock, step.model.kernels, step.comm, batches, waits(step))
        running: deque[tuple[int, StepResult, Taken]] = deque()
        with recorder.attached():
            for number in range(warm_up, warm_up + measured):
                with recorder.step() as taken:
                    launched = step.launch(number, batches)
                if running:
                    running[-1][2].end = taken.begin
                running.append((number, launched, taken))
                while len(running) > (self.on_gpu and number < warm_up + measured - 1):
                    done, launched, taken = running.popleft()
                    launched.wait()
                    ended = time.perf_counter()
                    self._add(done, taken)
                    yield ended - begun
                    begun = time.perf_counter()

    def _add(self, number: int, taken: Taken) -> None:
        found = account(self.clock, self.workers, taken, number, self._zero)
        self.times += found.times
        self.seconds.append(found.seconds)
        self.traced += [found] * (len(self.traced) < TRACED)


def of_rank(profiler: Profiler, rank: int, peaks: Peaks) -> RankProfile:
    """Return the means of the measured steps."""
    times, steps = profiler.times / len(profiler.seconds), profiler.seconds
    times[0] /= profiler.workers
    found: RankProfile = {"rank": rank, "workers": profiler.workers, "steps": len(steps)}
    found |= {"step_s": sum(steps) / len(steps), "step_s_median": median(steps)}
    return found | {"peaks": asdict(peaks), "times": times.tolist()}


def measure(stage: Stage, run: RunConfig, measured: int, warm_up: int, folder: Path, say: Say) -> str:
    """Measure steps, and write both files on rank 0; return the table. Collective."""
    step, batches = open_steps(run, stage, say)
    comm, kernels, model = stage.comm, step.model.kernels, step.model
    on_root(comm, lambda: prepare(folder))
    if stage.on_gpu:
        stage.notes.add("each operation is timed, so steps are not recorded as CUDA graphs")
    profiler = Profiler(step, getattr(stage, "device", None))
    for done, seconds in enumerate(profiler.steps(batches, measured, warm_up), 1):
        warming = " (to warm up)" if done <= warm_up else ""
        say(f"step {done} of {warm_up + measured}: {1000 * seconds:,.1f} ms{warming}")
    # At the end, and on all ranks at once, as they share memory and more in a step too.
    peaks = measure_peaks(kernels, meet=comm.barrier)
    own = of_rank(profiler, comm.rank, peaks), events(comm.rank, profiler.traced, profiler.on_gpu)
    ranks = [
        json.loads(decompress(found)) for found in gather_bytes(comm, compress(json.dumps(own).encode()))
    ]
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
    found = result([profile for profile, _ in ranks], about)
    facts = {key: str(found[key]) for key in ("stage", "ranks", "threads", "dtype", "parameters")}
    trace = [event for _, of_rank in ranks for event in of_rank]
    timeline = {"traceEvents": trace, "displayTimeUnit": "ms", "otherData": facts}

    def write() -> None:
        for path, content in (
            (folder / TABLE, json.dumps(found, indent=1)),
            (folder / TRACE, json.dumps(timeline)),
        ):
            with atomic_file(path) as file:
                file.write(content.encode() + b"\n")

    on_root(comm, write)
    return f"\n{as_text(found)}\n\nprofile   {folder / TABLE}\ntrace     {folder / TRACE}"


# Results: shares and speeds of each rank and of all


def _about(profile: RankProfile, on_gpu: bool) -> dict[str, Any]:
    """Return the part of profile.json that each rank has, and all ranks together: means of a step.

    The rows are of the kinds of operations that occurred, and one is of the rest of the step.
    """
    found = [_row(profile, *each) for each in zip(ORDER, *profile["times"], strict=True) if each[1]]
    between = profile["step_s"] - sum(row["ms"] for row in found) / 1000
    found.append(_row(profile, GPU_WAITS if on_gpu else BETWEEN, between))
    return {**{key: profile[key] for key in ("step_s", "step_s_median", "peaks")}, "rows": found}


def _together(ranks: Sequence[RankProfile]) -> RankProfile:
    """Return the mean of all ranks, per worker: ranks may have different numbers of workers."""
    keys = ("step_s", "step_s_median", "times")
    means = {key: np.mean([each[key] for each in ranks], axis=0).tolist() for key in keys}
    speeds = {key: fmean(each["peaks"][key] for each in ranks) for key in ("gflops", "gbytes_per_s")}
    return {**ranks[0], **means, "peaks": ranks[0]["peaks"] | speeds}


def _row(
    profile: RankProfile, name: str, seconds: float, calls: float = 0, flops: float = 0, moved: float = 0
) -> Row:
    """`seconds` of each worker; the speed is what all would reach together if they did nothing else."""
    row: Row = {"row": name, "share": seconds / profile["step_s"], "calls": calls, "ms": 1000 * seconds}
    row |= {"gflop": flops / 1e9, "gbytes": moved / 1e9, "gflops": None, "gbytes_per_s": None}
    row |= {"peak": None, "of_peak": None}
    if flops or moved:
        key, peak = ("gflops", MATMUL) if flops else ("gbytes_per_s", MEMORY)
        row[key] = (flops or moved) / seconds / 1e9
        if flops or name not in WITHOUT_PEAK:
            row |= {"peak": peak, "of_peak": row[key] / profile["peaks"][key]}
    return row


def result(ranks: Sequence[RankProfile], about: dict[str, Any]) -> dict[str, Any]:
    """Return profile.json. Times are means over ranks and steps; `gflops` sums over the ranks."""
    mean, on_gpu = _together(ranks), about["gpu"]
    gflop = float(np.sum([each["times"][2] for each in ranks])) / 1e9
    return {
        **about,
        "steps": mean["steps"],
        "tokens_per_s": about["tokens_per_step"] / mean["step_s"],
        "gflops": gflop / mean["step_s"],
        "of_peak": gflop / mean["step_s"] / len(ranks) / mean["peaks"]["gflops"],
        **_about(mean, on_gpu),
        "per_rank": [{"rank": each["rank"], **_about(each, on_gpu)} for each in ranks],
    }


def as_text(found: dict[str, Any]) -> str:
    """Format a profile for a terminal: what was measured, the table, and the peaks."""
    threads = f" of {count(found['threads'], 'thread')}" if found["threads"] else ""
    headline = (
        f"{count(found['steps'], 'step')} of {1000 * found['step_s']:,.1f} ms"
        f" ({found['tokens_per_s']:,.0f} tokens/s); stage {found['stage']},"
        f" {count(found['ranks'], 'rank')}{threads}; {found['parameters']:,} parameters, {found['dtype']}"
    )
    table = terminal_table(COLUMNS, [_cells(row) for row in found["rows"]])
    return f"{headline}\n\n{table}\n\n{_peaks(found)}"


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    calls = f"{row['calls']:,.0f}" if row["calls"] else ""
    if row["gflops"]:
        speed = f"{row['gflops']:,.0f} GFLOP/s" if row["gflops"] >= 10 else f"{row['gflops']:.2f} GFLOP/s"
    else:
        speed = f"{row['gbytes_per_s']:,.1f} GB/s" if row["gbytes_per_s"] else ""
    return row["row"], f"{row['share']:.1%}", calls, f"{row['ms']:,.2f}", speed, _of_peak(row)


def _of_peak(row: dict[str, Any]) -> str:
    if row["of_peak"] is None:
        return ""
    if row["peak"] == MEMORY and row["of_peak"] > IN_CACHE:
        return "in cache"
    return f"{row['of_peak']:.0%} of {row['peak']}"


def _peaks(found: dict[str, Any]) -> str:
    peaks = found["peaks"]
    each = "each rank, all at once" if found["ranks"] > 1 else "measured here"
    by = f"Matmul by {found['matmul']}.\n" if found["matmul"] else ""
    return (
        f"Peaks ({each}): {MATMUL} {peaks['gflops']:,.0f} GFLOP/s in {peaks['dtype']},"
        f" {MEMORY} {peaks['gbytes_per_s']:,.1f} GB/s.\n"
        f"{by}The whole step: {found['gflops']:,.0f} GFLOP/s in matmuls, {found['of_peak']:.0%} of {MATMUL}."
    )


def events(rank: int, steps: Sequence[Account], on_gpu: bool) -> list[Event]:
    """Return the timeline of one rank in the trace event format of Perfetto and chrome://tracing.

    A rank is a process, with a thread for each worker. Times are in microseconds.
    """
    workers = max(worker for step in steps for worker, *_ in step.spans) + 1
    names = ["steps", *("GPU" if on_gpu else f"worker {worker}" for worker in range(workers))]
    place: Event = {"ph": "M", "pid": rank}
    found = [place | {"name": "process_name", "args": {"name": f"rank {rank}"}}]
    found += [
        place | {"name": "thread_name", "tid": thread, "args": {"name": name}}
        for thread, name in enumerate(names)
    ]
    for step in steps:
        whole = (-1, f"step {step.number + 1}", "step", 0.0, step.seconds)
        for worker, name, category, first, last in (whole, *step.spans):
            if name != "waits" or last - first > SHORTEST_WAIT:
                span = {"name": name, "cat": category, "ph": "X", "pid": rank, "tid": worker + 1}
                times = {"ts": round((step.begin + first) * 1e6, 3), "dur": round((last - first) * 1e6, 3)}
                found.append(span | times)
    return found
