"""Byte-level BPE as in GPT-2: bytes are joined into tokens by a list of merges, which can be learned."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from distgpt.core.base.errors import DataError, UsageError
from distgpt.core.data.tokenizers import (
    BytesDecoder,
    Ids,
    TokenizerKind,
    encoded,
    fingerprint,
    id_dtype,
)
from distgpt.corpora.tokenizers.collected import refuse_repeated
from distgpt.corpora.tokenizers.library import Encoder, in_thread, library_errors

if TYPE_CHECKING:
    import tokenizers

    from distgpt.corpora.tokenizers.bpe_fast import FastEncoder

# Fingerprint of GPT-2's own vocab.json and merges.txt, to recognize it offline.
GPT2_FINGERPRINT = "834c43881f4c962d808207fad3b1bcdf0a0f553a8ee02e0f66a885b6bbaf3647"
GPT2_SIZE = 50257
LARGE = 1 << 19  # bytes of text; beyond it, the faster encoder is worth its startup
LARGEST = 1 << 24  # entries; a file with more is corrupt
SEPARATOR = "<|endoftext|>"


@functools.cache
def symbols() -> str:
    """Return the character that represents each byte in vocabularies.

    Printable Latin-1 represents itself. The other bytes get the characters from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in printable else next(others)) for byte in range(256))


@functools.cache
def latin1_of_symbol() -> dict[int, int]:
    return {ord(symbol): byte for byte, symbol in enumerate(symbols())}


def spelled(text: str) -> str:
    """Return the spelling in vocabularies, with one symbol per UTF-8 byte."""
    return encoded(text, "utf-8").decode("latin-1").translate(symbols())


class BpeTokenizer(BytesDecoder):
    """A byte-level BPE, which encodes every text. Entries are spelled in `symbols`.

    GPT-2's rule first splits text into pieces (words, numbers, punctuation, blanks); merges stay in one.
    """

    kind = "bpe"

    def __init__(
        self, vocabulary: Sequence[str], merges: Sequence[tuple[str, str]], separator: int | None
    ) -> None:
        self.vocabulary, self.merges, self.separator = tuple(vocabulary), tuple(merges), separator
        self.size = len(self.vocabulary)
        self._seen = 0  # bytes
        byte_of = latin1_of_symbol()
        super().__init__([entry.translate(byte_of).encode("latin-1") for entry in self.vocabulary])

    def encode(self, text: str) -> Ids:
        utf8 = encoded(text, "utf-8")
        self._seen += len(utf8)
        if self._seen >= LARGE:
            return self.fast.encode(utf8)
        return np.array(self._encoder.encode(text).ids, id_dtype(self.size))

    def describe(self) -> str:
        is_gpt2 = self.size == GPT2_SIZE and fingerprint(self) == GPT2_FINGERPRINT
        owner = "GPT-2's " if is_gpt2 else ""
        return f"{owner}BPE, {self.size:,} entries"

    def contents(self) -> dict[str, Any]:
        return {"vocabulary": self.vocabulary, "merges": self.merges, "separator": self.separator}

    @functools.cached_property
    def _id_of(self) -> dict[str, int]:
        return {entry: i for i, entry in enumerate(self.vocabulary)}

    @functools.cached_property
    def fast(self) -> FastEncoder:
        from distgpt.corpora.tokenizers.bpe_fast import FastEncoder

        return FastEncoder(self._id_of, symbols(), self.merges, self._encode_piece)

    def _encode_piece(self, piece: str) -> list[int]:
        with library_errors("the tokenizers library cannot encode this text"):
            return [token.id for token in self.library.model.tokenize(spelled(piece))]

    @functools.cached_property
    def _encoder(self) -> Encoder:
        return Encoder(self.library, "BPE", may_be_slow=False)

    @functools.cached_property
    def library(self) -> tokenizers.Tokenizer:
        from tokenizers import Tokenizer, models, pre_tokenizers

        with library_errors("the tokenizers library rejected this BPE"):
            library = Tokenizer(models.BPE(self._id_of, list(self.merges)))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        return library


def checked_bpe(vocabulary: Any, merges: Any, separator: Any, source: str) -> BpeTokenizer:
    """Build a tokenizer from untrusted parts. A DataError names `source` and the problem."""
    if not isinstance(vocabulary, list) or not all(isinstance(entry, str) for entry in vocabulary):
        raise DataError(f"{source}: the tokenizer's vocabulary must be a list of strings")
    if len(vocabulary) > LARGEST:
        raise DataError(f"{source}: the vocabulary has {len(vocabulary):,} entries; the limit is {LARGEST:,}")
    refuse_repeated(vocabulary, source)
    known, alphabet = set(vocabulary), set(symbols())
    if missing := alphabet - known:
        raise DataError(
            f"{source}: the vocabulary lacks {len(missing)} of the 256 symbols for bytes,"
            f" such as {min(missing)!r}; it is not byte-level or is incomplete"
        )
    odd = next((entry for entry in vocabulary if not entry or not alphabet.issuperset(entry)), None)
    if odd is not None:
        raise DataError(f"{source}: the vocabulary's entry {odd!r} contains symbols that are not bytes")
    pairs = _checked_merges(merges, known, source)
    if separator is not None:
        if type(separator) is not int or not 0 <= separator < len(vocabulary):
            raise DataError(f"{source}: the separator {separator!r} is not in the vocabulary")
        entry = vocabulary[separator]
        if len(entry) == 1 or any(a + b == entry for a, b in pairs):
            raise DataError(f"{source}: the separator {entry!r} is also a part of ordinary text")
    return BpeTokenizer(vocabulary, pairs, separator)


