"""Weights by the name hub:ORG/NAME: a model of the Hugging Face Hub, kept in the user's cache."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from distgpt.core.base.caches import CACHE, cache_folder
from distgpt.core.base.errors import UsageError, command_line, print_lines
from distgpt.core.saved.tensors import read_header
from distgpt.formats.huggingface import import_model
from distgpt.texts.tokenizers.hub import PREFIX


def fetched_weights(repository: str, fetches: bool) -> Path:
    """Return the file of a model. It is imported first where the user's cache does not have it yet.

    Without `fetches` such a model is refused.
    """
    name, folder = PREFIX + repository, cache_folder("models")
    if folder is None:
        raise UsageError(f"{name} has no place: set {CACHE} to a folder that only you can write to")
    found = folder / f"{repository.replace('/', '--')}.safetensors"
    if not found.exists():
        if not fetches:
            own = command_line("weights", "import", name, "--out", "model.safetensors")
            raise UsageError(f"{name} is not on this machine yet: first {own}, then name that file")
        note = partial(print_lines, err=True)
        import_model(name, found, None, note)
        if not read_header(found).metadata["tokenizer"]:
            found.unlink()
            own = command_line("weights", "import", name, "--tokenizer", "…", "--out", "…")
            raise UsageError(f"{name} has no tokenizer that can be used; import it with another: {own}")
        note(f"{name} is kept as {found}; remove it to fetch it anew")
    return found
