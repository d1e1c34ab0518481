"""--deterministic on CPUs: reproducible parts, where no source of settings names them."""

from __future__ import annotations

from dataclasses import replace

from distgpt.core.config.asked import Asked, resumed
from distgpt.core.train.plan import new_run
from distgpt.core.train.resume import saved_run
from distgpt.parallel.reproducible import usual_parts


def with_parts(asked: Asked) -> Asked:
    """Return what is asked for with a number of parts that suits its batch. For rank 0."""
    before = saved_run(asked)
    t = (resumed(before, asked) if before else new_run(asked)).train
    parts = {} if t.reproducible_parts else {"reproducible_parts": usual_parts(t.batch_size)}
    return replace(asked, deterministic=False, given={**asked.given, **parts})
