"""Byte-level BPE as in GPT-2: bytes, joined into longer tokens by a list of merges.

Also read from foreign files: Hugging Face's tokenizer.json, GPT-2's vocab.json and merges.txt.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distgpt.data.hub import TOKENIZER_FILES
from distgpt.data.tokenizers.plain import (
    BytesDecoder,
    Ids,
    encoded,
    fingerprint,
    id_dtype,
    refuse_repeated,
)
from distgpt.errors import DataError
from distgpt.files import read_small

if TYPE_CHECKING:
    import tokenizers

    from distgpt.data.tokenizers.bpe_fast import FastEncoder

# Of GPT-2's own vocab.json and merges.txt, to recognise it without a network.
GPT2_FINGERPRINT = "834c43881f4c962d808207fad3b1bcdf0a0f553a8ee02e0f66a885b6bbaf3647"
GPT2_SIZE = 50257
LARGE = 1 << 19  # bytes of text encoded so far, from which on the faster encoder is worth its start
LARGEST = 1 << 24  # entries; more is a damaged file
SEPARATOR = "<|endoftext|>"
OTHER_KIND = "is not byte-level BPE as in GPT-2, the only kind of foreign tokenizer that is read"
_SURROGATE = re.compile("[\ud800-\udfff]")


@functools.cache
def symbols() -> str:
    """The character that stands for each byte in vocabularies.

    Printable characters of Latin-1 stand for themselves, the other bytes in turn for what follows U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in printable else next(others)) for byte in range(256))


@functools.cache
def _latin1_of_symbol() -> dict[int, int]:
    return {ord(symbol): byte for byte, symbol in enumerate(symbols())}


def spelled(text: str) -> str:
    """A text as vocabularies spell it: one symbol per byte of its UTF-8."""
    return encoded(text, "utf-8").decode("latin-1").translate(symbols())


class BpeTokenizer(BytesDecoder):
    """Encodes every text. Entries are spelled in `symbols`; merges are tried in their order.

    Text is first split into pieces (words, numbers, marks, blanks) by GPT-2's rule; merges stay within one.
    """

    kind = "bpe"

    def __init__(
        self, vocabulary: Sequence[str], merges: Sequence[tuple[str, str]], separator: int | None
    ) -> None:
        self.vocabulary, self.merges, self.separator = tuple(vocabulary), tuple(merges), separator
        self.size = len(self.vocabulary)
        self._seen = 0  # bytes
        byte_of = _latin1_of_symbol()
        super().__init__([entry.translate(byte_of).encode("latin-1") for entry in self.vocabulary])

    def encode(self, text: str) -> Ids:
        utf8 = encoded(text, "utf-8")
        self._seen += len(utf8)
        if self._seen >= LARGE:
            return self._fast.encode(utf8)
        return np.array(self._library.encode(text, add_special_tokens=False).ids, id_dtype(self.size))

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
    def _fast(self) -> FastEncoder:
        from distgpt.data.tokenizers.bpe_fast import FastEncoder

        return FastEncoder(self._id_of, symbols(), self.merges, self._encode_piece)

    def _encode_piece(self, piece: str) -> list[int]:
        return [token.id for token in self._library.model.tokenize(spelled(piece))]

    @functools.cached_property
    def _library(self) -> tokenizers.Tokenizer:
        from tokenizers import Tokenizer, models, pre_tokenizers

        library = Tokenizer(models.BPE(self._id_of, list(self.merges)))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        return library


def checked_bpe(vocabulary: Any, merges: Any, separator: Any, source: str) -> BpeTokenizer:
    """Build a tokenizer of untrusted parts; a DataError names `source` and what is wrong."""
    known = _checked_vocabulary(vocabulary, source)
    pairs = _checked_merges(merges, known, source)
    if separator is not None:
        if type(separator) is not int or not 0 <= separator < len(vocabulary):
            raise DataError(f"{source}: the separator {separator!r} is no id of the vocabulary")
        entry = vocabulary[separator]
        if len(entry) == 1 or any(a + b == entry for a, b in pairs):
            raise DataError(f"{source}: the separator {entry!r} is also a part of ordinary text")
    return BpeTokenizer(vocabulary, pairs, separator)


def _checked_vocabulary(vocabulary: Any, source: str) -> set[str]:
    if not isinstance(vocabulary, list) or not all(isinstance(entry, str) for entry in vocabulary):
        raise DataError(f"{source}: the tokenizer's vocabulary must be a list of strings")
    if len(vocabulary) > LARGEST:
        raise DataError(f"{source}: the vocabulary has {len(vocabulary):,} entries; {LARGEST:,} are possible")
    refuse_repeated(vocabulary, source)
    known, alphabet = set(vocabulary), set(symbols())
    if missing := alphabet - known:
        raise DataError(
            f"{source}: the vocabulary lacks {len(missing)} of the 256 symbols for bytes,"
            f" {min(missing)!r} for one: it is not byte-level, or not whole"
        )
    odd = next((entry for entry in vocabulary if not entry or not alphabet.issuperset(entry)), None)
    if odd is not None:
        raise DataError(f"{source}: the vocabulary's entry {odd!r} is not spelled in the symbols for bytes")
    return known


