"""From documents to token shards: in bounded memory, and resumable after an interruption."""

from __future__ import annotations

import numpy as np

from distgpt.data.prepare.documents import Offset, documents
from distgpt.data.prepare.encoding import find_separator
from distgpt.data.prepare.inputs import Input, find_inputs
from distgpt.data.prepare.learn import learn_entries
from distgpt.data.prepare.progress import (
    PROGRESS,
    Progress,
    list_inputs,
    load_progress,
    remove_all,
    remove_partial,
    reserved,
)
from distgpt.data.prepare.writing import LEAST, Preparation, Request, Watcher
from distgpt.data.shards import MANIFEST, TOKENIZER, Manifest, read_tokenizer
from distgpt.data.tokenizers.naming import Tokenizer, fingerprint, id_dtype, load_tokenizer
from distgpt.errors import DataError, DistgptError
from distgpt.files import atomic_file, storage_errors

__all__ = ["Request", "Watcher", "prepare"]

FROM_INPUTS = ("char", "word")  # tokenizers whose vocabulary comes from the inputs


def prepare(request: Request, watcher: Watcher) -> Manifest:
    """Write the shards, or what is missing of them."""
    inputs = find_inputs(request.inputs)
    tokenizer = None if request.tokenizer in FROM_INPUTS else load_tokenizer(request.tokenizer)
    fresh = Progress(request.settings(tokenizer), list_inputs(inputs))
    with reserved(request.out):
        progress = load_progress(request.out, fresh)
        if progress.begun:
            watcher.noted(f"resuming after {progress.finished()} in {request.out}")
        remove_partial(request.out, progress)
        try:
            progress.save(request.out)
            if tokenizer is None and progress.begun:
                tokenizer = read_tokenizer(request.out)
            elif tokenizer is None:
                watcher.noted(f"collecting the {request.tokenizer} vocabulary")
                tokenizer = learn_entries(
                    request.tokenizer, documents(request.inputs, request.field, request.max_document)
                )
            with atomic_file(request.out / TOKENIZER) as file:
                file.write(tokenizer.to_json().encode())
            separator = find_separator(request.separator, tokenizer)
            Preparation(request, inputs, tokenizer, progress, separator, watcher).run()
            return _sealed(request, progress, tokenizer, separator.ids)
        except DataError:
            if progress.begun:
                watcher.noted(f"{progress.finished()} in {request.out}: remove it once an input has changed")
            raise
        except (KeyboardInterrupt, DistgptError):
            if progress.begun:
                watcher.noted(f"{progress.finished()} in {request.out}: the same command resumes")
            raise
        finally:
            if progress.begun:
                remove_partial(request.out, progress)
            else:
                remove_all(request.out)


def _sealed(
    request: Request, progress: Progress, tokenizer: Tokenizer, separator: tuple[int, ...]
) -> Manifest:
    """Write the manifest, with which the shards are complete."""
    _refuse_without_training(request, progress)
    if list_inputs(find_inputs(request.inputs)) != progress.inputs:
        raise DataError(f"the inputs changed while they were read; remove {request.out} and begin again")
    manifest = Manifest(
        tokenizer=fingerprint(tokenizer),
        description=tokenizer.describe(),
        vocab_size=tokenizer.size,
        dtype=np.dtype(id_dtype(tokenizer.size)).newbyteorder("<").str,
        shards=tuple(progress.shards),
        separator=separator,
        settings={name: progress.settings[name] for name in progress.settings if name != "tokenizer"},
        inputs=tuple((name, size) for name, size, _ in progress.inputs),
        sources=tuple((documents, tokens) for documents, tokens in progress.sources),
        documents=progress.counts.documents,
        text_bytes=progress.counts.text_bytes,
        replaced=progress.counts.replaced,
    )
    with atomic_file(request.out / MANIFEST) as file:
        file.write(manifest.to_json().encode())
    with storage_errors("write to", request.out):
        (request.out / PROGRESS).unlink()
    return manifest


def _refuse_without_training(request: Request, progress: Progress) -> None:
    train, val = progress.tokens("train"), progress.tokens("val")
    if train >= LEAST:
        return
    progress.shards.clear()  # nothing to resume
    progress.place = Offset()
    if train + val == 1:
        raise DataError("there is only 1 token; at least 2 are needed, one to see and one to predict")
    if not train + val:
        names = (given.name if isinstance(given, Input) else str(given) for given in request.inputs)
        raise DataError(f"there is no text in {', '.join(names):.200}")
    raise DataError(
        f"nothing is left for training: of {train + val:,} tokens, {val:,} are for validation;"
        " lower --val-shards or --val-fraction, or --shard-tokens"
    )
