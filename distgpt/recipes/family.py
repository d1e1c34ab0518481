"""--family: the recipe of `fast` with an architecture that transformers and llama.cpp have."""

from __future__ import annotations

from dataclasses import replace

from distgpt.core.base.errors import UsageError, did_you_mean, reject_combination
from distgpt.core.config.presets import DEFAULT_PRESET, FAMILIES, base_preset
from distgpt.core.config.run_request import RunRequest, resolve
from distgpt.core.train.plan import begins_anew

BLOCK = 32  # elements of a quantized block in GGUF; smaller remainders stay in float32


def with_family(request: RunRequest) -> RunRequest:
    """Return the request with the architecture of its family. A resumed run keeps its architecture."""
    family, request = str(request.family), replace(request, family=None)
    if not begins_anew(request):
        return request
    if family not in FAMILIES:
        raise UsageError(f"unknown family {family!r:.80}{did_you_mean(family[:80], FAMILIES)}")
    init = {"init": request.settings().get("init")}
    reject_combination("--family", init, "the weights set the architecture")
    chosen = request.layers()[0] or DEFAULT_PRESET
    if not base_preset(chosen).get("value_embeddings"):
        raise UsageError(f"--family is for the presets fast, sprint and tiny; omit --preset {chosen}")
    request = replace(request, derived={**request.derived, **FAMILIES[family]})
    width = max(BLOCK, round(resolve(request).model.hidden / BLOCK) * BLOCK)
    return replace(request, derived={**request.derived, "mlp_width": width})
