"""Tokenizers from tokenizer.json: the `tokenizers` library encodes, and our table of bytes decodes."""

from __future__ import annotations

import functools
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from distgpt.core.base.errors import DataError
from distgpt.core.data.tokenizers import BytesDecoder, BytesStreamer, Ids, Streamer, encoded, id_dtype
from distgpt.corpora.tokenizers.bpe import LARGEST, SEPARATOR, latin1_of_symbol, symbols
from distgpt.corpora.tokenizers.library import Encoder, library_errors, may_be_slow, refuse_growth

if TYPE_CHECKING:
    import tokenizers

BLANK = "▁"  # represents a space in SentencePiece vocabularies
BYTE_TOKENS = {f"<0x{byte:02X}>": bytes((byte,)) for byte in range(256)}


def added_token(token_id: int, text: str, special: bool) -> dict[str, Any]:
    """Return an added token in the format of tokenizer.json."""
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": text, **plain, "special": special}


class LibraryTokenizer(BytesDecoder):
    """A tokenizer described by a tokenizer.json, if it can encode every text.

    The library gets unpredictable names for special tokens, so that no text encodes to one.
    """

    kind = "library"

    def __init__(self, document: dict[str, Any], source: str) -> None:
        self._document, self._source = document, source
        vocabulary, added = _entries(document, source)
        self._special = {text: i for text, (i, is_special) in added.items() if is_special}
        both = {**vocabulary, **{text: i for text, (i, _) in added.items()}}
        self.size = max(both.values(), default=-1) + 1
        nonce = secrets.token_hex(8)
        self._names = {i: f"\ufdd0{nonce}.{i}\ufdd1" for i in self._special.values()}
        self.first = _first(document, self._special)
        known = (SEPARATOR, *(text for text, i in self._special.items() if i in self.first), "</s>")
        self.separator = next((self._special[text] for text in known if text in self._special), None)
        if self.separator is None and len(self._special) == 1:
            self.separator = next(iter(self._special.values()))
        spelled, self._lacks, self._strips = _spelling(document, vocabulary, source)
        pieces = [self.FOREIGN] * self.size
        for text, i in both.items():
            pieces[i] = text.encode() if text in added else spelled(text)
        super().__init__(pieces)
        library = self._library  # create it now, so that an invalid document raises an error immediately
        refuse_growth(library, source)
        self._encoder = Encoder(library, source, may_be_slow(library))

    @property
    def specials(self) -> Mapping[str, int]:
        return self._special

    def encode(self, text: str) -> Ids:
        return self._ids(self._encoding(text))

    def encode_parts(self, parts: Sequence[str | int]) -> tuple[Ids, Ids]:
        """Encode all parts as one text, because the ids of a part may depend on its position."""
        named = [part if isinstance(part, str) else self._names[part] for part in parts]
        shown = [part if isinstance(part, str) else self.pieces[part].decode() for part in parts]
        before, after = ([0, *np.cumsum([len(text) for text in texts])] for texts in (named, shown))
        encoding = self._encoding("".join(named))
        ends = np.interp([end for _, end in encoding.offsets], before, after)
        return self._ids(encoding), ends.round().astype(np.int64)

    def decode(self, ids: Sequence[int] | Ids) -> str:
        text = super().decode(ids)
        return text.removeprefix(" ") if self._strips else text

    def streamer(self) -> Streamer:
        return _Stripping(self.pieces) if self._strips else super().streamer()

    def describe(self) -> str:
        return f"{self._document['model'].get('type', 'BPE')} of tokenizer.json, {self.size:,} entries"

    def contents(self) -> dict[str, Any]:
        return {"document": self._document}

    @property
    def spells_blanks(self) -> bool:
        """Whether entries are spelled as in SentencePiece, not in symbols for bytes."""
        return "ByteLevel" not in _steps(self._document.get("decoder"), "decoders")

    def _encoding(self, text: str) -> Any:
        utf8 = encoded(text, "utf-8")
        if self._lacks and (lost := self._lacks.intersection(utf8)):
            where = next(i for i, c in enumerate(text) if not lost.isdisjoint(c.encode()))
            missing = next(byte for byte in text[where].encode() if byte in lost)
            raise DataError(
                f"the character {text[where]!r} at position {where} cannot be encoded:"
                f" the vocabulary lacks the byte {missing:#04x}"
            )
        return self._encoder.encode(text)

    def _ids(self, encoding: Any) -> Ids:
        ids: Ids = self._true_ids[np.array(encoding.ids, np.int64)].astype(id_dtype(self.size))
        return ids

    @functools.cached_property
    def _library(self) -> tokenizers.Tokenizer:
        """The library's tokenizer, with renamed special tokens, and without padding and truncation."""
        from tokenizers import Tokenizer

        renamed = [
            {**token, "content": self._names[token["id"]], "normalized": False} if token["special"] else token
            for token in self._document.get("added_tokens") or []
        ]
        own: dict[str, Any] = dict.fromkeys(("truncation", "padding", "post_processor"))
        own["added_tokens"] = renamed
        model = self._document["model"]
        # Otherwise the library numbers them by count, which is wrong if there are gaps.
        if isinstance(model["vocab"], dict):
            known = {token["content"]: token.get("id") for token in renamed}
            own["model"] = {**model, "vocab": {**model["vocab"], **known}}
        with library_errors(f"{self._source}: rejected by the tokenizers library"):
            return Tokenizer.from_str(json.dumps({**self._document, **own}))

    @functools.cached_property
    def _true_ids(self) -> Any:
        """Our id for each id of the library, which renumbers tokens that it does not find by name."""
        ids = np.arange(max(self.size, self._library.get_vocab_size()) + len(self._names))
        for i, name in self._names.items():
            ids[self._library.token_to_id(name)] = i
        for token in self._document.get("added_tokens") or []:
            if not token["special"]:
                ids[self._library.token_to_id(token["content"])] = token["id"]
        return ids


