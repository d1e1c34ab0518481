"""Models of transformers to weights files of ours and back, tensor by tensor."""

from __future__ import annotations

import json
import os
import platform
import secrets
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distgpt.config import ModelConfig, RunConfig
from distgpt.data.hub import PREFIX, TOKENIZER_FILES, download_model
from distgpt.data.tokenizers.bpe import BpeTokenizer, symbols
from distgpt.data.tokenizers.naming import Tokenizer, load_tokenizer
from distgpt.errors import DataError, DistgptError, StorageError, UsageError, command_line
from distgpt.files import atomic_file, storage_errors, sync_directory
from distgpt.formatting import count
from distgpt.model.model import Architecture
from distgpt.saved.huggingface.families import Family, TensorMapping, family_for
from distgpt.saved.huggingface.reading import (
    CONFIG,
    INDEX,
    OWN_TOKENIZER,
    WHOLE,
    Foreign,
    tokenizer_in,
    transpose,
)
from distgpt.saved.modelfile import ORIGIN, Description, read_description
from distgpt.saved.rundir import find_weights
from distgpt.saved.tensors import read_header, read_rows, verify_data, write_made

HUB_FILES = (CONFIG, INDEX, "model*.safetensors", *TOKENIZER_FILES)
# NumPy's types for what transformers calls by these names; bfloat16 as bits.
STORED = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}

Note = Callable[[str], None]


def import_model(source: str, out: Path, tokenizer: str | None, note: Note = lambda text: None) -> str:
    """Write `out` from a directory, a file in it, or hub:ORG/NAME. Holds little more than one tensor.

    Return what was written and how to use it, for people.
    """
    _refuse_place(out)
    repository = source.removeprefix(PREFIX) if source.startswith(PREFIX) else None
    foreign = Foreign(Path(source) if repository is None else download_model(repository, HUB_FILES))
    own = _tokenizer(tokenizer, foreign, note)
    foreign.verify()
    title = foreign.family.title
    metadata = Description(RunConfig(model=foreign.config), own).to_metadata()
    name = foreign.directory.resolve().name if repository is None else source
    metadata[ORIGIN] = f"{title} model imported from {name}"
    note(f"reading {title} with {count(foreign.config.n_layer, 'layer')} of width {foreign.config.n_embd}")
    _write_weights(out, foreign, metadata)
    use = command_line("infer", "--weights", out, "--prompt", "…") if own else "distgpt.load in Python"
    return _page("weights", out, own.describe() if own else "none", use)


def _page(kind: str, out: Path, tokenizer: str, use: str) -> str:
    return f"{kind:<11}{out}\ntokenizer  {tokenizer}\nnext       {use}"


def _refuse_place(out: Path) -> None:
    """Refuse a file that cannot be written before hours of reading."""
    with storage_errors("write", out):
        if out.is_dir():
            raise UsageError(f"{out} is a directory; choose another --out, a file in it for example")
        if out.exists():
            raise UsageError(f"{out} exists already; choose another --out, or remove it")
        if not out.parent.is_dir():
            raise StorageError(f"cannot write {out}: there is no directory {out.parent}")
    if not os.access(out.parent, os.W_OK | os.X_OK):
        raise StorageError(f"cannot write {out}: no files can be made in {out.parent}")


def _write_weights(out: Path, foreign: Foreign, metadata: dict[str, str]) -> None:
    dtype = np.dtype(foreign.dtype)
    kinds = {spec.name: (dtype, spec.shape) for spec in Architecture(foreign.config).layout.specs}
    sources: dict[str, list[TensorMapping]] = defaultdict(list)
    for mapping in foreign.family.all_mappings(foreign.config):
        sources[mapping.ours].append(mapping)

    def make(name: str) -> NDArray[Any]:
        """Leave zeros in rows that no tensor fills: the padding of the vocabulary."""
        array = np.zeros(kinds[name][1], dtype)
        for mapping in sources[name]:
            foreign.read(mapping, array[mapping.first : mapping.first + mapping.rows])
        refuse_nonfinite(array, name, foreign.path)
        return array

    write_made(out, kinds, make, metadata)


def _tokenizer(name: str | None, foreign: Foreign, note: Note) -> Tokenizer | None:
    """The tokenizer asked for, else the directory's, unless that is of a kind we do not have."""
    if name is not None:
        tokenizer: Tokenizer | None = load_tokenizer(name)
    else:
        try:
            tokenizer = tokenizer_in(foreign.directory)
        except DistgptError as error:
            note(f"without a tokenizer, as the model's cannot be used; --tokenizer names another ({error})")
            return None
    if tokenizer and tokenizer.size > foreign.config.vocab_size:
        raise DataError(
            f"{foreign.path} has a vocabulary of {foreign.config.vocab_size:,}, too small for its tokenizer"
            f" of {tokenizer.size:,} entries; --tokenizer names another"
        )
    return tokenizer


