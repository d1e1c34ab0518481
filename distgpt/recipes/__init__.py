"""Recipes: options that stand for multiple settings, such as --depth, --within and --decay-from.

A recipe is a function from a request to a more detailed request. This module has their order. Not here: the
settings (core/config/).
"""

from __future__ import annotations

from distgpt.core.base.errors import Say
from distgpt.core.config.run_request import RunRequest
from distgpt.core.cpu.stages import Stage


def followed(request: RunRequest, stage: Stage, say: Say) -> RunRequest:
    """Return the request with its recipes replaced by settings, and with its dtype. Collective."""
    from distgpt.core.train.plan import with_dtype

    if request.has_recipes:
        from distgpt.core.comm.agree import on_root
        from distgpt.recipes.derived import derived, with_decay

        if request.decay_from is not None:
            request = on_root(
                stage.comm, lambda: with_decay(request)
            )  # first, since it names the run to resume
        if request.within is not None:
            from distgpt.recipes.within import with_clock

            request = with_clock(request, stage, say)  # chooses a depth
        request = on_root(stage.comm, lambda: derived(request, stage.comm.size, say))
    return with_dtype(request, stage, say)  # last: a recipe may set a dtype