class _Stripping(BytesStreamer):
    """A streamer that drops the space at the start of every SentencePiece text."""

    _begun = False

    def feed(self, token_id: int) -> str:
        text = super().feed(token_id)
        if text and not self._begun:
            self._begun, text = True, text.removeprefix(" ")
        return text


def _entries(document: dict[str, Any], source: str) -> tuple[dict[str, int], dict[str, tuple[int, bool]]]:
    """Return the checked ids of the model's entries, and of the added tokens with whether each is special."""
    vocab = document["model"].get("vocab")
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):  # some values abort the process
        if document["model"].get(name):
            raise DataError(f"{source}: its model sets {name}, which no supported decoder handles")
    if isinstance(vocab, list):  # Unigram lists entries with scores
        vocab = {pair[0]: i for i, pair in enumerate(vocab) if isinstance(pair, list) and pair}
    if not isinstance(vocab, dict) or not vocab:
        kind = document["model"].get("type")
        raise DataError(f"{source}: its model, {kind!r:.40}, has no vocabulary")
    added: dict[str, tuple[int, bool]] = {}
    tokens = document.get("added_tokens") or []
    for token in tokens if isinstance(tokens, list) else [None]:
        fields = token if isinstance(token, dict) else {}
        content, token_id, special = fields.get("content"), fields.get("id", -1), fields.get("special")
        if not isinstance(content, str) or not content or type(special) is not bool:
            raise DataError(f"{source}: the added token {token!r:.80} has no content or no special flag")
        if content in added:
            raise DataError(f"{source}: the added token {content!r:.80} is listed twice")
        added[content] = token_id, special
    for text, token_id in (*vocab.items(), *((text, i) for text, (i, _) in added.items())):
        if not isinstance(text, str) or type(token_id) is not int or not 0 <= token_id < LARGEST:
            raise DataError(f"{source}: the entry {text!r:.80} has the invalid ID {token_id!r:.20}")
    return vocab, added


def _steps(part: Any, name: str) -> dict[str, dict[str, Any]]:
    """Return the steps of a part by type: the list `name` of a Sequence, or the part itself."""
    steps = part.get(name, [part]) if isinstance(part, dict) else []
    known = [step for step in steps if isinstance(step, dict)] if isinstance(steps, list) else []
    return {step["type"]: step for step in known if isinstance(step.get("type"), str)}


def _first(document: dict[str, Any], special: Mapping[str, int]) -> tuple[int, ...]:
    """Return the special tokens that the post-processor prepends."""
    result: list[int] = []
    template = _steps(document.get("post_processor"), "processors").get("TemplateProcessing", {})
    single = template.get("single")
    for piece in single if isinstance(single, list) else []:
        token = piece.get("SpecialToken") if isinstance(piece, dict) else None
        name = token.get("id") if isinstance(token, dict) else None
        if not isinstance(name, str) or name not in special:
            break
        result.append(special[name])
    return tuple(result)


def _spelling(
    document: dict[str, Any], vocabulary: Mapping[str, int], source: str
) -> tuple[Any, set[int], bool]:
    """Return (entry to bytes, bytes that the vocabulary lacks, whether decoding drops a first space)."""
    steps = _steps(document.get("decoder"), "decoders")
    if "ByteLevel" in steps:
        lacks = {byte for byte, symbol in enumerate(symbols()) if symbol not in vocabulary}
        return _of_symbols, lacks, False
    replaced = steps.get("Replace", {})
    if "Metaspace" in steps or (replaced.get("pattern"), replaced.get("content")) == ({"String": BLANK}, " "):
        if not document["model"].get("byte_fallback") or not BYTE_TOKENS.keys() <= vocabulary.keys():
            raise DataError(
                f"{source}: its vocabulary has no tokens for single bytes, so it cannot encode every text"
            )
        space = steps.get("Metaspace", {"prepend_scheme": "never"})
        prepends = space.get("prepend_scheme") != "never" and bool(space.get("add_prefix_space", True))
        return _of_blanks, set(), prepends or steps.get("Strip", {}).get("content") == " "
    shown = ", ".join(steps) or "missing"
    raise DataError(f"{source}: its decoder is {shown}, not ByteLevel or SentencePiece's with bytes")


def _of_symbols(entry: str) -> bytes:
    byte_of = latin1_of_symbol()
    known = all(ord(character) in byte_of for character in entry)
    return entry.translate(byte_of).encode("latin-1") if known else entry.encode("utf-8", "replace")


def _of_blanks(entry: str) -> bytes:
    return BYTE_TOKENS.get(entry) or entry.replace(BLANK, " ").encode("utf-8", "replace")
