"""The plan of a run, which rank 0 decides before data are read.

Settings are resolved in this order: recipes convert their options to settings (outside of the core),
`with_dtype` sets the number format, and `new_run` or `_resumed_run` combines defaults, preset, file and
flags. Then `make_plan` chooses the directory and the checkpoint. setup.py adds settings that depend on the
corpus or on this machine's memory.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from distgpt.core.base.errors import DataError, Say, UsageError, did_you_mean, reject_combination
from distgpt.core.base.formatting import count
from distgpt.core.comm.agree import on_root
from distgpt.core.components import components, extra_settings
from distgpt.core.config import AUTO_DTYPE, RunConfig, TrainConfig, differences
from distgpt.core.config.run_request import RunRequest, resolve, resumed
from distgpt.core.cpu.stages import Stage
from distgpt.core.data.batches import refuse_uneven
from distgpt.core.data.loading import kind_of
from distgpt.core.saved.checkpoint import State, load_state
from distgpt.core.saved.modelfile import Description, read_description
from distgpt.core.saved.rundir import RunDirectory, place_for
from distgpt.core.saved.weights import weights_of
from distgpt.core.train.resume import (
    Change,
    Resumption,
    find_run,
    is_finished,
    refuse_impossible,
    saved_run,
)

DTYPE = "dtype"


@dataclass(frozen=True, slots=True)
class Plan:
    """A run before its setup. The same on all ranks; with multiple ranks, a pickled copy."""

    config: RunConfig  # the request; vocabulary size and steps of epochs are set later
    directory: RunDirectory
    checkpoint: Path | None  # the verified checkpoint to resume from
    state: State  # the checkpoint's state
    origin: Description | None  # the model to continue: the checkpoint's, or --init's
    changes: dict[str, Change]  # changed settings of a resumed run
    is_finished: bool = False  # whether the run needs no further work
    until: int | None = None  # a step to stop at, without changing the schedule
    uncounted: float = 0.0  # seconds of this process that do not count as the run's time


def make_plan(stage: Stage, request: RunRequest, say: Say) -> Plan:
    """Resolve the settings, choose the directory, verify the checkpoint. Writes nothing. Collective.

    Without `out`, a new run gets a new directory runs/<name>, or the last one if it has no step.
    """
    ranks = stage.comm.size
    on_gpu = stage.on_gpu
    return on_root(stage.comm, lambda: _decide(request, ranks, on_gpu, say))


def _decide(request: RunRequest, ranks: int, on_gpu: bool, say: Say) -> Plan:
    """Return the plan on rank 0."""
    if request.resume is None:
        config = new_run(request)
        last, fresh = (place_for(Path("runs"), request.name, resuming) for resuming in (True, False))
        own = request.out or (last if RunDirectory(last).has_no_step() else fresh)
        result = Resumption(RunDirectory(own))
    else:
        request.refuse_mistyped()
        result = find_run(request.resume, request.out, request.name, say)
        config = _resumed_run(result.settings, request) if result.settings else new_run(request)
    config = with_extra(config)
    reject_unsuited(config.train, ranks, on_gpu)
    directory = result.directory
    if result.settings and result.in_place:
        for line in directory.former_choices():
            say(line)
    checkpoint = result.checkpoint
    if checkpoint:
        _refuse_moved(config.train)
    directory.refuse_undecodable()
    is_there = directory.is_there()
    if is_there and (dead := directory.lock.refuse_second()):
        say(f"{dead} left this run unfinished; taking over")
    state = load_state(checkpoint) if checkpoint else State()
    # Check that this run can continue from the pretrained model, if there is one.
    origin = None
    t = config.train
    if weights := checkpoint / "weights.safetensors" if checkpoint else t.init:
        origin = read_description(Path(weights))
        components().model(t).reject_origin(origin, Path(weights), t, resumed=checkpoint is not None)
    before = result.settings
    if checkpoint and origin:
        before = origin.run
        refuse_impossible(f"{checkpoint} is from a run", before, config)
    if result.settings and result.in_place:
        refuse_impossible(f"{directory.path} contains a run", result.settings, config)
    elif is_there:
        directory.refuse_conflict(config, request.resume is not None)
    if state.step > t.steps and not t.train_minutes:
        steps = count(t.steps, "step")
        raise UsageError(f"{checkpoint} is at step {state.step}, but the run has only {steps}")
    changes = differences(before, config) if before else {}
    is_done = checkpoint is not None and is_finished(directory, checkpoint, t, state, changes)
    if checkpoint and not is_done:
        say(f"resuming from {checkpoint}")
    return Plan(config, directory, checkpoint, state, origin, changes, is_done, uncounted=request.uncounted)


def with_extra(config: RunConfig) -> RunConfig:
    """Return a configuration with all settings of the extension, after checking them."""
    given, known = config.train.extra, extra_settings()
    for name in given:
        if f"extra.{name}" not in known:
            hint = did_you_mean(f"extra.{name}", known) if known else "; pass its class with --components"
            raise UsageError(f"unknown setting extra.{name}{hint}")
    kind = components().extra
    if kind is None:
        return config
    extra = kind(**given)
    for name, about in known.items():
        about.check(name, getattr(extra, name.partition(".")[2]))
    return config.with_values({"extra": asdict(extra)})


def _refuse_moved(t: TrainConfig) -> None:
    """Raise an error if a resumed run's text or model cannot be found."""
    for option, text in {"--data": t.data, "--val": t.val or t.data}.items():
        try:
            kind_of(text)
        except DataError as error:
            raise DataError(f"{error}; pass the text's new path with {option}") from None
    components().model(t).reject_moved(t)


