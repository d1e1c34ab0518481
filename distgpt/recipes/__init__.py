"""Recipes: options that stand for multiple settings, such as --depth, --within and --decay-from.

A recipe is a function from a request to a more detailed request. This module has their order. Not here: the
settings (core/config/).
"""

from __future__ import annotations

from distgpt.core.base.errors import Say
from distgpt.core.config.asked import Asked
from distgpt.core.cpu.stages import Stage


def followed(asked: Asked, stage: Stage, say: Say) -> Asked:
    """Return the request with its recipes replaced by settings, and with its dtype. Collective."""
    from distgpt.core.train.plan import with_dtype

    if asked.has_recipes:
        from distgpt.core.comm.agree import on_root
        from distgpt.recipes.derived import derived, with_decay

        if asked.decay_from is not None:
            asked = on_root(stage.comm, lambda: with_decay(asked))  # first, since it names the run to resume
        if asked.within is not None:
            from distgpt.recipes.within import with_clock

            asked = with_clock(asked, stage, say)  # chooses a depth
        asked = on_root(stage.comm, lambda: derived(asked, stage.comm.size, say))
    return with_dtype(asked, stage, say)  # last: a recipe may set a dtype
