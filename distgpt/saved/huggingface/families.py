"""Which family a model belongs to: by the name in its configuration, or by what our own is made of."""

from __future__ import annotations

from distgpt.config import ModelConfig
from distgpt.errors import DataError, UsageError
from distgpt.saved.huggingface.gpt2 import GPT2
from distgpt.saved.huggingface.llama import LLAMA
from distgpt.saved.huggingface.mapping import Family, Settings

FAMILIES = (GPT2, LLAMA)


def recognised(settings: Settings) -> tuple[Family, ModelConfig]:
    """The family and our configuration of a model with this config.json, or a DataError that says why not."""
    word = settings.values.get("model_type")
    family = next((family for family in FAMILIES if family.model_type == word), None)
    if family is None:
        known = " and ".join(repr(family.model_type) for family in FAMILIES)
        raise DataError(f"{settings.source}: model_type is {word!r:.40}; {known} can be imported")
    if settings.values.get("quantization_config") is not None:
        raise DataError(f"{settings.source}: its weights are quantized, which cannot be imported")
    try:
        config = family.config_from(settings)
    except UsageError as error:
        raise DataError(f"{settings.source}: {family.in_its_words(str(error))}") from None
    if config.vocab_size < 1:
        raise DataError(f"{settings.source}: vocab_size is {config.vocab_size}: it must be at least 1")
    return family, config


def family_for(config: ModelConfig, source: object) -> Family:
    """The one that a model of ours can be exported as."""
    lacking = {family: family.lacks(config) for family in FAMILIES}
    for family, features in lacking.items():
        if not features:
            return family
    reasons = "; ".join(f"{family.title} has no {', no '.join(lacking[family])}" for family in FAMILIES)
    raise UsageError(f"{source} cannot be exported, as transformers has no such model: {reasons}")
