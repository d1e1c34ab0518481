"""A model of transformers, opened with mistrust: what it says it is, and where each tensor lies."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distgpt.checked import parse_object
from distgpt.config import ModelConfig
from distgpt.data.hub import TOKENIZER_FILES
from distgpt.data.tokenizers.naming import Tokenizer, load_tokenizer
from distgpt.errors import DataError, UsageError
from distgpt.files import open_regular, read_small, storage_errors
from distgpt.saved.huggingface.families import HEAD, Family, Settings, TensorMapping, recognised
from distgpt.saved.tensors import Header, read_header, read_rows, refuse_misfits, verify_data

CONFIG, WHOLE = "config.json", "model.safetensors"
INDEX = f"{WHOLE}.index.json"
# A tokenizer that transformers cannot have is kept in a file of ours. So is the byte tokenizer, which
# transformers can only have as BPE without merges, so that it comes back as it was.
OWN_TOKENIZER = "distgpt_tokenizer.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")
_PART = re.compile(r".+-\d+-of-(\d+)\.safetensors")
_MOST_JSON = 1 << 26  # bytes; a configuration or an index is far smaller


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor in a file, under the name that it has there."""

    path: Path
    header: Header
    name: str


class Foreign:
    """A model as transformers keeps it. Tensors go by their names without the family's prefix."""

    def __init__(self, path: Path) -> None:
        """Check everything but the tensors' data, which are not read; a DataError says what is wrong."""
        self.path = path
        self.directory, self.settings, self.headers = open_files(path)
        _refuse_a_part(path, self.directory)
        self.family, self.config = recognised(self.settings)
        self._tensors = _by_short_name(self.headers, self.family)
        self.has_spare_head = self.config.tied and HEAD in self._tensors
        _refuse_other_tensors(self._tensors, self.family, self.config, path)

    @property
    def dtype(self) -> str:
        """The narrowest type of ours that rounds no element."""
        stored = {s.header.tensors[s.name].dtype for s in self._tensors.values()}
        return "<f8" if "F64" in stored else "<f4"

    def verify(self) -> None:
        """Compare the data with their checksums, if there are any, and with the configuration."""
        for file, header in self.headers.items():
            verify_data(file, header)
        if self.has_spare_head and not self._equal(HEAD, _embedding(self.family, self.config)):
            raise DataError(
                f"{self.path} has an output layer that differs from its embedding,"
                " but tie_word_embeddings in its configuration says that they are one"
            )
        for tensor in self.family.all_mappings(self.config):
            if not tensor.ours and self.rows(tensor.theirs, tensor.shape[0]).any():
                raise DataError(
                    f"{self.path}: {tensor.theirs} is not zero, but its configuration has no bias"
                )

    def rows(self, name: str, count: int, first: int = 0) -> NDArray[Any]:
        stored = self._tensors[name]
        shape = stored.header.tensors[stored.name].shape
        rows = np.empty((count, *shape[1:]), self.dtype)
        read_rows(stored.path, stored.header, stored.name, rows, first)
        return rows

    def read(self, mapping: TensorMapping, out: NDArray[Any]) -> None:
        """Fill our rows that correspond to this tensor."""
        if mapping.transposed:
            transpose(out, self.rows(mapping.theirs, mapping.shape[0]))
        else:
            stored = self._tensors[mapping.theirs]
            read_rows(stored.path, stored.header, stored.name, out)

    def _equal(self, left: str, right: str) -> bool:
        """Compare in strips, as embeddings are large."""
        size, strip = self.config.vocab_size, 4096
        starts = ((start, min(strip, size - start)) for start in range(0, size, strip))
        return all(
            np.array_equal(self.rows(left, count, start), self.rows(right, count, start))
            for start, count in starts
        )


def transpose(out: NDArray[Any], source: NDArray[Any]) -> None:
    """out ← sourceᵀ, in strips that fit into the processor's cache."""
    for start in range(0, len(source), 64):
        out[:, start : start + 64] = source[start : start + 64].T


