"""From a weights file of ours to a directory that transformers loads, tensor by tensor."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distgpt.config import ModelConfig
from distgpt.data.tokenizers.naming import Tokenizer
from distgpt.errors import DataError, UsageError
from distgpt.files import atomic_file, storage_errors, sync_directory
from distgpt.saved.huggingface.families import family_for
from distgpt.saved.huggingface.mapping import Family, Place, refuse_infinite, turn
from distgpt.saved.huggingface.outcome import Outcome
from distgpt.saved.huggingface.reading import CONFIG, WHOLE
from distgpt.saved.huggingface.tokenizer_files import is_known_to_transformers, tokenizer_files
from distgpt.saved.modelfile import read_description
from distgpt.saved.tensors import read_header, read_rows, verify_data, write_made

# How numpy keeps what transformers calls by this name; bfloat16 as bits.
STORED = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}


def export_model(
    path: Path, out: Path, dtype: str, noted: Callable[[str], None] = lambda text: None
) -> Outcome:
    """Make the directory `out`, which appears once it is whole. Holds little more than one tensor."""
    description = read_description(path)
    config = description.run.model
    family = family_for(config, path)
    if not out.name:
        raise UsageError(f"{str(out)!r} is no name for a new directory; choose another --out")
    with storage_errors("use", out):
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UsageError(f"{out} exists and is no empty directory; choose another --out")
    header = read_header(path)
    verify_data(path, header)
    places = {family.full_name(place.theirs): place for place in family.all_places(config)}

    def make(name: str) -> NDArray[Any]:
        place = places[name]
        shape = place.shape[::-1] if place.turned else place.shape
        rows = np.zeros(shape, "<f4")
        if place.ours:
            read_rows(path, header, place.ours, rows, place.first)
        refuse_infinite(rows, place.ours, path)
        return _narrowed(_as_theirs(rows, place), dtype, place.ours, path)

    kinds = {name: (np.dtype(STORED[dtype]), place.shape) for name, place in places.items()}
    files = _texts(family, config, description.tokenizer, dtype)
    noted(f"{family.title} with {config.n_layer} layers of width {config.n_embd} is being written")
    if "F64" in {entry.dtype for entry in header.tensors.values()}:
        noted(f"its numbers, which are float64, are rounded to {dtype}")
    with _new_directory(out) as directory:
        write_made(directory / WHOLE, kinds, make, {"format": "pt"})
        for name, text in files.items():
            with atomic_file(directory / name) as file:
                file.write(text.encode())
    use = f"{family.architecture}.from_pretrained({str(out)!r}) in transformers"
    return Outcome("directory", out, _described(description.tokenizer), use)


def _described(tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return "none"
    known = is_known_to_transformers(tokenizer)
    return tokenizer.describe() + (
        "" if known else ", which transformers does not have: kept for distgpt alone"
    )


def _as_theirs(rows: NDArray[Any], place: Place) -> NDArray[Any]:
    if not place.turned:
        return rows
    turned = np.empty(place.shape, rows.dtype)
    turn(turned, rows)
    return turned


def _narrowed(array: NDArray[Any], dtype: str, name: str, path: Path) -> NDArray[Any]:
    """Rounded to the nearest number of the type, to the even one in the middle."""
    if dtype == "float32":
        return array
    with np.errstate(over="ignore"):
        if dtype == "float16":
            narrow = array.astype("<f2")
            fits = np.isfinite(narrow).all()
        else:  # a bfloat16 is the upper half of a float32
            bits = array.view("<u4")
            narrow = ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype("<u2")
            fits = ((narrow & 0x7F80) != 0x7F80).all()
    if not fits:
        raise DataError(f"{path}: {name} holds numbers too large for {dtype}; --dtype float32 has room")
    return narrow


def _texts(family: Family, config: ModelConfig, tokenizer: Tokenizer | None, dtype: str) -> dict[str, str]:
    """The small files by name; the configuration comes last, since a directory without it is no model."""
    separator = tokenizer.separator if tokenizer else None
    tokens = {"bos_token_id": separator, "eos_token_id": separator}
    settings = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        **family.renamed(config),
        **family.config_for(config),
        "tie_word_embeddings": config.tied,
        "initializer_range": config.init_std,
        **tokens,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    return {
        **(tokenizer_files(tokenizer, config.seq_len) if tokenizer else {}),
        "generation_config.json": json.dumps({"_from_model_config": True, **tokens}, indent=1),
        CONFIG: json.dumps(settings, indent=1),
    }


@contextmanager
def _new_directory(final: Path) -> Iterator[Path]:
    """A directory that gets its name once all in it is on the disk."""
    partial = _partial(final, os.getpid())
    with storage_errors("write", final):
        for abandoned in _abandoned(final):
            shutil.rmtree(abandoned, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
            yield partial
            partial.rename(final)
            sync_directory(final.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def _partial(final: Path, process: int) -> Path:
    """Of this process alone, also where machines share the disk."""
    return final.with_name(f"{_prefix(final)}{process}.partial")


def _prefix(final: Path) -> str:
    return f".{final.name}.{platform.node()}."


def _abandoned(final: Path) -> list[Path]:
    """What killed exports on this machine have left, a former one of our own number among them."""
    left = final.parent.glob(f"{escape(_prefix(final))}*.partial")
    numbers = {path: path.name.split(".")[-2] for path in left}
    return [path for path, n in numbers.items() if n.isdecimal() and not _is_anothers(int(n))]


def _is_anothers(process: int) -> bool:
    """Whether there is such a process, other than this one."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return process != os.getpid()
