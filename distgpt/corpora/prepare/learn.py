"""Tokenizers learned from texts and saved in their own files; sizes of vocabularies before there is a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from distgpt.core.base.errors import UsageError
from distgpt.core.base.files import atomic_file
from distgpt.core.data.loading import kind_of
from distgpt.core.data.textfile import read_text, refuse_by_name
from distgpt.core.data.tokenizers import AUTO, BYTE, Tokenizer, find_kind, load_tokenizer
from distgpt.corpora.prepare.documents import FIELD, MAX_DOCUMENT, documents
from distgpt.corpora.tokenizers.bpe import GPT2_SIZE
from distgpt.corpora.tokenizers.collected import collect
from distgpt.corpora.tokenizers.learn import LEAST_PAIRS, learn_bpe, learned_size, not_empty


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
    """Learn a tokenizer from these texts and save it in a new file; returns what to tell people about it.

    Only a BPE has a size, a minimal frequency (by default 2) and a separator (by default the last id).
    """
    if kind == "bpe" and vocab_size is None:
        raise UsageError("--vocab-size says how many entries the BPE is to have; GPT-2's has 50257")
    if kind != "bpe" and (vocab_size or min_frequency or separator):
        raise UsageError(
            f"a vocabulary of kind {kind!r} holds everything in the texts:"
            " --vocab-size, --min-frequency and --separator are for --kind bpe"
        )
    if out.exists():
        raise UsageError(f"{out} exists already; give another name, or remove it first")
    if not out.parent.is_dir():
        raise UsageError(f"{out} cannot be written: there is no directory {out.parent}")
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


def vocabulary_size(tokenizer: str, path: Path) -> int:
    """Return the vocabulary size. Reads the text only for tokenizers that are learned from it."""
    if tokenizer == "gpt2":  # whose files may not be here
        return GPT2_SIZE
    if size := learned_size(tokenizer):  # which takes long
        return size
    kind, argument = find_kind(tokenizer)
    if kind is not None and kind.learn is not None:
        refuse_by_name(path)
        texts = [read_text(path)] if kind_of(str(path)) == "plain" else documents((path,), FIELD)
        return kind.learn(argument, not_empty(texts), True).size
    return load_tokenizer(BYTE if tokenizer == AUTO else tokenizer).size
