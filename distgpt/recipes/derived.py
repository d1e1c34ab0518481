"""Short recipes, from a request to settings: --decay-from, tuning on chats, --deterministic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from distgpt.core.base.errors import DataError, Say, UsageError, reject_combination
from distgpt.core.comm.agree import on_root
from distgpt.core.comm.api import Comm
from distgpt.core.config import SETTINGS, RunConfig, TrainConfig
from distgpt.core.config.run_config import BATCH_KEYS
from distgpt.core.config.run_request import RunRequest, resumed
from distgpt.core.config.setting import Values
from distgpt.core.model.optim import learning_rate
from distgpt.core.saved.checkpoint import load_state
from distgpt.core.saved.modelfile import read_description
from distgpt.core.saved.rundir import RunDirectory, place_for
from distgpt.core.saved.weights import weights_of
from distgpt.core.train.plan import begins_anew, new_run
from distgpt.core.train.resume import find_run, saved_run

PATIENCE = 3  # evaluations without a lower loss, until tuning ends
TUNING_TOKENS = 4096  # tokens per step when training on chats, approximately


def derived(request: RunRequest, ranks: int, say: Say = lambda text: None) -> RunRequest:
    """Return the request with the settings of these recipes, and print a depth's settings. Only on rank 0."""
    has_depth = request.depth is not None
    if has_depth:
        from distgpt.recipes.depth import described, with_depth

        request = with_depth(request, ranks)
    elif request.given.get("chats"):
        request = _tuned(request, ranks)
    if request.family is not None:
        from distgpt.recipes.family import with_family

        request = with_family(request)
    if request.deterministic:  # last, since its parts divide the batch
        request = _with_parts(request)
    if has_depth and begins_anew(request):
        say(described(new_run(request)))
    return request


def configured(comm: Comm, request: RunRequest) -> RunConfig:
    """Return the configuration of a new run, as rank 0 resolves it. Collective."""
    return on_root(comm, lambda: new_run(derived(request, comm.size)))


def _tuned(request: RunRequest, ranks: int) -> RunRequest:
    """Return the request with the settings of a new run that trains on chats."""
    request = request if request.toml else replace(request, title="tune")
    if not begins_anew(request):
        return request
    said = request.settings()
    if not said.get("init"):
        raise UsageError("tuning requires --weights, the model to tune (distgpt help tuning)")
    model = read_description(weights_of(Path(str(said["init"])), request.fetches)).run.model
    seq_len = said.get("seq_len", model.seq_len)
    SETTINGS["seq_len"].check("seq_len", seq_len)
    assert isinstance(seq_len, int)
    rows = max(1, TUNING_TOKENS // seq_len)
    result: dict[str, Any] = {"schedule": "linear", "warmup": 0, "weight_decay": 0.0}
    if not BATCH_KEYS & said.keys():
        result["batch_size"] = -(-rows // ranks) * ranks
    if not {"steps", "train_minutes"} & said.keys():
        result["epochs"] = 3.0
    if (said.get("val") or said.get("val_fraction")) and not {"train_minutes", "outer_every"} & said.keys():
        result["patience"] = PATIENCE
    return replace(request, derived=result)


def _with_parts(request: RunRequest) -> RunRequest:
    """Return the request with the number of reproducible parts for its batch, unless it is already set."""
    from distgpt.parallel.reproducible import usual_parts

    before = saved_run(request)
    t = (resumed(before, request) if before else new_run(request)).train
    parts = {} if t.reproducible_parts else {"reproducible_parts": usual_parts(t.batch_size)}
    return replace(request, deterministic=False, given={**request.given, **parts})


def with_decay(request: RunRequest) -> RunRequest:
    """Return the run that --decay-from starts: a new run from a checkpoint, with a decaying learning rate."""
    path, steps, out = Path(str(request.decay_from)), request.given.get("steps"), request.out
    others = {f"set {name}": request.given.get(name) for name in ("train_minutes", "decay_fraction")}
    others |= {name: request.given.get(name) for name in ("schedule", "init")}
    others |= {"resume": request.resume, "depth": request.depth, "within": request.within}
    reject_combination("--decay-from", others, "--decay-from sets how the run starts and ends")
    if not steps or not isinstance(steps, int):
        raise UsageError("--decay-from requires --steps, the number of steps of the decay")
    if not path.is_dir():
        raise DataError(f"--decay-from {path}: no such checkpoint or run directory")
    run = path if RunDirectory(path).saved() else path.resolve().parent.parent
    out = out or place_for(run.parent, f"{run.resolve().name}-decayed", resuming=False)
    result = find_run(str(path), out, "", lambda text: None)
    if result.in_place or result.settings is None or result.checkpoint is None:
        raise UsageError(f"--decay-from {path} starts a new run; choose another --out")
    step = load_state(result.checkpoint).step
    _refuse_fallen(result.settings.train, step, result.checkpoint)
    end = step + steps
    fall: Values = {"steps": end, "schedule": "wsd", "decay_fraction": steps / end, "train_minutes": 0.0}
    given = {**request.given, **fall}
    return replace(request, decay_from=None, given=given, out=out, resume=str(result.checkpoint))


def _refuse_fallen(t: TrainConfig, step: int, checkpoint: Path) -> None:
    """Reject a checkpoint from a part of a run in which the learning rate is not constant."""
    by_clock = bool(t.train_minutes) and t.schedule != "constant"
    if by_clock or step < t.warmup or learning_rate(t, step) != t.lr:
        raise UsageError(
            f"--decay-from {checkpoint}: the learning rate is not constant there (--schedule {t.schedule});"
            " use a checkpoint with --schedule constant, or with wsd before the decay"
        )
