"""--deterministic on CPUs: reproducible parts, where no source of settings names them."""

from __future__ import annotations

from dataclasses import replace

from distgpt.config.asked import Asked, resumed
from distgpt.training.exchange.reproducible import usual_parts
from distgpt.training.opening.plan import new_run
from distgpt.training.opening.resumption import saved_run


def with_parts(asked: Asked) -> Asked:
    """Return what is asked for with a number of parts that suits its batch. For rank 0."""
    before = saved_run(asked)
    t = (resumed(before, asked) if before else new_run(asked)).train
    parts = {} if t.reproducible_parts else {"reproducible_parts": usual_parts(t.batch_size)}
    return replace(asked, deterministic=False, given={**asked.given, **parts})
