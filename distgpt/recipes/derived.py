"""The recipes that need no stage, from what is asked for to settings: --depth, tuning, --deterministic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from distgpt.core.base.errors import Say, UsageError
from distgpt.core.comm.agree import on_root
from distgpt.core.comm.api import Comm
from distgpt.core.config import SETTINGS, RunConfig
from distgpt.core.config.asked import Asked
from distgpt.core.config.setting import brief
from distgpt.core.train.plan import begins_anew, new_run


def derived(asked: Asked, ranks: int) -> Asked:
    """Return what is asked for with the settings that these recipes stand for. For rank 0."""
    if asked.depth is not None:
        from distgpt.recipes.depth import with_depth

        asked = with_depth(asked, ranks)
    elif asked.given.get("chats"):
        from distgpt.recipes.tuning import tuned

        asked = tuned(asked, ranks)
    if asked.deterministic:  # last: its parts divide the batch
        from distgpt.recipes.deterministic import with_parts

        asked = with_parts(asked)
    return asked


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
