"""The recipes that need no stage, from what is asked for to settings: --depth, tuning, --deterministic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from distgpt.core.base.errors import Say, UsageError
from distgpt.core.comm.agree import on_root
from distgpt.core.comm.api import Comm
from distgpt.core.config import SETTINGS, RunConfig
from distgpt.core.config.asked import Asked, resumed
from distgpt.core.config.run_config import BATCH_KEYS
from distgpt.core.config.setting import brief
from distgpt.core.saved.modelfile import read_description
from distgpt.core.saved.weights import weights_of
from distgpt.core.train.plan import begins_anew, new_run
from distgpt.core.train.resume import saved_run

TUNING_TOKENS = 4096  # tokens of a step that learns chats, about


def derived(asked: Asked, ranks: int) -> Asked:
    """Return what is asked for with the settings that these recipes stand for. For rank 0."""
    if asked.depth is not None:
        from distgpt.recipes.depth import with_depth

        asked = with_depth(asked, ranks)
    elif asked.given.get("chats"):
        asked = _tuned(asked, ranks)
    if asked.deterministic:  # last: its parts divide the batch
        asked = _with_parts(asked)
    return asked


def _tuned(asked: Asked, ranks: int) -> Asked:
    """Return what is asked for with the settings of a new run that learns chats."""
    asked = asked if asked.toml else replace(asked, title="tune")
    if not begins_anew(asked):
        return asked
    said = asked.settings()
    if not said.get("init"):
        raise UsageError("which model is to be tuned? --weights says that (distgpt help tuning)")
    model = read_description(weights_of(Path(str(said["init"])), asked.fetches)).run.model
    seq_len = said.get("seq_len", model.seq_len)
    SETTINGS["seq_len"].check("seq_len", seq_len)
    assert isinstance(seq_len, int)
    rows = max(1, TUNING_TOKENS // seq_len)
    found: dict[str, Any] = {"schedule": "linear", "warmup": 0, "weight_decay": 0.0}
    if not BATCH_KEYS & said.keys():
        found["batch_size"] = -(-rows // ranks) * ranks
    if not {"steps", "train_minutes"} & said.keys():
        found["epochs"] = 3.0
    return replace(asked, derived=found)


def _with_parts(asked: Asked) -> Asked:
    """Return what is asked for with as many reproducible parts as suit its batch, if no source names them."""
    from distgpt.parallel.reproducible import usual_parts

    before = saved_run(asked)
    t = (resumed(before, asked) if before else new_run(asked)).train
    parts = {} if t.reproducible_parts else {"reproducible_parts": usual_parts(t.batch_size)}
    return replace(asked, deterministic=False, given={**asked.given, **parts})


def reported(asked: Asked, ranks: int, say: Say) -> Asked:
    """Return the same, and show what follows from a depth. For rank 0."""
    found = derived(asked, ranks)
    if asked.depth is not None and begins_anew(found):
        from distgpt.recipes.depth import Dial

        say(Dial(asked.depth, asked.tokens, ranks).described(new_run(found)))
    return found


def everywhere(comm: Comm, find: Callable[[], Asked]) -> Asked:
    """Return on every rank what rank 0 makes of what is asked for. Collective."""
    if comm.size == 1:
        return find()

    def wire() -> dict[str, object]:
        found = find()
        _refuse_unsendable({**found.derived, **found.given})
        paths = {"toml": found.toml, "out": found.out}
        return {**asdict(found), **{name: path and str(path) for name, path in paths.items()}}

    found = on_root(comm, wire)
    return Asked(**{**found, **{name: found[name] and Path(found[name]) for name in ("toml", "out")}})


def _refuse_unsendable(settings: Mapping[str, object]) -> None:
    """Refuse what Python users may give and JSON cannot hold, in the words of the setting."""
    for name, value in settings.items():
        if not isinstance(value, str | int | float):
            if name in SETTINGS:
                SETTINGS[name].check(name, value)
            raise UsageError(f"{name} is {brief(value)}: a setting is a text or a number")


def configured(comm: Comm, asked: Asked) -> RunConfig:
    """Return the configuration of a new run, as rank 0 resolves it. Collective."""
    if comm.size == 1:
        return new_run(derived(asked, 1))
    return RunConfig.from_dict(on_root(comm, lambda: asdict(new_run(derived(asked, comm.size)))))
