"""Models of transformers: untrusted input, imported and exported tensor by tensor."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distgpt.core.base.caches import CACHE, cache_folder
from distgpt.core.base.checked import parse_object
from distgpt.core.base.errors import (
    DataError,
    DistgptError,
    StorageError,
    UsageError,
    command_line,
    print_lines,
)
from distgpt.core.base.files import (
    atomic_file,
    open_regular,
    read_small,
    storage_errors,
    sync_directory,
    unfinished,
    unfinished_versions,
)
from distgpt.core.base.formatting import count
from distgpt.core.comm.api import SerialComm
from distgpt.core.components import components
from distgpt.core.config import ModelConfig, RunConfig
from distgpt.core.data.tokenizers import Tokenizer, load_tokenizer
from distgpt.core.model.model import Architecture
from distgpt.core.ops.low_precision import from_bfloat16, to_bfloat16
from distgpt.core.saved.modelfile import ORIGIN, Description, read_description
from distgpt.core.saved.tensors import (
    Entry,
    Header,
    Kind,
    LazyTensors,
    read_header,
    read_rows,
    refuse_misfits,
    verify_data,
    write_tensors,
)
from distgpt.core.saved.weights import Merge, find_weights, verified
from distgpt.corpora.tokenizers.bpe import BpeTokenizer, symbols
from distgpt.corpora.tokenizers.third_party import CHAT_FILES, PREFIX, TOKENIZER_FILES, download_model
from distgpt.corpora.tokenizers.tokenizer_json import LibraryTokenizer, added_token
from distgpt.models.formats.families import HEAD, Family, Settings, TensorMapping, family_for, recognised

CONFIG, WHOLE = "config.json", "model.safetensors"
INDEX = f"{WHOLE}.index.json"
# File for a tokenizer that transformers does not support, and for the byte tokenizer, which transformers
# supports only as BPE without merges, so that import restores it.
OWN_TOKENIZER = "distgpt_tokenizer.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")


class Foreign:
    """A model in the files of transformers. Tensor names have no family prefix."""

    def __init__(self, path: Path) -> None:
        """Check everything except the tensors' data, which are not read."""
        self.path = path
        self.directory, self.settings, self.headers = open_files(path)
        self.family, self.config = recognised(self.settings)
        self._tensors: dict[str, tuple[Path, Header, str]] = {}  # the last element is the name in the file
        for file, header in self.headers.items():
            for name in header.tensors:
                short = name.removeprefix(self.family.prefix)
                if re.fullmatch(self.family.buffers, short) or (self.config.tied and short == HEAD):
                    continue  # transformers does not load these either
                if short in self._tensors:
                    raise DataError(f"{short!r:.80} of {file} is a duplicate")
                self._tensors[short] = file, header, name
        # Check this first, so that a bogus number of layers cannot make the list of expected tensors huge.
        if (layers := self.config.n_layer) > len(self._tensors):
            raise DataError(f"{path}: its configuration has {layers} layers, more than the file")
        expected = {mapping.theirs: mapping.shape for mapping in self.family.all_mappings(self.config)}
        refuse_misfits(Header({name: self._entry(name) for name in self._tensors}, {}, 0), expected, path)

    def _entry(self, name: str) -> Entry:
        _, header, stored = self._tensors[name]
        return header.tensors[stored]

    @property
    def dtype(self) -> str:
        """The narrowest of our types that represents every element exactly."""
        return "<f8" if "F64" in {self._entry(name).dtype for name in self._tensors} else "<f4"

    def stored(self, mappings: list[TensorMapping], shape: tuple[int, ...]) -> Kind:
        """Return the type and shape to store a tensor in."""
        return np.dtype(self.dtype), shape

    def verify(self) -> None:
        for file, header in self.headers.items():
            verify_data(file, header)

    def read(self, mapping: TensorMapping, out: NDArray[Any]) -> None:
        """Fill our rows that correspond to this tensor."""
        rows = np.empty(mapping.shape, self.dtype) if mapping.transposed else out
        read_rows(*self._tensors[mapping.theirs], rows)
        if mapping.transposed:
            transpose(out, rows)

    def tokenizer(self) -> Tokenizer | None:
        if (self.directory / OWN_TOKENIZER).exists():
            return load_tokenizer(str(self.directory / OWN_TOKENIZER))
        for together in (TOKENIZER_FILES[:1], TOKENIZER_FILES[1:]):
            if all((self.directory / name).exists() for name in together):
                return load_tokenizer(str(self.directory))
        return None


def transpose(out: NDArray[Any], source: NDArray[Any]) -> None:
    """out ← sourceᵀ, in strips that fit in the cache."""
    for start in range(0, len(source), 64):
        out[:, start : start + 64] = source[start : start + 64].T


