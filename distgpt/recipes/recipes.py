"""Recipes: options that stand for settings. What they are, from what is asked for, in their order."""

from __future__ import annotations

from distgpt.core.base.errors import Say
from distgpt.core.config.asked import Asked
from distgpt.core.config.presets import DEFAULT_PRESET
from distgpt.core.cpu.stages import Stage
from distgpt.core.train.plan import with_dtype

CHOOSES_MODEL = {"init", "chats", "n_layer", "n_embd"}


def followed(asked: Asked, stage: Stage, say: Say) -> Asked:
    """Return what is asked for with settings in place of recipes. Collective."""
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
    return with_dtype(asked, stage, say)  # last: the gain depends on the model


def note_small_model(stage: Stage, asked: Asked, say: Say) -> None:
    """Suggest a larger model than the default one for a GPU. For all ranks."""
    by_recipe = asked.depth or asked.within or asked.decay_from
    is_chosen = by_recipe or asked.preset or asked.toml or asked.resume or asked.given.keys() & CHOOSES_MODEL
    if not stage.on_gpu or stage.comm.rank or is_chosen:
        return
    # The bundled text is read too fast: five minutes of it would be learned by heart.
    own = "" if "data" in asked.given else "with a text of your own (--data) "
    say(f"{DEFAULT_PRESET} is small for a GPU: {own}--within 5m chooses what learns most in 5 minutes")
