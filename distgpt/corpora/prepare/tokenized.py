"""Documents in directories, tables, JSON lines and compressed files, tokenized once into cached shards.

The shards are not in a run's directory, so that other runs with the same documents reuse them. This module
also trains tokenizers before a run.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from distgpt.core.base.errors import DataError, Say, UsageError, escape
from distgpt.core.base.files import atomic_file
from distgpt.core.base.formatting import size
from distgpt.core.comm.agree import on_root
from distgpt.core.comm.api import Comm
from distgpt.core.comm.resources import granted_cores
from distgpt.core.data.loading import Corpus, DataRequest, kind_of, requested_tokenizer
from distgpt.core.data.textfile import read_text, refuse_by_name, resolve_data
from distgpt.core.data.tokenizers import AUTO, BYTE, Tokenizer, find_kind, fingerprint, load_tokenizer
from distgpt.corpora.prepare.documents import FIELD, MAX_DOCUMENT, documents, find_inputs
from distgpt.corpora.prepare.preparing import (
    BeingPrepared,
    Request,
    list_inputs,
    prepare,
    refuse_unfinished,
)
from distgpt.corpora.shards import is_shards, load_shards, read_manifest
from distgpt.corpora.tokenizers.bpe import GPT2_SIZE, LEAST_PAIRS, learn_bpe, learned_size, not_empty
from distgpt.corpora.tokenizers.collected import collect

FROM_TEXTS = ("char", "word", "bpe")  # tokenizers that an earlier run may have built from these documents
SECONDS_BETWEEN_LINES = 10.0
SECONDS_BETWEEN_TRIES = 0.5


def tokenized(path: Path, tokenizer: str | Tokenizer, val_fraction: float, kept: Path, say: Say) -> Path:
    """Return the directory of the shards, in `kept`; tokenize the documents if it does not exist.

    Its name has a hash of the path, the files' sizes and times, and the settings.
    """
    refuse_unfinished(path)
    notes: list[str] = []
    inputs = find_inputs((path,), notes.append)
    texts = [str(path.resolve()), *list_inputs(inputs)]

    def request(tokenizer: str | Tokenizer) -> Request:
        made = Request((path,), tokenizer, Path(), val_fraction=val_fraction, workers=granted_cores().whole)
        content = json.dumps([texts, made.settings(made.known_tokenizer())])
        key = hashlib.sha256(content.encode()).hexdigest()[:12]
        return replace(made, out=kept / f"{path.resolve().name[:40]}-{key}")

    wanted = request(tokenizer)
    if isinstance(tokenizer, Tokenizer) and tokenizer.kind in FROM_TEXTS:  # it may have been built by a run
        first = request(f"bpe:{tokenizer.size}" if tokenizer.kind == "bpe" else tokenizer.kind)
        if is_shards(first.out) and read_manifest(first.out).tokenizer == fingerprint(tokenizer):
            wanted = first
    is_waiting = False
    while not is_shards(wanted.out):
        try:
            prepare(wanted, Watcher(say), inputs)
        except BeingPrepared as error:  # another run started just before this one
            if not is_waiting:
                say(f"{error}: waiting for it")
            is_waiting = True
            time.sleep(SECONDS_BETWEEN_TRIES)
        except DataError as error:
            raise DataError(f"{error} (see also the options of distgpt data prepare)") from None
    manifest = read_manifest(wanted.out)
    if manifest.replaced:
        notes.append(f"replaced invalid UTF-8 by U+FFFD {manifest.replaced:,} times")
    if notes:
        say(f"{escape(str(path))}: {'; '.join(notes)}")
    if val_fraction and not manifest.of("val"):
        raise DataError(f"--val-fraction {val_fraction} of {path} is less than 2 tokens")
    return wanted.out


class Watcher:
    """Prints the progress as lines."""

    def __init__(self, say: Say) -> None:
        self._say, self._total, self._last = say, 1, 0.0

    def began(self, total_bytes: int, of: str, label: str = "") -> None:
        self._total, self._last = max(1, total_bytes), time.monotonic()
        self._say(f"{label or 'tokenizing'} {size(total_bytes)} ({of})")

    def advanced(self, consumed: int, tokens: int) -> None:
        if time.monotonic() - self._last > SECONDS_BETWEEN_LINES:
            self._last = time.monotonic()
            self._say(f"{consumed / self._total:.0%}, {tokens:,} tokens")

    def noted(self, text: str) -> None:
        self._say(text)


class _Documents:
    """The data kind of documents that are tokenized once, into cached shards."""

    def refuse_missing(self, request: DataRequest) -> None:
        find_inputs((resolve_data(request.data),))

    def load(self, comm: Comm, request: DataRequest, say: Say) -> Corpus:
        def made() -> Path:
            path, tokenizer = resolve_data(request.data), requested_tokenizer(request)
            result = tokenized(path, tokenizer, request.val_fraction, request.kept, say)
            return result.resolve()  # a replay links to it, only on rank 0's host

        return load_shards(comm, on_root(comm, made), request, say)


DOCUMENTS = _Documents()


def learn_file(
    inputs: Sequence[Path],
    out: Path,
    kind: str = "bpe",
    vocab_size: int | None = None,
    min_frequency: int | None = None,
    separator: str | None = None,
    field: str = FIELD,
    max_document: int = MAX_DOCUMENT,
) -> str:
    """Learn a tokenizer from the documents and save it in a new file. Return a summary.

    Only a BPE has a size, a minimum frequency (default: 2) and a separator (default: the last id).
    """
    if kind == "bpe" and vocab_size is None:
        raise UsageError("a BPE tokenizer requires --vocab-size; GPT-2's has 50257 entries")
    if kind != "bpe" and (vocab_size or min_frequency or separator):
        raise UsageError(
            f"--vocab-size, --min-frequency and --separator require --kind bpe: the vocabulary of {kind!r}"
            " includes everything in the text"
        )
    if out.exists():
        raise UsageError(f"{out} already exists; choose another name, or remove it")
    if not out.parent.is_dir():
        raise UsageError(f"cannot write {out}: no directory {out.parent}")
    texts = documents(inputs, field, max_document)
    learned: Tokenizer
    if vocab_size is not None:
        learned = learn_bpe(texts, vocab_size, min_frequency or LEAST_PAIRS, separator or "last")
    else:
        learned = collect(kind, not_empty(texts))
    with atomic_file(out) as file:
        file.write(learned.to_json().encode())
    fewer = vocab_size and learned.size < vocab_size
    return f"{out}: {learned.describe()}{'; no more pairs are frequent enough' if fewer else ''}"


def vocabulary_size(tokenizer: str, *paths: Path) -> int:
    """Return the vocabulary size. Reads the text only to learn a tokenizer."""
    if tokenizer == "gpt2":  # its files may be missing here
        return GPT2_SIZE
    if size := learned_size(tokenizer):  # learning takes long
        return size
    kind, argument = find_kind(tokenizer)
    if kind is not None and kind.learn is not None:
        return kind.learn(argument, not_empty(texts_in(*paths)), True).size
    return load_tokenizer(BYTE if tokenizer == AUTO else tokenizer).size


def texts_in(*paths: Path) -> Iterator[str]:
    """Yield text files and the documents of other files and directories, to learn a tokenizer from them."""
    for path in paths:
        if kind_of(str(path)) != "plain":
            yield from documents((path,), FIELD)
        else:
            refuse_by_name(path)
            yield read_text(path)