def read_object(path: Path) -> dict[str, Any]:
    return parse_object(read_small(path), path)


def open_files(path: Path) -> tuple[Path, Settings, dict[Path, Header]]:
    """Return the directory, its configuration, and the headers of the tensor files."""
    directory, files = _files(path)
    settings = Settings(read_object(directory / CONFIG), str(directory / CONFIG))
    return directory, settings, {file: read_header(file) for file in files}


def _files(path: Path) -> tuple[Path, list[Path]]:
    """Return the directory with the configuration, and the tensor files."""
    if path.suffix in PICKLES:
        raise _pickled(path)
    with storage_errors("read", path):
        if not path.is_dir():
            open_regular(path).close()  # rejects pipes and devices
        directory = path if path.is_dir() else path.parent
        if not (directory / CONFIG).is_file():
            if (directory / "config.toml").is_file():
                raise UsageError(f"{directory} is a distgpt run, which does not need an import")
            raise DataError(f"{directory} has no {CONFIG} to describe the model")
        whole, index = directory / WHOLE, directory / INDEX
        if path.is_file() and path.suffix != ".json":
            return directory, [path]
        if whole.is_file() and path != index:
            return directory, [whole]
        if index.is_file():
            return directory, _shards(index)
        pickles = [file for file in sorted(directory.iterdir()) if file.suffix in PICKLES]
        raise _pickled(pickles[0]) if pickles else DataError(f"{directory} has neither {WHOLE} nor {INDEX}")


def _pickled(path: Path) -> DataError:
    return DataError(
        f"cannot read {path}, because a pickle file can run any code; save the model as safetensors"
        " first, such as with model.save_pretrained(DIR) in transformers"
    )


def _shards(index: Path) -> list[Path]:
    """Return the files that an index lists."""
    mapped = read_object(index).get("weight_map")
    if not isinstance(mapped, dict) or not mapped:
        raise DataError(f"{index} is corrupt: no weight_map")
    result = set()
    for name, file in mapped.items():
        if not isinstance(file, str) or file in ("", ".", "..") or not set(file).isdisjoint("/\\\0"):
            raise DataError(f"{index}: {name!r:.80} is in {file!r:.80}, not in the same directory")
        result.add(index.with_name(file))
    if missing := [path.name for path in sorted(result) if not path.is_file()]:
        raise DataError(f"{index} lists {missing[0]!r:.80}, which is missing")
    return sorted(result)


HUB_FILES = tuple({CONFIG, INDEX, "model*.safetensors", *TOKENIZER_FILES, *CHAT_FILES})
# NumPy types for the dtype names of transformers; bfloat16 as bits.
STORED = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}

Note = Callable[[str], None]


def import_model(source: str, out: Path, tokenizer: str | None, note: Note = lambda text: None) -> str:
    """Write `out` from a directory, a file in it, or hub:ORG/NAME. Return a summary.

    Uses little more memory than the largest tensor.
    """
    refuse_place(out)
    repository = source.removeprefix(PREFIX) if source.startswith(PREFIX) else None
    foreign = Foreign(Path(source) if repository is None else download_model(repository, HUB_FILES))
    name = foreign.directory.resolve().name if repository is None else source
    return import_from(foreign, name, out, tokenizer, note)


def fetched_weights(repository: str, fetches: bool) -> Path:
    """Return the weights file of a hub model, imported into the user's cache if needed.

    Without `fetches`, raise a UsageError if it is not in the cache.
    """
    name, folder = PREFIX + repository, cache_folder("models")
    if folder is None:
        raise UsageError(f"cannot store {name}; set {CACHE} to a directory only you can write to")
    result = folder / f"{repository.replace('/', '--')}.safetensors"
    if not result.exists():
        if not fetches:
            own = command_line("weights", "import", name, "--out", "model.safetensors")
            raise UsageError(f"{name} is not on this machine; import it first: {own}")
        note = partial(print_lines, err=True)
        import_model(name, result, None, note)
        if not read_header(result).metadata["tokenizer"]:
            result.unlink()
            own = command_line("weights", "import", name, "--tokenizer", "…", "--out", "…")
            raise UsageError(f"{name} has no usable tokenizer; import it with another: {own}")
        note(f"stored {name} as {result}; to download it again, remove this file")
    return result


def import_from(foreign: Any, name: str, out: Path, tokenizer: str | None, note: Note) -> str:
    """Write `out` from a `Foreign` or a `GgufModel`; `name` is its source."""
    own = _tokenizer(tokenizer, foreign, note)
    foreign.verify()
    _refuse_biases(foreign)
    title, config = foreign.family.title, foreign.config
    metadata = Description(RunConfig(model=config), own).to_metadata()
    metadata[ORIGIN] = f"{title} model imported from {name}"
    note(f"reading {title} with {count(config.n_layer, 'layer')} of width {config.n_embd}")
    _write_weights(out, foreign, metadata)
    use = command_line("infer", "--weights", out, "--prompt", "…") if own else "distgpt.load in Python"
    return page("weights", out, own.describe() if own else "none", use)


