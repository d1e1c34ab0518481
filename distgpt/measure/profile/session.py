"""A profile from its first to its last step: peaks, the steps of a run, files and table of all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from typing import TYPE_CHECKING
from zlib import compress, decompress

from distgpt.core.base.errors import Say, UsageError
from distgpt.core.base.files import atomic_file, storage_errors
from distgpt.core.base.interrupts import ignore_further
from distgpt.core.comm.agree import gather_bytes, on_root, shared
from distgpt.core.comm.api import Comm
from distgpt.core.components import components
from distgpt.core.config import RunConfig, TrainConfig
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.cpu.stages import Stage
from distgpt.core.data.batches import Batches
from distgpt.core.ops.api import Array
from distgpt.core.saved.modelfile import load_description
from distgpt.core.train.plan import refuse_unsuited
from distgpt.core.train.progress import Finished
from distgpt.core.train.setup import make_steps, read_texts
from distgpt.core.train.step import Launched, OwnVotes, Step, no_votes
from distgpt.measure.doctor.facts import environment
from distgpt.measure.doctor.speed import Peaks, measure_peaks
from distgpt.measure.profile.recorder import Account, Clock, Recorder, Taken, account, no_times
from distgpt.measure.profile.report import Event, RankProfile, as_text, events, result
from distgpt.parallel.local_steps import LocalSteps
from distgpt.parallel.sharded import Sharded

if TYPE_CHECKING:  # a profile of a CPU stage needs nothing of gpu/
    from distgpt.gpu.device import CupyDevice

WARM_UP = 2  # steps that compile, record and choose algorithms
TRACED = 10  # steps whose every operation is kept
TABLE, TRACE = "profile.json", "trace.json"

Print = Callable[[str], None]


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


class Measured(Launched):
    """A step's result that is accounted for once it was waited for, since accounting waits for a GPU."""

    def __init__(self, result: Launched, account: Callable[[], None]) -> None:
        self._result, self._account = result, account
        self._is_done = False

    def wait(self) -> Finished:
        done = self._result.wait()
        if not self._is_done:
            self._is_done = True
            self._account()
        return done


class Profiler:
    """Launches one rank's steps and measures them: sums over all, every operation of the first."""

    def __init__(self, step: Step, device: CupyDevice | None = None, warm_up: int = WARM_UP) -> None:
        """`device`: the GPU, if any. Collective."""
        self._step = step
        self.clock = Clock() if device is None else Clock.of(device)
        self.on_gpu = device is not None
        self.warm_up = warm_up
        self.times = no_times()
        self.seconds: list[float] = []  # of each profiled step
        self.traced: list[Account] = []
        self.workers = step.model.kernels.threads
        self.skipped = 0  # warm-up steps done
        self._last: Taken | None = None
        self._recorder: Recorder | None = None
        self.clock.settle()
        step.comm.barrier()
        self._zero = self.clock.now()

    def launch(
        self, number: int, batches: Batches, votes: OwnVotes = no_votes, elapsed: float | None = None
    ) -> Launched:
        """Launch a step as `Step.launch` does, and measure it after the warm-up."""
        step = self._step
        if self.skipped < self.warm_up:
            self.skipped += 1
            return step.launch(number, batches, votes, elapsed)
        if self._recorder is None:
            self._recorder = Recorder(self.clock, step.model.kernels, step.comm, batches, waits(step))
        with self._recorder.step() as taken:
            outcome = step.launch(number, batches, votes, elapsed)
        if self._last is not None:  # a GPU's wait in between belongs to the earlier step
            self._last.end = taken.begin
        self._last = taken
        return Measured(outcome, lambda: self._close(number, taken))

    def _close(self, number: int, taken: Taken) -> None:
        found = account(self.clock, self.workers, taken)
        self.times += found.times
        self.seconds.append(found.seconds)
        if len(self.traced) < TRACED:
            begin = self.clock.since(taken.begin, self._zero)
            self.traced.append(replace(found, number=number, begin=begin))