def export_model(path: Path, out: Path, dtype: str, note: Note = lambda text: None) -> str:
    """Make the directory `out`, which appears once it is whole. Holds little more than one tensor.

    Return what was written and how to use it, for people.
    """
    path = find_weights(path)
    description = read_description(path)
    if description.rounded:
        raise UsageError(f"{path} is in int8: export the file that it is from")
    config = description.run.model
    family = family_for(config, path)
    if not out.name:
        raise UsageError(f"{str(out)!r} is not a name for a new directory; choose another --out")
    with storage_errors("use", out):
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UsageError(f"{out} exists and is not an empty directory; choose another --out")
    header = read_header(path)
    verify_data(path, header)
    mappings = {family.full_name(mapping.theirs): mapping for mapping in family.all_mappings(config)}

    def make(name: str) -> NDArray[Any]:
        mapping = mappings[name]
        array = np.zeros(mapping.shape, "<f4")
        if mapping.ours:
            rows = np.empty(mapping.shape[::-1], "<f4") if mapping.transposed else array
            read_rows(path, header, mapping.ours, rows, mapping.first)
            if mapping.transposed:
                transpose(array, rows)
        refuse_nonfinite(array, mapping.ours, path)
        return _narrowed(array, dtype, mapping.ours, path)

    kinds = {name: (np.dtype(STORED[dtype]), mapping.shape) for name, mapping in mappings.items()}
    files = _texts(family, config, description.tokenizer, dtype)
    note(f"writing {family.title} with {count(config.n_layer, 'layer')} of width {config.n_embd}")
    if "F64" in {entry.dtype for entry in header.tensors.values()}:
        note(f"rounding its float64 elements to {dtype}")
    with _new_directory(out) as directory:
        write_made(directory / WHOLE, kinds, make, {"format": "pt"})
        for name, text in files.items():
            with atomic_file(directory / name) as file:
                file.write(text.encode())
    tokenizer = description.tokenizer
    described = tokenizer.describe() if tokenizer else "none"
    if tokenizer and tokenizer.kind not in ("bpe", "byte"):
        described += ", which transformers does not have: kept for distgpt alone"
    use = f"{family.architecture}.from_pretrained({str(out)!r}) in transformers"
    return _page("directory", out, described, use)


def _narrowed(array: NDArray[Any], dtype: str, name: str, path: Path) -> NDArray[Any]:
    """Round to the nearest value of the type, ties to even."""
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
        raise DataError(f"{path}: {name} holds values too large for {dtype}; use --dtype float32")
    return narrow


def _texts(family: Family, config: ModelConfig, tokenizer: Tokenizer | None, dtype: str) -> dict[str, str]:
    """The small files by name; the configuration comes last, since a directory without it is no model."""
    separator = tokenizer.separator if tokenizer else None
    tokens = {"bos_token_id": separator, "eos_token_id": separator}
    settings = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **family.values_for(config),
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


def refuse_nonfinite(array: NDArray[Any], name: str, source: object) -> None:
    if not np.isfinite(array).all():
        raise DataError(f"{source}: {name} holds values that are not finite")


@contextmanager
def _new_directory(final: Path) -> Iterator[Path]:
    """A directory that gets its name once everything in it is on the disk."""
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
    """The unfinished directory of one process: unique on shared disks, and not to be guessed."""
    return final.with_name(f".{final.name}.{platform.node()}.{process}.{secrets.token_hex(6)}.partial")


def _abandoned(final: Path) -> list[Path]:
    """What killed exports on this machine left, also one whose process had our number."""
    left = final.parent.glob(f".{escape(final.name)}.{escape(platform.node())}.*.partial")
    processes = {path: path.name.split(".")[-3] for path in left}
    return [path for path, n in processes.items() if n.isdecimal() and not _is_another(int(n))]


def _is_another(process: int) -> bool:
    """Whether a process of this number runs and is not this one."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return process != os.getpid()


def tokenizer_files(tokenizer: Tokenizer, context: int) -> dict[str, str]:
    """The files that transformers looks for beside a model: their texts by name."""
    own = {} if isinstance(tokenizer, BpeTokenizer) else {OWN_TOKENIZER: tokenizer.to_json()}
    bpe = BpeTokenizer(list(symbols()), [], None) if tokenizer.kind == "byte" else tokenizer
    return own | (_bpe_files(bpe, context) if isinstance(bpe, BpeTokenizer) else {})


def _bpe_files(tokenizer: BpeTokenizer, context: int) -> dict[str, str]:
    vocab = {entry: i for i, entry in enumerate(tokenizer.vocabulary)}
    merges = [f"{a} {b}" for a, b in tokenizer.merges]
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    added = []
    if tokenizer.separator is not None:
        content = tokenizer.decode([tokenizer.separator])
        settings |= dict.fromkeys(("bos_token", "eos_token", "unk_token"), content)
        plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added = [{"id": tokenizer.separator, "content": content, **plain, "special": True}]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }
    return {
        "tokenizer.json": json.dumps(whole, ensure_ascii=False),
        "tokenizer_config.json": json.dumps(settings, indent=1),
        "vocab.json": json.dumps(vocab, ensure_ascii=False),
        "merges.txt": "".join(f"{line}\n" for line in ["#version: 0.2", *merges]),
    }
