"""From a model of transformers to a weights file of ours, tensor by tensor."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distgpt.config import RunConfig
from distgpt.data.hub import PREFIX, TOKENIZER_FILES, download_model
from distgpt.data.tokenizers.naming import Tokenizer, load_tokenizer
from distgpt.errors import DataError, DistgptError, StorageError, UsageError
from distgpt.files import storage_errors
from distgpt.model.model import Architecture
from distgpt.saved.huggingface.mapping import Place, refuse_infinite
from distgpt.saved.huggingface.outcome import Outcome
from distgpt.saved.huggingface.reading import CONFIG, INDEX, Foreign
from distgpt.saved.huggingface.tokenizer_files import tokenizer_in
from distgpt.saved.modelfile import Description
from distgpt.saved.tensors import ORIGIN, write_made

HUB_FILES = (CONFIG, INDEX, "model*.safetensors", *TOKENIZER_FILES)


def import_model(
    source: str, out: Path, tokenizer: str | None, noted: Callable[[str], None] = lambda text: None
) -> Outcome:
    """Write `out` from a directory, a file in it, or hub:ORG/NAME. Holds little more than one tensor."""
    _refuse_place(out)
    repository = source.removeprefix(PREFIX) if source.startswith(PREFIX) else None
    foreign = Foreign(Path(source) if repository is None else download_model(repository, HUB_FILES))
    own = _tokenizer(tokenizer, foreign, noted)
    foreign.verify()
    title = foreign.family.title
    metadata = Description(RunConfig(model=foreign.config), own).to_metadata()
    name = foreign.directory.resolve().name if repository is None else source
    metadata[ORIGIN] = f"{title} model imported from {name}"
    noted(f"{title} with {foreign.config.n_layer} layers of width {foreign.config.n_embd} is being read")
    _write(out, foreign, metadata)
    use = f"distgpt infer --weights {out} --prompt '…'" if own else "distgpt.load in Python"
    return Outcome("weights", out, own.describe() if own else "none", use)


def _refuse_place(out: Path) -> None:
    """Before hours of reading end with a file that cannot be written."""
    with storage_errors("write", out):
        if out.is_dir():
            raise UsageError(f"{out} is a directory; choose another --out, a file in it for example")
        if out.exists():
            raise UsageError(f"{out} exists already; choose another --out, or remove it")
        if not out.parent.is_dir():
            raise StorageError(f"cannot write {out}: there is no directory {out.parent}")
    if not os.access(out.parent, os.W_OK | os.X_OK):
        raise StorageError(f"cannot write {out}: no files can be made in {out.parent}")


def _write(out: Path, foreign: Foreign, metadata: dict[str, str]) -> None:
    dtype = np.dtype(foreign.dtype)
    kinds = {spec.name: (dtype, spec.shape) for spec in Architecture(foreign.config).layout.specs}
    sources: dict[str, list[Place]] = defaultdict(list)
    for place in foreign.family.all_places(foreign.config):
        sources[place.ours].append(place)

    def make(name: str) -> NDArray[Any]:
        """Rows that no tensor fills, those behind the vocabulary, are zeros."""
        array = np.zeros(kinds[name][1], dtype)
        for place in sources[name]:
            foreign.read(place, array[place.first : place.first + place.rows])
        refuse_infinite(array, name, foreign.path)
        return array

    write_made(out, kinds, make, metadata)


def _tokenizer(word: str | None, foreign: Foreign, noted: Callable[[str], None]) -> Tokenizer | None:
    """The one asked for, else the directory's; one of another kind than ours have is left out."""
    if word is not None:
        tokenizer: Tokenizer | None = load_tokenizer(word)
    else:
        try:
            tokenizer = tokenizer_in(foreign.directory)
        except DistgptError as error:
            noted(f"without a tokenizer, as the model's cannot be used; --tokenizer names another ({error})")
            return None
    if tokenizer and tokenizer.size > foreign.config.vocab_size:
        raise DataError(
            f"{foreign.path} has a vocabulary of {foreign.config.vocab_size:,}, too small for its tokenizer"
            f" of {tokenizer.size:,} entries; --tokenizer names another"
        )
    return tokenizer
