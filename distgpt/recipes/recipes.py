"""Recipes: options that stand for settings. What they are, from what is asked for, in their order."""

from __future__ import annotations

from distgpt.core.base.errors import Say
from distgpt.core.config.asked import Asked
from distgpt.core.cpu.stages import Stage


def followed(asked: Asked, stage: Stage, say: Say) -> Asked:
    """Return the request with settings in place of recipes. Collective."""
    if asked.decay_from is not None:
        from distgpt.recipes.decay import with_decay

        asked = with_decay(asked, stage.comm)  # first: it names the run that resumes
    if asked.within is not None:
        from distgpt.recipes.within import with_clock

        asked = with_clock(asked, stage, say)  # it chooses a depth
    if asked.depth is not None or asked.deterministic or asked.given.get("chats"):
        from distgpt.recipes.derived import everywhere, reported

        before = asked
        asked = everywhere(stage.comm, lambda: reported(before, stage.comm.size, say))
    return asked
