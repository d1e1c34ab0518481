"""Chooses the kind of model that a run trains, by its settings."""

from __future__ import annotations

from distgpt.config import TrainConfig
from distgpt.training.opening.model_kind import ModelKind, WholeModel


def kind_of(t: TrainConfig) -> ModelKind:
    if t.lora_rank:
        from distgpt.training.opening.adapter_kind import AdapterKind

        return AdapterKind()
    return WholeModel()