def of_rank(profiler: Profiler, rank: int, peaks: Peaks | None) -> RankProfile:
    """Return the means of the profiled steps, of which there must be one."""
    times, steps = profiler.times / len(profiler.seconds), profiler.seconds
    times[0] /= profiler.workers
    mean = sum(steps) / len(steps)
    found: RankProfile = {"rank": rank, "workers": profiler.workers, "steps": len(steps), "step_s": mean}
    found |= {"step_s_median": median(steps), "peaks": peaks and asdict(peaks), "times": times.tolist()}
    return found


def prepare(comm: Comm, folder: Path) -> None:
    """Make the directory and check that files can be written there. Collective."""

    def probe() -> None:
        with storage_errors("write the profile into", folder):
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=folder) as file:
                file.write(b"whether there is room")

    on_root(comm, probe)


class Session:
    """A profile of all ranks, made on every rank.

    After Ctrl-C `salvage` reports what rank 0 has. With several ranks that may fail: every rank gets the
    interrupt, and the first one to exit ends the job. So what matters most is written first.
    """

    def __init__(self, stage: Stage, step: Step, train: TrainConfig, warm_up: int = WARM_UP) -> None:
        """`step`: what `profiler.launch` launches. Collective."""
        self._stage, self._comm, model = stage, stage.comm, step.model
        device = None
        if stage.on_gpu:
            from distgpt.gpu.stage import GpuStage

            assert isinstance(stage, GpuStage)
            device = stage.device
        self.profiler = Profiler(step, device, warm_up)
        self._about = {
            "environment": environment() if self._comm.rank == 0 else {},
            "stage": stage.name,
            "ranks": self._comm.size,
            "threads": stage.threads,
            "matmul": model.kernels.matmuls.words if isinstance(model.kernels, CpuKernels) else "",
            "gpu": stage.on_gpu,
            "dtype": train.dtype,
            "parameters": model.layout.elements,
            "tokens_per_step": train.batch_size * model.config.seq_len,
        }
        if stage.on_gpu:
            stage.notes.add("each operation is timed, so steps are not recorded as CUDA graphs")
        self._kernels = model.kernels
        self._peaks: Peaks | None = None

    @property
    def steps(self) -> int:
        """The number of steps profiled so far."""
        return len(self.profiler.seconds)

    def finish(self, folder: Path, print_: Print) -> None:
        """Print the table and write the files, on rank 0. Collective."""
        # At the end: the arrays for it count in the memory of the process, which a run reports. All ranks at
        # once, as they share memory and more in a step too.
        self._peaks = measure_peaks(self._kernels, meet=self._comm.barrier)
        own = compress(json.dumps(self._own()).encode())
        ranks = [json.loads(decompress(found)) for found in gather_bytes(self._comm, own)]
        on_root(self._comm, lambda: self._put_out(ranks, folder, print_))

    def salvage(self, folder: Path, print_: Print) -> None:
        """Print and write what rank 0 alone has, after an interrupt; nothing if no step was measured."""
        ignore_further()
        if self.steps and self._comm.rank == 0:
            self._about["interrupted"] = True
            self._put_out([self._own()], folder, print_)

    def _own(self) -> tuple[RankProfile, list[Event]]:
        rank = self._comm.rank
        traced = events(rank, self.profiler.traced, self.profiler.on_gpu)
        return of_rank(self.profiler, rank, self._peaks), traced

    def _put_out(self, ranks: Sequence[tuple[RankProfile, list[Event]]], folder: Path, print_: Print) -> None:
        """Print and write the most important first: a second interrupt may end this at any point."""
        found = result([profile for profile, _ in ranks], self._about)
        print_(f"\n{as_text(found)}\n")
        _write(folder / TABLE, json.dumps(found, indent=1))
        print_(f"profile   {folder / TABLE}")
        facts = {key: str(found[key]) for key in ("stage", "ranks", "threads", "dtype", "parameters")}
        trace = [event for _, of_rank in ranks for event in of_rank]
        timeline = {"traceEvents": trace, "displayTimeUnit": "ms", "otherData": facts}  # metadata
        _write(folder / TRACE, json.dumps(timeline))
        print_(f"trace     {folder / TRACE}")


def _write(path: Path, content: str) -> None:
    with atomic_file(path) as file:
        file.write(content.encode() + b"\n")