def _checked_merges(merges: Any, known: set[str], source: str) -> list[tuple[str, str]]:
    if not isinstance(merges, list):
        raise DataError(f"{source}: the merges must be a list of pairs")
    pairs = []
    for merge in merges:
        is_pair = isinstance(merge, list | tuple) and len(merge) == 2
        if not is_pair or not all(isinstance(part, str) for part in merge):
            raise DataError(f"{source}: the merge {merge!r} is not a pair of strings")
        a, b = merge
        for entry in (a, b, a + b):
            if entry not in known:
                raise DataError(f"{source}: {entry!r} of the merge {a!r} + {b!r} is not in the vocabulary")
        pairs.append((a, b))
    if len(set(pairs)) < len(pairs):
        commonest, times = Counter(pairs).most_common(1)[0]
        raise DataError(f"{source}: the merge {commonest[0]!r} + {commonest[1]!r} is listed {times} times")
    return pairs


def from_foreign(document: dict[str, Any], path: Path) -> BpeTokenizer | None:
    """The tokenizer in a file of Hugging Face or GPT-2; None if it is neither."""
    if isinstance(document.get("model"), dict):
        return _from_hugging_face(document, str(path))
    if document and all(type(token_id) is int for token_id in document.values()):
        return _from_vocab_and_merges(document, path)
    return None


def _from_vocab_and_merges(vocab: dict[str, Any], path: Path) -> BpeTokenizer:
    beside = path.with_name(TOKENIZER_FILES[2])
    if not beside.exists():
        raise DataError(f"{path} is a vocabulary without its merges: {beside.name} must lie beside it")
    try:
        lines = read_small(beside).decode().replace("\r\n", "\n").split("\n")
    except UnicodeDecodeError as error:
        raise unreadable(str(beside), error) from None
    merges = []
    for number, line in enumerate(lines, start=1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        if line.count(" ") != 1:
            raise DataError(f"{beside}: line {number} is not two tokens with a space between: {line!r:.80}")
        merges.append(line.split(" "))
    vocabulary = _in_order(vocab, str(path))
    made = {a + b for a, b in merges}
    separator = vocab[SEPARATOR] if SEPARATOR in vocab and SEPARATOR not in made else None
    return checked_bpe(vocabulary, merges, separator, str(path))


def _from_hugging_face(document: dict[str, Any], source: str) -> BpeTokenizer:
    model = document["model"]
    _refuse_other_kinds(document, model, source)
    vocab, added = model.get("vocab"), document.get("added_tokens") or []
    if not isinstance(vocab, dict) or not isinstance(model.get("merges"), list):
        raise DataError(f"{source}: its BPE model has no vocabulary or no merges")
    special = _special_tokens(added, source)
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    both = {**vocab, **special}
    only = next(iter(special.values())) if len(special) == 1 else None
    separator = special.get(SEPARATOR, only)
    return checked_bpe(_in_order(both, source), merges, separator, source)


def _refuse_other_kinds(document: dict[str, Any], model: dict[str, Any], source: str) -> None:
    """Raise a DataError that says what is different, unless this is byte-level BPE as in GPT-2."""
    before = document.get("pre_tokenizer")
    before = before if isinstance(before, dict) else {"type": None}
    differences = {
        f"its model is {model.get('type')!r}": model.get("type", "BPE") != "BPE",
        "it normalizes text first": document.get("normalizer") is not None,
        f"its pre-tokenizer is {before.get('type')!r}": before.get("type") != "ByteLevel",
        "its pre-tokenizer puts a space before the text": bool(before.get("add_prefix_space", True)),
        "its pre-tokenizer does not split like GPT-2's": before.get("use_regex", True) is not True,
        **{
            f"its model sets {name}": bool(model.get(name))
            for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges")
        },
    }
    for difference, present in differences.items():
        if present:
            raise DataError(f"{source} {OTHER_KIND}: {difference}")


def _special_tokens(added: Any, source: str) -> dict[str, int]:
    special: dict[str, int] = {}
    for token in added if isinstance(added, list) else [None]:
        fields = token if isinstance(token, dict) else {}
        content, token_id = fields.get("content"), fields.get("id")
        if not isinstance(content, str) or _SURROGATE.search(content) or type(token_id) is not int:
            raise DataError(f"{source}: the added token {token!r} has no content or no id")
        if not fields.get("special"):
            raise DataError(f"{source} {OTHER_KIND}: it cuts {content!r} out of the text first")
        special[spelled(content)] = token_id
    return special


def _in_order(vocab: dict[str, Any], source: str) -> list[str]:
    """The entries by id, which must run from 0 without a gap."""
    vocabulary: list[str | None] = [None] * len(vocab)
    for entry, token_id in vocab.items():
        if type(token_id) is not int or not 0 <= token_id < len(vocab) or vocabulary[token_id] is not None:
            raise DataError(
                f"{source}: {entry!r} has the id {token_id!r}; the {len(vocab):,} entries must have"
                f" the ids 0 to {len(vocab) - 1:,}, each once"
            )
        vocabulary[token_id] = entry
    return [entry for entry in vocabulary if entry is not None]


def unreadable(name: str, error: OSError | ValueError) -> DataError:
    reason = getattr(error, "strerror", None) or error
    return DataError(f"{name!r} cannot be read as a saved tokenizer: {reason}")