# Configuration of a run from its request.


def new_run(request: RunRequest) -> RunConfig:
    """Return the configuration of a new run, with `init` as the path of the weights. For rank 0."""
    init = request.settings().get("init")
    if not init or not isinstance(init, str):
        return resolve(request)
    weights = weights_of(Path(init), request.fetches)
    config = resolve(request, read_description(weights).run.model)
    return config.with_values({"init": str(weights)})


def _resumed_run(settings: RunConfig, request: RunRequest) -> RunConfig:
    """Return a resumed run's configuration, with the settings given now."""
    config = resumed(settings, request)
    init = config.train.init
    if init == settings.train.init:  # the file may be gone, but a checkpoint has the weights
        return config
    return config.with_values({"init": str(weights_of(Path(init), request.fetches))})


def with_dtype(request: RunRequest, stage: Stage, say: Say) -> RunRequest:
    """Return the request with a dtype if it is a new run without one. Collective."""

    is_decided_here = on_root(stage.comm, lambda: is_open(request) and begins_anew(request))
    if request.given.get(DTYPE) == AUTO_DTYPE:  # a resumed run has its own
        request = replace(
            request, given={name: value for name, value in request.given.items() if name != DTYPE}
        )
    if not is_decided_here:
        return request
    result = stage.auto_dtype(lambda: new_run(request).train.matmul)
    if stage.comm.rank == 0 and result.why:
        say(f"{result.name}: {result.why} (--dtype)")
    return replace(request, given={**request.given, DTYPE: result.name})


def is_open(request: RunRequest) -> bool:
    """Return whether no preset, file or flag sets a dtype."""
    return request.named(DTYPE) in (None, AUTO_DTYPE)


def begins_anew(request: RunRequest) -> bool:
    """Return whether the request starts a new run."""
    return request.resume is None or (request.resume == "auto" and saved_run(request) is None)


def reject_unsuited(t: TrainConfig, ranks: int, on_gpu: bool) -> None:
    """Raise a UsageError for settings that cannot be combined."""
    if t.val:
        reject_combination("--val", {"val-fraction": t.val_fraction}, "both set the validation data")
    if not t.reproducible_parts:  # the number of ranks does not split these batches
        refuse_uneven(t.batch_size, ranks, t.grad_accum or 1)
    components().reject_unsuited(t, ranks, on_gpu)
    if ranks > 1 and t.gradient_dtype == "bfloat16" and t.dtype == "float64":
        raise UsageError(
            "--gradient-dtype bfloat16 loses the precision of --dtype float64; use float32 for one of them"
        )
