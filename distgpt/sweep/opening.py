"""From a grid file to a sweep that every rank can work on; or what it would do, and about how long."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from distgpt.core.base.errors import DistgptError, Say, UsageError
from distgpt.core.base.formatting import count, long_duration
from distgpt.core.comm.agree import on_every_rank, on_root
from distgpt.core.comm.api import Comm
from distgpt.core.comm.serial import SerialComm
from distgpt.core.config import ON_GPU, SEVERAL, WITH_MPI, GpuConfig, RunConfig
from distgpt.core.cpu.stages import Notes, Stage, open_stage
from distgpt.core.data.loading import PLAIN, DataRequest, kind_of, load_corpus, refuse_missing
from distgpt.core.model.model import Architecture
from distgpt.core.model.optim import learning_rate
from distgpt.core.train.plan import DTYPE, is_open, refuse_unsuited
from distgpt.counts import operations
from distgpt.launch.environment import launched_as
from distgpt.measure.estimate import Question, estimate, manifest_of, with_vocabulary
from distgpt.recipes.depth import holds_out
from distgpt.sweep.grid import BITS, Grid, Run, read_grid
from distgpt.sweep.ledger import Ledger, begin, has_begun, read_back
from distgpt.sweep.work import asked_of, configured
from distgpt.texts.shards import SHARDS_ROW


def open_stages(name: str, threads: int | None, gpu: GpuConfig) -> tuple[Comm, Stage]:
    """Return the ranks of this job, and a stage for this rank alone, which trains alone. Collective."""
    if name in WITH_MPI:
        raise UsageError(f"here every rank has a stage of its own: --stage serial or cuda, not {name}")
    if launched_as() == 1:
        stage = open_stage(name, threads, gpu)
        return stage.comm, stage
    # GPUs need no way between them that takes memory.
    job = open_stage(SEVERAL[name], threads, replace(gpu, allreduce="host") if name in ON_GPU else gpu)
    alone = SerialComm(job.comm)
    if not job.on_gpu:
        return job.comm, replace(job, name=name, comm=alone)
    from distgpt.gpu.stage import GpuStage

    assert isinstance(job, GpuStage)
    # New notes: the job's tell how gradients are summed.
    return job.comm, replace(job, name=name, comm=alone, gpu=gpu, notes=Notes(), transport="")


def begin_sweep(comm: Comm, ready: Stage, path: Path, out: Path, say: Say) -> Ledger:
    """Return the sweep of a grid file, which begins or resumes in `out`. Collective.

    `ready` is a stage of this rank alone.
    """

    def prepare() -> None:
        grid = _with_dtype(read_grid(path), ready, out)
        runs = checked_runs(grid)
        begin(out, grid)
        for line in rungs_of(grid, runs):
            say(line)
        tokenize(runs, out, say)
        Ledger(out, grid).forget_failures()

    on_root(comm, prepare)
    return Ledger(out, on_every_rank(comm, lambda: read_back(out)))


def _with_dtype(grid: Grid, ready: Stage, out: Path | None = None) -> Grid:
    """Return a grid that names no dtype with one for all runs, by its first run: they are compared.

    A sweep that has begun keeps its own; one of an earlier version has none, which is float32.
    """
    first = next(grid.runs())
    if not is_open(asked_of(first)):
        return grid
    fixed = {name: value for name, value in grid.fixed.items() if name != DTYPE}
    if out and has_begun(out):
        known = {name: value for name, value in read_back(out).fixed.items() if name == DTYPE}
    else:
        known = {DTYPE: ready.auto_dtype(lambda: configured(first).train.matmul).name}
    return replace(grid, fixed={**fixed, **known})


def preview(path: Path, ready: Stage, ranks: int, say: Say) -> str:
    """Return the runs of a grid file, its rungs, and about how long they take; write nothing."""
    grid = _with_dtype(read_grid(path), ready)
    runs = checked_runs(grid)
    time = expected(grid, runs, ready, ranks, say)
    return "\n".join([listed(runs), *rungs_of(grid, runs), time])


def checked_runs(grid: Grid) -> dict[str, RunConfig]:
    """Return every run's configuration by name; refuse what would fail for all, or makes no sense."""
    runs = {run.name: configured(run) for run in grid.runs()}
    first = next(iter(runs.values())).train
    for name, run in runs.items():
        t = run.train
        refuse_unsuited(t, 1, on_gpu=False)
        refuse_missing(filter(None, (t.data, t.val)), t.tokenizer)
        if grid.metric != "loss" and not holds_out(asdict(run.train)):
            raise UsageError(
                f"{name}: nothing is held out to compare by {grid.metric}: give val_fraction or val, or"
                ' say metric = "loss" in [sweep]'
            )
        if grid.metric != BITS and t.tokenizer != first.tokenizer:
            raise UsageError(
                f"{name} has another tokenizer than other runs ({t.tokenizer}, not {first.tokenizer}): losses"
                f' per token cannot be compared; say metric = "{BITS}" in [sweep]'
            )
        if t.train_minutes and grid.rungs > 1:
            raise UsageError(f"{name}: rungs compare runs at steps, which train_minutes does not know")
    return runs