def _checked_merges(merges: Any, known: set[str], source: str) -> list[tuple[str, str]]:
    if not isinstance(merges, list):
        raise DataError(f"{source}: the merges must be a list of pairs")
    pairs: dict[tuple[str, str], None] = {}
    for merge in merges:
        is_pair = isinstance(merge, list | tuple) and len(merge) == 2
        if not is_pair or not all(isinstance(part, str) for part in merge):
            raise DataError(f"{source}: the merge {merge!r} is not a pair of strings")
        a, b = merge
        if lacking := [entry for entry in (a, b, a + b) if entry not in known]:
            raise DataError(f"{source}: {lacking[0]!r} of the merge {a!r} + {b!r} is not in the vocabulary")
        if (a, b) in pairs:
            raise DataError(f"{source}: the merge {a!r} + {b!r} is listed twice")
        pairs[a, b] = None
    return list(pairs)


LEARNED = "bpe:"  # prefix of the number of entries of a BPE to learn
SMALLEST = 256
LEAST_PAIRS = 2  # default minimum frequency of a pair to merge
# Merging takes quadratic time. No word is this long, but text without blanks is cut.
LONGEST_PIECE = 256  # characters
_LONG = re.compile(rf"\S{{{LONGEST_PIECE}}}|\s{{{LONGEST_PIECE}}}")


def learn_bpe(texts: Iterable[str], size: int, min_frequency: int, separator: str) -> BpeTokenizer:
    """Learn a BPE of `size` entries, including the separator ("first", "last" or "none").

    It has fewer entries if no more pairs occur `min_frequency` times. The result is deterministic. Memory
    holds only the distinct pieces.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    has_separator = separator != "none"
    if not SMALLEST + has_separator <= size <= LARGEST:
        bytes_and = " and the separator" if has_separator else ""
        raise UsageError(
            f"a BPE must have at least {SMALLEST + has_separator} entries, the bytes{bytes_and},"
            f" and at most {LARGEST:,}"
        )
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size - has_separator,
        min_frequency=min_frequency,
        initial_alphabet=list(symbols()),
        show_progress=False,
    )
    pieces = _short_pieces(not_empty(texts))
    # The library ignores Ctrl-C, but the main thread does not.
    in_thread(lambda: library.train_from_iterator(pieces, trainer)).result()
    learned = json.loads(library.to_str())["model"]
    vocabulary = sorted(learned["vocab"], key=learned["vocab"].__getitem__)
    token_id = {"last": len(vocabulary), "first": 0, "none": None}[separator]
    if token_id is not None:
        vocabulary.insert(token_id, SEPARATOR)
    return checked_bpe(vocabulary, learned["merges"], token_id, "the learned tokenizer")


def _short_pieces(texts: Iterable[str]) -> Iterator[str]:
    """Yield `texts`, split to limit the length of a piece."""
    for text in texts:
        start = 0
        for result in _LONG.finditer(text):
            yield text[start : result.end()]
            start = result.end()
        yield text[start:]


def not_empty(texts: Iterable[str]) -> Iterator[str]:
    """Yield `texts`. Raises a DataError if all are empty."""
    empty = True
    for text in texts:
        empty = empty and not text
        yield text
    if empty:
        raise DataError("no text to train on")


def learned_size(name: str) -> int:
    """Return N of "bpe:N", the entries of a BPE to be learned; 0 for other names."""
    size = name.removeprefix(LEARNED)
    return int(size) if name.startswith(LEARNED) and size.isdecimal() and len(size) < 10 else 0


BPE = TokenizerKind(
    "bpe:N",
    accepts=lambda argument: learned_size(LEARNED + argument) > 0,
    # There is a separator only between documents.
    learn=lambda argument, texts, are_documents: learn_bpe(
        texts, int(argument), LEAST_PAIRS, "last" if are_documents else "none"
    ),
    from_json=lambda document, source: checked_bpe(
        document.get("vocabulary"), document.get("merges"), document.get("separator"), source
    ),
    # There are fewer entries than requested if there are too few pairs.
    means=lambda argument, tokenizer: tokenizer.kind == "bpe" and tokenizer.size <= int(argument),
)
