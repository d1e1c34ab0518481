"""Recipes: options that stand for several settings, such as --depth, --within and --decay-from.

A recipe is a function from a request to a more detailed request; their order is here.
Not here: the settings (core/config/).
"""

from __future__ import annotations

from distgpt.core.base.errors import Say
from distgpt.core.config.asked import Asked
from distgpt.core.cpu.stages import Stage


def followed(asked: Asked, stage: Stage, say: Say) -> Asked:
    """Return the request with settings in place of recipes, and with its dtype. Collective."""
    from distgpt.core.train.plan import with_dtype

    if asked.has_recipes:
        from distgpt.core.comm.agree import on_root
        from distgpt.recipes.derived import derived, with_decay

        if asked.decay_from is not None:
            asked = on_root(stage.comm, lambda: with_decay(asked))  # first: it names the run that resumes
        if asked.within is not None:
            from distgpt.recipes.within import with_clock

            asked = with_clock(asked, stage, say)  # it chooses a depth
        asked = on_root(stage.comm, lambda: derived(asked, stage.comm.size, say))
    return with_dtype(asked, stage, say)  # last: a recipe may have named one
