"""Folders, tables, lines of JSON and compressed texts: tokenized once, into shards that lie beside the runs.

Not in the directory of one run: other runs on the same texts find them, too.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import replace
from pathlib import Path

from distgpt.core.base.errors import DataError, Say, escape
from distgpt.core.base.formatting import size
from distgpt.core.comm.agree import on_root
from distgpt.core.comm.api import Comm
from distgpt.core.comm.resources import granted_cores
from distgpt.core.data.loading import Corpus, DataRequest, requested_tokenizer
from distgpt.core.data.textfile import resolve_data
from distgpt.core.data.tokenizers import Tokenizer, fingerprint
from distgpt.corpora.prepare.documents import find_inputs
from distgpt.corpora.prepare.preparing import Request, prepare
from distgpt.corpora.prepare.progress import BeingPrepared, list_inputs, refuse_unfinished
from distgpt.corpora.shards import is_shards, load_shards, read_manifest

FROM_TEXTS = ("char", "word", "bpe")  # kinds of tokenizers that may have been made for a run on these texts
SECONDS_BETWEEN_LINES = 10.0
SECONDS_BETWEEN_TRIES = 0.5


def tokenized(path: Path, tokenizer: str | Tokenizer, val_fraction: float, kept: Path, say: Say) -> Path:
    """Return the folder of the shards of these texts, below `kept`; tokenize what is missing.

    Its name tells what it was made from: where the texts lie, their sizes and times, and the settings.
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
    if isinstance(tokenizer, Tokenizer) and tokenizer.kind in FROM_TEXTS:  # maybe made for a run
        first = request(f"bpe:{tokenizer.size}" if tokenizer.kind == "bpe" else tokenizer.kind)
        if is_shards(first.out) and read_manifest(first.out).tokenizer == fingerprint(tokenizer):
            wanted = first
    is_waiting = False
    while not is_shards(wanted.out):
        try:
            prepare(wanted, _Watcher(say), inputs)
        except BeingPrepared as error:  # for a run that was started a moment before
            if not is_waiting:
                say(f"{error}: waiting for it")
            is_waiting = True
            time.sleep(SECONDS_BETWEEN_TRIES)
        except DataError as error:
            raise DataError(f"{error} (distgpt data prepare has options for such files)") from None
    manifest = read_manifest(wanted.out)
    if manifest.replaced:
        notes.append(f"{manifest.replaced:,} × U+FFFD put in for what was not UTF-8")
    if notes:
        say(f"{escape(str(path))}: {'; '.join(notes)}")
    if val_fraction and not manifest.of("val"):
        raise DataError(f"{path}: --val-fraction {val_fraction} of it is not even 2 tokens")
    return wanted.out


class _Watcher:
    """Shows the progress in lines."""

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
    """The kind of text that is tokenized once, into shards of its own."""

    def refuse_missing(self, request: DataRequest) -> None:
        find_inputs((resolve_data(request.data),))

    def load(self, comm: Comm, request: DataRequest, say: Say) -> Corpus:
        def made() -> str:
            path, tokenizer = resolve_data(request.data), requested_tokenizer(request)
            found = tokenized(path, tokenizer, request.val_fraction, request.kept, say)
            return str(found.resolve())  # a replay has a link to it, on rank 0's host alone

        return load_shards(comm, Path(on_root(comm, made)), request, say)


DOCUMENTS = _Documents()
