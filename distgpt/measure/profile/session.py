"""A profile from its first to its last step: the steps of a run, peaks, and the files of all ranks."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any
from zlib import compress, decompress

from distgpt.core.base.errors import Say, UsageError
from distgpt.core.base.files import atomic_file
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
from distgpt.measure.bench.results import prepare
from distgpt.measure.doctor.facts import environment
from distgpt.measure.doctor.speed import Peaks, measure_peaks
from distgpt.measure.profile.recorder import Account, Clock, Recorder, Taken, account, no_times
from distgpt.measure.profile.report import RankProfile, as_text, events, result
from distgpt.parallel.local_steps import LocalSteps
from distgpt.parallel.sharded import Sharded

if TYPE_CHECKING:  # a profile of a CPU stage needs nothing of gpu/
    from distgpt.gpu.device import CupyDevice

WARM_UP = 2  # steps that compile, record and choose algorithms
TRACED = 10  # steps whose every operation is kept
TABLE, TRACE = "profile.json", "trace.json"


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
        found = [(exchange, "sum_votes", model.grads.flags), (exchange, "sum_changes", model.grads.flat)]
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
        found = account(self.clock, self.workers, taken)
        self.times += found.times
        self.seconds.append(found.seconds)
        if len(self.traced) < TRACED:
            begin = self.clock.since(taken.begin, self._zero)
            self.traced.append(replace(found, number=number, begin=begin))


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
