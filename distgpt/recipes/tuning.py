"""Tuning a model on chats: the settings that follow from the model, where the user names no others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from distgpt.core.base.errors import UsageError
from distgpt.core.config import SETTINGS
from distgpt.core.config.asked import Asked
from distgpt.core.config.run_config import BATCH_KEYS
from distgpt.core.saved.modelfile import read_description
from distgpt.core.saved.weights import weights_of
from distgpt.core.train.plan import begins_anew

NAME = "tune"  # of the run
TOKENS = 4096  # tokens of a step, about


def tuned(asked: Asked, ranks: int) -> Asked:
    """Return what is asked for with the settings of a new run that learns chats. For rank 0."""
    asked = asked if asked.toml else replace(asked, title=NAME)
    if not begins_anew(asked):
        return asked
    said = asked.settings()
    if not said.get("init"):
        raise UsageError("which model is to be tuned? --weights says that (distgpt help tuning)")
    model = read_description(weights_of(Path(str(said["init"])), asked.fetches)).run.model
    seq_len = said.get("seq_len", model.seq_len)
    SETTINGS["seq_len"].check("seq_len", seq_len)
    assert isinstance(seq_len, int)
    rows = max(1, TOKENS // seq_len)
    found: dict[str, Any] = {"schedule": "linear", "warmup": 0, "weight_decay": 0.0}
    if not BATCH_KEYS & said.keys():
        found["batch_size"] = -(-rows // ranks) * ranks
    if not {"steps", "train_minutes"} & said.keys():
        found["epochs"] = 3.0
    return replace(asked, derived=found)