def tokenizer_in(directory: Path) -> Tokenizer | None:
    """The tokenizer of an exported or foreign model, None if there is none."""
    if (directory / OWN_TOKENIZER).exists():
        return load_tokenizer(str(directory / OWN_TOKENIZER))
    for together in (TOKENIZER_FILES[:1], TOKENIZER_FILES[1:]):
        if all((directory / name).exists() for name in together):
            return load_tokenizer(str(directory))
    return None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a small file."""
    return parse_object(read_small(path, _MOST_JSON), path)


def open_files(path: Path) -> tuple[Path, Settings, dict[Path, Header]]:
    """The directory, its configuration, and the files with the tensors: intact, of whatever model."""
    directory, files = _files(path)
    settings = Settings(read_object(directory / CONFIG), str(directory / CONFIG))
    return directory, settings, {file: read_header(file) for file in files}


def _files(path: Path) -> tuple[Path, list[Path]]:
    """The directory with the configuration, and the files with the tensors."""
    if path.suffix in PICKLES:
        raise _pickled(path)
    with storage_errors("read", path):
        if not path.is_dir():
            open_regular(path).close()  # refuses pipes and devices
        directory = path if path.is_dir() else path.parent
        if not (directory / CONFIG).is_file():
            if (directory / "config.toml").is_file():
                raise UsageError(f"{directory} is a run of distgpt: its weights need no import")
            where = f"{path} has no {CONFIG}" if path.is_dir() else f"there is no {CONFIG} beside {path}"
            raise DataError(f"{where}, which says what model the tensors are of")
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
        f"{path} is not read, as loading such a file may run any program in it: save the model"
        " as safetensors first, which model.save_pretrained(DIR) does in transformers"
    )


def _shards(index: Path) -> list[Path]:
    """The files of an index, each with exactly the tensors that the index says."""
    mapped = read_object(index).get("weight_map")
    if not isinstance(mapped, dict) or not mapped:
        raise DataError(f"{index} is damaged: it has no weight_map")
    expected: dict[str, set[str]] = {}
    for name, file in mapped.items():
        if not isinstance(file, str) or file in ("", ".", "..") or not set(file).isdisjoint("/\\\0"):
            raise DataError(f"{index}: {name!r:.80} lies in {file!r:.80}, which is not a file beside it")
        expected.setdefault(file, set()).add(name)
    for file in expected:
        if not index.with_name(file).is_file():
            raise DataError(f"{index} lists {file!r:.80}, which is missing")
    for file, tensors in expected.items():
        path = index.with_name(file)
        if different := tensors ^ read_header(path).tensors.keys():
            where = "only in the index" if min(different) in tensors else "only in the file"
            raise DataError(f"{index} and {path.name} do not agree: {min(different)!r:.80} is {where}")
    return [index.with_name(file) for file in sorted(expected)]


def _refuse_a_part(path: Path, directory: Path) -> None:
    """Recognise a part by its name alone, as the list of parts may be missing."""
    if path.is_file() and (name := _PART.fullmatch(path.name)) and int(name[1]) > 1:
        raise DataError(f"{path} is one of {int(name[1])} parts of a model: give the directory, {directory}")


def _by_short_name(headers: dict[Path, Header], family: Family) -> dict[str, Stored]:
    tensors: dict[str, Stored] = {}
    for path, header in headers.items():
        for name in header.tensors:
            short = name.removeprefix(family.prefix)
            if family.buffers.fullmatch(short):
                continue
            if short in tensors:
                raise DataError(f"{path} holds {short!r:.80} twice, or another file does too")
            tensors[short] = Stored(path, header, name)
    return tensors


def _refuse_other_tensors(
    tensors: dict[str, Stored], family: Family, config: ModelConfig, path: Path
) -> None:
    # First, so that a made-up number cannot make the list of expected tensors huge.
    if config.n_layer > len(tensors):
        raise DataError(f"{path}: its configuration asks for {config.n_layer} layers, which it does not hold")
    expected = {mapping.theirs: mapping.shape for mapping in family.all_mappings(config)}
    if config.tied and HEAD in tensors:
        expected[HEAD] = (config.vocab_size, config.n_embd)
    entries = {name: stored.header.tensors[stored.name] for name, stored in tensors.items()}
    refuse_misfits(Header(entries, {}, 0), expected, path)


def _embedding(family: Family, config: ModelConfig) -> str:
    return next(mapping.theirs for mapping in family.mappings(config) if mapping.ours == "wte")
