"""The size of a tokenizer's vocabulary by its name, before there is a run."""

from __future__ import annotations

from pathlib import Path

from distgpt.core.data.loading import PLAIN, kind_of
from distgpt.core.data.textfile import read_text
from distgpt.core.data.tokenizers import AUTO, BYTE, find_kind, load_tokenizer
from distgpt.texts.prepare.documents import FIELD, documents
from distgpt.texts.tokenizers.bpe import GPT2_SIZE
from distgpt.texts.tokenizers.learn import learned_size, not_empty
from distgpt.texts.unreadable import refuse_by_name


def vocabulary_size(tokenizer: str, path: Path) -> int:
    """Return the vocabulary size. Reads the text only for tokenizers that are learned from it."""
    if tokenizer == "gpt2":  # whose files may not be here
        return GPT2_SIZE
    if size := learned_size(tokenizer):  # which takes long
        return size
    kind, argument = find_kind(tokenizer)
    if kind is not None and kind.learn is not None:
        refuse_by_name(path)
        texts = [read_text(path)] if kind_of(str(path)) == PLAIN else documents((path,), FIELD)
        return kind.learn(argument, not_empty(texts), True).size
    return load_tokenizer(BYTE if tokenizer == AUTO else tokenizer).size