def _refuse_biases(foreign: Any) -> None:
    """Raise a DataError if a bias that the configuration excludes is not zero."""
    for mapping in foreign.family.all_mappings(foreign.config):
        if not mapping.ours:
            array = np.empty(mapping.our_shape, foreign.dtype)
            foreign.read(mapping, array)
            if array.any():
                raise DataError(
                    f"{foreign.path}: {mapping.theirs} must be zero, because the configuration has no bias"
                )


def page(kind: str, out: Path, tokenizer: str, use: str) -> str:
    return f"{kind:<11}{out}\ntokenizer  {tokenizer}\nnext       {use}"


def refuse_place(out: Path) -> None:
    """Raise an error before hours of reading if the file cannot be written."""
    with storage_errors("write", out):
        if out.exists():
            raise UsageError(f"{out} already exists; choose another --out, or remove it")
    if not os.access(out.parent, os.W_OK | os.X_OK):
        raise StorageError(f"cannot write {out}: {out.parent} is not writable")


def refuse_directory(out: Path) -> None:
    if not out.name:
        raise UsageError(f"{str(out)!r} is not a name for a new directory; choose another --out")
    with storage_errors("use", out):
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UsageError(f"{out} exists and is not an empty directory; choose another --out")


def _write_weights(out: Path, foreign: Any, metadata: dict[str, str]) -> None:
    sources: dict[str, list[TensorMapping]] = defaultdict(list)
    for mapping in foreign.family.all_mappings(foreign.config):
        sources[mapping.ours].append(mapping)
    specs = Architecture(foreign.config).layout.specs
    kinds = {spec.name: foreign.stored(sources[spec.name], spec.shape) for spec in specs}

    def make(name: str) -> NDArray[Any]:
        """Rows without a tensor, the padding of the vocabulary, stay zero."""
        dtype, shape = kinds[name]
        array = np.zeros(shape, dtype)
        for mapping in sources[name]:
            foreign.read(mapping, array[mapping.first : mapping.first + mapping.rows])
        refuse_nonfinite(array["d"] if dtype.names else array, name, foreign.path)
        return array

    write_tensors(out, LazyTensors(kinds, make), metadata)


def _tokenizer(name: str | None, foreign: Any, note: Note) -> Tokenizer | None:
    """Return the requested tokenizer, or the model's own, or None if that is not supported."""
    if name is not None:
        tokenizer: Tokenizer | None = load_tokenizer(name)
    else:
        try:
            tokenizer = foreign.tokenizer()
        except DistgptError as error:
            note(f"without a tokenizer ({error}); to use another one, pass --tokenizer")
            return None
    if tokenizer and tokenizer.size > foreign.config.vocab_size:
        raise DataError(
            f"{foreign.path} has a vocabulary of {foreign.config.vocab_size:,}, too small for its tokenizer"
            f" of {tokenizer.size:,} entries; pass another --tokenizer"
        )
    return tokenizer


def export_model(path: Path, out: Path, dtype: str, note: Note = lambda text: None) -> str:
    """Export to the new directory `out`, which appears when it is complete. Return a summary.

    Uses little more memory than the largest tensor.
    """
    path, description, _ = exportable(path)
    config = description.run.model
    family = family_for(config, path)
    refuse_directory(out)
    header = verified(path)
    mappings = {family.full_name(mapping.theirs): mapping for mapping in family.all_mappings(config)}

    def make(name: str) -> NDArray[Any]:
        mapping = mappings[name]
        array = rows = our_rows(path, header, mapping)
        if mapping.transposed:
            array = np.empty(mapping.shape, "<f4")
            transpose(array, rows)
        return narrowed(array, dtype, mapping.ours, path)

    kinds = {name: (np.dtype(STORED[dtype]), mapping.shape) for name, mapping in mappings.items()}
    files = _texts(family, config, description.tokenizer, dtype)
    note(f"writing {family.title} with {count(config.n_layer, 'layer')} of width {config.n_embd}")
    with new_directory(out) as directory:
        write_tensors(directory / WHOLE, LazyTensors(kinds, make), {"format": "pt"})
        for name, text in files.items():
            with atomic_file(directory / name) as file:
                file.write(text.encode())
    tokenizer = description.tokenizer
    described = tokenizer.describe() if tokenizer else "none"
    if tokenizer and tokenizer.kind in ("char", "word"):
        described += ", which only distgpt can read"
    use = f"{family.architecture}.from_pretrained({str(out)!r}) in transformers"
    return page("directory", out, described, use)