def tokenize(runs: dict[str, RunConfig], out: Path, say: Say) -> None:
    """Tokenize the runs' folders and tables of texts, which several processes cannot at once."""
    seen = set()
    for run in runs.values():
        t = run.train
        key = (t.data, t.val, t.tokenizer, t.val_fraction)
        kinds = {kind_of(text) for text in (t.data, t.val) if text}
        if key not in seen and not kinds <= {PLAIN, SHARDS_ROW}:
            kept = out / "tokenized"
            load_corpus(
                SerialComm(), DataRequest(t.data, t.tokenizer, 1, t.val_fraction, val=t.val, kept=kept), say
            )
        seen.add(key)


def listed(runs: dict[str, RunConfig]) -> str:
    """Return a line for each run."""
    lines = [f"{name}  {count(run.train.steps, 'step')}" for name, run in runs.items()]
    return "\n".join([*lines, count(len(runs), "run")])


def rungs_of(grid: Grid, runs: dict[str, RunConfig]) -> list[str]:
    """Return a line about each rung, if there are several; the steps are the first run's."""
    points, t, lines = len(grid.points), next(iter(runs.values())).train, []
    for rung in range(grid.rungs if grid.rungs > 1 else 0):
        each = count(points, "point") + (f" of {count(len(grid.seeds), 'seed')}" if grid.seeds else "")
        step = grid.until(rung, t.steps)
        peak = learning_rate(t, step - 1) / t.lr
        phase = f", in the warm-up of {count(t.warmup, 'step')}" if step <= t.warmup else ""
        at = f"with {peak:.0%} of the peak learning rate{phase}"
        lines.append(f"rung {rung + 1}: {each} to step {step:,}, {at}")
        points = grid.promoted(points)
    return lines


def expected(grid: Grid, runs: dict[str, RunConfig], ready: Stage, ranks: int, say: Say) -> str:
    """Return about how long the sweep takes: the first run's steps are measured, the others' counted."""
    first, options = next(iter(runs.values())), GpuConfig()
    if ready.on_gpu:
        from distgpt.gpu.stage import GpuStage

        assert isinstance(ready, GpuStage)
        options = ready.gpu
    try:
        facts = estimate(Question(first, ready.name, gpu=options), say, ready=ready)["time"]
    except DistgptError as error:
        return f"time: unknown ({error})"
    if facts["rate_per_rank"] is None:
        return f"time: unknown ({facts['missing']})"
    vocabulary = with_vocabulary(first, manifest_of(first.train.data)).model.vocab_size
    parts = zip(runs.values(), _shares(grid), strict=True)
    times = sum(share * _work(run, vocabulary) for run, share in parts) / _work(first, vocabulary)
    seconds = times * facts["total_s"] / min(ranks, len(runs))
    return f"about {long_duration(seconds)} of training on {count(ranks, 'rank')}"


def _work(run: RunConfig, vocabulary: int) -> float:
    """Return the operations of a run's matmuls in the forward pass."""
    model = Architecture(replace(run.model, vocab_size=run.model.vocab_size or vocabulary))
    return float(operations(model).forward * run.train.steps * run.train.batch_size * run.model.seq_len)


def _shares(grid: Grid) -> Iterator[float]:
    """Yield how much of each run is trained, as if the first ones were the best."""
    order = list(grid.points)
    last, points = dict.fromkeys(order, 0), len(order)
    for rung in range(grid.rungs):
        last.update(dict.fromkeys(order[:points], rung))
        points = grid.promoted(points)

    def share(run: Run) -> float:
        return grid.eta ** (last[run.point] + 1 - grid.rungs)

    return map(share, grid.runs())