def exportable(path: Path, merges: bool = False) -> tuple[Path, Description, Merge | None]:
    """Return the weights file of a path, its description, and if `merges`, how to merge an adapter."""
    path, merge = find_weights(path), None
    description = read_description(path)
    if merges and description.part:
        path, merge = components().part(description.part).whole(path, SerialComm())
        description = read_description(path)
        description = replace(description, tokenizer=merge.tokenizer or description.tokenizer)
    description.reject_incomplete(path)
    if description.rounded:
        raise UsageError(f"{path} is in {description.rounded}; export the original file")
    return path, description, merge


def our_rows(path: Path, header: Header, mapping: TensorMapping, merge: Merge | None = None) -> NDArray[Any]:
    """Return our rows that correspond to a tensor of theirs."""
    array = np.full(mapping.our_shape, mapping.fill, "<f4")
    if mapping.ours and merge and array.ndim == 2:  # a merge changes whole matrices
        whole = np.empty(header.tensors[mapping.ours].shape, "<f4")
        read_rows(path, header, mapping.ours, whole)
        merge(mapping.ours, whole)
        array[...] = whole[mapping.first : mapping.first + mapping.rows]
    elif mapping.ours:
        read_rows(path, header, mapping.ours, array, mapping.first)
    if mapping.norm_eps is not None:
        array /= np.sqrt(np.square(array).mean(1, keepdims=True) + mapping.norm_eps)
    refuse_nonfinite(array, mapping.ours, path)
    return array


def narrowed(array: NDArray[Any], dtype: str, name: str, path: Path) -> NDArray[Any]:
    """Round to the nearest value of the dtype, ties to even."""
    if dtype == "float32":
        return array
    with np.errstate(over="ignore"):
        narrow = array.astype("<f2") if dtype == "float16" else to_bfloat16(array)
    if not np.isfinite(narrow if dtype == "float16" else from_bfloat16(narrow)).all():
        raise DataError(f"{path}: {name} has values too large for {dtype}; use --dtype float32")
    return narrow


def _texts(family: Family, config: ModelConfig, tokenizer: Tokenizer | None, dtype: str) -> dict[str, str]:
    """Return the small files by name, config.json last, because a directory without it is not a model."""
    separator = tokenizer.separator if tokenizer else None
    ends = list(dict.fromkeys(chat.ends)) if tokenizer and (chat := tokenizer.chat) else []
    first = tokenizer.first[0] if tokenizer and tokenizer.first else separator
    tokens = {"bos_token_id": first, "eos_token_id": ends or separator}
    settings = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
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
        raise DataError(f"{source}: {name} has values that are not finite")


@contextmanager
def new_directory(final: Path) -> Iterator[Path]:
    """Yield a temporary directory, renamed once it is on disk. Remove directories of killed exports."""
    partial = unfinished(final)
    with storage_errors("write", final):
        final.parent.mkdir(parents=True, exist_ok=True)
        for abandoned in unfinished_versions(final):
            shutil.rmtree(abandoned, ignore_errors=True)
        try:
            partial.mkdir()
            yield partial
            partial.rename(final)
            sync_directory(final.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def tokenizer_files(tokenizer: Tokenizer, context: int) -> dict[str, str]:
    """Return the tokenizer files that transformers loads, by name."""
    foreign = isinstance(tokenizer, BpeTokenizer | LibraryTokenizer)
    own = {} if foreign else {OWN_TOKENIZER: tokenizer.to_json()}
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    if chat := tokenizer.chat:
        settings |= {**chat.tokens, "chat_template": chat.source}
    if isinstance(tokenizer, LibraryTokenizer):
        whole = json.dumps(tokenizer.contents()["document"], ensure_ascii=False)
        return {"tokenizer.json": whole, "tokenizer_config.json": json.dumps(settings, indent=1)}
    bpe = BpeTokenizer(list(symbols()), [], None) if tokenizer.kind == "byte" else tokenizer
    return own | (_bpe_files(bpe, settings) if isinstance(bpe, BpeTokenizer) else {})


def _bpe_files(tokenizer: BpeTokenizer, settings: dict[str, Any]) -> dict[str, str]:
    vocab = {entry: i for i, entry in enumerate(tokenizer.vocabulary)}
    merges = [f"{a} {b}" for a, b in tokenizer.merges]
    added = []
    if tokenizer.separator is not None:
        content = tokenizer.decode([tokenizer.separator])
        settings = dict.fromkeys(("bos_token", "eos_token", "unk_token"), content) | settings
        added = [added_token(tokenizer.separator, content, special=True)]
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
