"""Tokenizers and chat templates in GGUF: byte-level BPE ("gpt2") and SentencePiece BPE ("llama")."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from distgpt.core.base.errors import DataError, UsageError
from distgpt.core.data.tokenizers import ByteTokenizer, Tokenizer, checked_chat
from distgpt.corpora.tokenizers.bpe import LARGEST, BpeTokenizer, symbols
from distgpt.corpora.tokenizers.collected import refuse_repeated
from distgpt.corpora.tokenizers.library import LLAMA3_WORDS, QWEN_WORDS, library_errors
from distgpt.corpora.tokenizers.third_party import from_document
from distgpt.corpora.tokenizers.tokenizer_json import BLANK, BYTE_TOKENS, LibraryTokenizer, added_token
from distgpt.models.formats.gguf.container import Container, Numbers

KEY, TEMPLATE = "tokenizer.ggml.", "tokenizer.chat_template"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # token types
_LONGEST = 256  # characters of a SentencePiece piece; SentencePiece's default limit is 16
_ENDS = ("eos", "eot", "eom")
_NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def _words(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_GPT2 = {**_BYTES, "use_regex": True}
# Pre-tokenizers by their GGUF names.
PRE: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [_GPT2],
    "smollm": [{"type": "Digits", "individual_digits": True}, _GPT2],
    "qwen2": [_words(QWEN_WORDS), _BYTES],
    "llama-bpe": [_words(LLAMA3_WORDS), _BYTES],
}
_SAME = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}
_WHOLE = "llama-bpe"  # uses a word that is in the vocabulary as one token, without merges
_COMPOSED = "qwen2"  # its tokenizer.json normalizes text to NFC


# -- export


def metadata_of(tokenizer: Tokenizer, size: int, source: object) -> dict[str, Any]:
    """Return the metadata of a tokenizer for a model of `size` tokens. Raises a UsageError if unsupported."""
    if len(tokenizer.first) > 1:
        raise _refused(source, "starts text with multiple tokens; GGUF supports one")
    if isinstance(tokenizer, LibraryTokenizer):
        document = tokenizer.contents()["document"]
        result = (_sentencepiece if tokenizer.spells_blanks else _byte_level)(document, source)
        added = {token["content"]: token["id"] for token in document.get("added_tokens") or []}
        tokens = {i: text for text, i in (document["model"]["vocab"] | added).items()}
    else:
        result, tokens = _own(tokenizer, source)
    kinds = dict.fromkeys(tokens, NORMAL) | result.pop("kinds")
    result["tokens"] = [tokens.get(i, f"[PAD{i}]") for i in range(size)]
    result["token_type"] = np.array([kinds.get(i, UNUSED) for i in range(size)], np.int32)
    if "scores" in result:
        result["scores"] = np.array([result["scores"].get(i, 0.0) for i in range(size)], np.float32)
    byte = "<0xFF>" if "scores" in result else symbols()[0xFF]
    never = result["tokens"].index(byte) if byte in result["tokens"] else 0
    result |= _roles(tokenizer, never)
    known = tokenizer.chat
    chat = {TEMPLATE: known.source} if known and known.source else {}
    return {KEY + name: value for name, value in result.items()} | chat


def _own(tokenizer: Tokenizer, source: object) -> tuple[dict[str, Any], dict[int, str]]:
    """Return metadata and tokens of one of our tokenizers; byte becomes BPE without merges."""
    special = tokenizer.specials
    merges: Sequence[tuple[str, str]] = ()
    vocabulary: Sequence[str] = symbols()
    if isinstance(tokenizer, BpeTokenizer):
        vocabulary, merges = tokenizer.vocabulary, tokenizer.merges
    elif tokenizer.kind != "byte":
        raise _refused(source, f"has kind {tokenizer.kind}, but GGUF requires byte or bpe:N")
    kinds = dict.fromkeys(special.values(), CONTROL)
    tokens = dict(enumerate(vocabulary)) | {i: text for text, i in special.items()}
    return {"model": "gpt2", "pre": "gpt-2", "merges": [" ".join(m) for m in merges], "kinds": kinds}, tokens


def _refused(source: object, why: str) -> UsageError:
    return UsageError(f"cannot export {source}: its tokenizer {why}")


def _roles(tokenizer: Tokenizer, never: int) -> dict[str, Any]:
    """Return ids by role.

    llama.cpp assigns default ids to absent special tokens. They get a byte that never occurs in text.
    """
    chat, special = tokenizer.chat, tokenizer.specials
    named = {role: special.get(chat.tokens.get(name, "")) if chat else None for role, name in _NAMED.items()}
    own = [named["eos"], *(chat.ends if chat else ())]
    ends = list(dict.fromkeys(end for end in own if end is not None))
    end = never if tokenizer.separator is None else tokenizer.separator
    result: dict[str, Any] = dict(zip(_ENDS, ends or [end], strict=False))
    begin = named["bos"] if chat else end
    result["bos"] = next(iter(tokenizer.first), never if begin is None else begin)
    result |= {role: named[role] for role in ("unknown", "padding") if named[role] is not None}
    ids = {f"{role}_token_id": token for role, token in result.items()}
    return {**ids, "add_bos_token": bool(tokenizer.first), "add_eos_token": False}


def _kinds(document: Mapping[str, Any]) -> dict[int, int]:
    unknown = document["model"].get("unk_token")
    result = {}
    for token in document.get("added_tokens") or []:
        kind = CONTROL if token["special"] else USER_DEFINED
        result[token["id"]] = UNKNOWN if token["content"] == unknown else kind
    return result


def _byte_level(document: Mapping[str, Any], source: object) -> dict[str, Any]:
    model, before = document["model"], document.get("pre_tokenizer") or {}
    defaults = {"ByteLevel": {"add_prefix_space": True, "use_regex": True}}
    ours = {"ByteLevel": {"trim_offsets": True}}  # does not affect ids
    parts = before.get("pretokenizers", [before] if before else [])
    steps = [defaults.get(part["type"], {}) | part | ours.get(part["type"], {}) for part in parts]
    pre = next((name for name, known in PRE.items() if steps == known), None)
    nothing = (None, {"type": "Sequence", "normalizers": []}, {"type": "NFC"} if pre == _COMPOSED else None)
    if model.get("type", "BPE") != "BPE" or pre is None or document.get("normalizer") not in nothing:
        raise _refused(source, f"does not split text like any of {', '.join(PRE)}")
    if (pre == _WHOLE) != bool(model.get("ignore_merges")) and not _merges_all(model, source):
        raise _refused(source, f"handles whole entries unlike {pre} in GGUF")
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    return {"model": "gpt2", "pre": pre, "merges": merges, "kinds": _kinds(document)}


def _merges_all(model: Mapping[str, Any], source: object) -> bool:
    """Return whether merges produce every entry, so that `ignore_merges` changes nothing."""
    from tokenizers import models

    pairs = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]]
    with library_errors(f"{source}: the tokenizers library rejected its merges"):
        merging = models.BPE(model["vocab"], pairs)
        return all(len(merging.tokenize(entry)) == 1 for entry in model["vocab"])


def _sentencepiece(document: Mapping[str, Any], source: object) -> dict[str, Any]:
    """Return pieces with scores: a later merge has a lower score."""
    model = document["model"]
    if model.get("type", "BPE") != "BPE":
        raise _refused(source, f"is {model['type']} with single bytes, which GGUF lacks for these models")
    vocab: dict[str, int] = model["vocab"]
    kinds = _kinds(document) | {vocab[entry]: BYTE for entry in BYTE_TOKENS}
    made = ["".join(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]]
    scores = {piece: -float(rank) for rank, piece in reversed(list(enumerate(made)))}
    result = {piece: n for piece, n in Counter(made).items() if vocab[piece] not in kinds}
    pieces = [piece for piece, i in vocab.items() if i not in kinds]
    expected = {piece: n for piece in pieces if (n := len(_splits(piece, vocab)))}
    if result != expected or len(list(itertools.groupby(made))) != len(scores):
        raise _refused(source, "has merges that differ from SentencePiece's, which GGUF derives from scores")
    steps = document.get("normalizer") or {}
    prefixed = any(step["type"] == "Prepend" for step in steps.get("normalizers", [steps] if steps else []))
    before = document.get("pre_tokenizer") or {}
    if before.get("type") == "Metaspace":
        prefixed = before.get("prepend_scheme", "always") != "never"
    by_id = {vocab[piece]: score for piece, score in scores.items()}
    return {"model": "llama", "pre": "default", "scores": by_id, "add_space_prefix": prefixed, "kinds": kinds}


def _splits(piece: str, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the pairs of entries that form a piece, in the order of their ids."""
    cuts = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
    known = [(a, b) for a, b in cuts if a in vocab and b in vocab]
    return sorted(known, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))


# -- import


def tokenizer_of(container: Container) -> Tokenizer | None:
    """Return the tokenizer in a file with its chat template, or None if absent."""
    result = {k.removeprefix(KEY): v for k, v in container.metadata.items() if k.startswith(KEY)}
    source, model = str(container.path), result.get("model", "none")
    if model in ("none", "no_vocab"):
        return None
    if model not in ("gpt2", "llama"):
        raise DataError(f"{source}: its tokenizer must be gpt2 or llama, not {model!r:.40}")
    tokens, kinds = _tokens(result, source)
    special = {i: tokens[i] for i in range(len(tokens)) if kinds[i] in (UNKNOWN, CONTROL, USER_DEFINED)}
    # Special tokens before the last ordinary token are also entries. Otherwise the library would reuse their
    # ids.
    last = max((i for i, kind in enumerate(kinds) if kind in (NORMAL, BYTE)), default=-1)
    vocab = {text: i for i, text in enumerate(tokens[: last + 1])}
    pieces = [text for i, text in enumerate(tokens) if kinds[i] == NORMAL]
    ids = {name: result.get(f"{name}_token_id") for name in (*_NAMED, *_ENDS)}
    roles = {name: i for name, i in ids.items() if type(i) is int and i in special}
    document = _document(result, vocab, pieces, source)
    document["added_tokens"] = [added_token(i, text, kinds[i] != USER_DEFINED) for i, text in special.items()]
    begins = result.get("add_bos_token", model == "llama" or result.get("pre") == _WHOLE)
    document["post_processor"] = (
        _begin(special[roles["bos"]], roles["bos"]) if begins and "bos" in roles else None
    )
    merges = document["model"]["merges"]
    is_byte = list(vocab) == list(symbols()) and not special and not merges
    tokenizer: Tokenizer = ByteTokenizer() if is_byte else from_document(document, source)
    template: Any = container.metadata.get(TEMPLATE, "")
    ends = list(dict.fromkeys(roles[role] for role in _ENDS if role in roles))
    if not template and not (isinstance(tokenizer, LibraryTokenizer) and ends):
        return tokenizer
    named = {name: special[roles[role]] for role, name in _NAMED.items() if role in roles}
    chat = {"source": template, "tokens": named, "ends": ends}
    return tokenizer.with_chat(checked_chat(chat, tokenizer.size, source))


def _tokens(found: Mapping[str, Any], source: str) -> tuple[list[str], Sequence[int]]:
    tokens: Any = found.get("tokens")
    kinds: Any = found.get("token_type")
    if not _is_texts(tokens) or not 0 < len(tokens) < LARGEST:
        raise DataError(f"{source}: {KEY}tokens must be a list of at most {LARGEST:,} strings")
    kinds = Numbers(np.full(len(tokens), NORMAL)) if kinds is None else kinds
    if not isinstance(kinds, Numbers) or len(kinds.array) != len(tokens):
        raise DataError(f"{source}: {KEY}token_type must be a list of {len(tokens):,} numbers")
    refuse_repeated(tokens, source)
    return tokens, kinds.array.tolist()


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _document(
    found: Mapping[str, Any], vocab: dict[str, int], pieces: list[str], source: str
) -> dict[str, Any]:
    """Return the equivalent tokenizer.json, without added tokens."""
    if found["model"] == "llama":
        prefix = found.get("add_space_prefix", True) is not False
        return _of_blanks(vocab, _merges_by_score(found.get("scores"), pieces, vocab, source), prefix)
    said = found.get("pre", "default")
    pre = _SAME.get(said, said) if isinstance(said, str) else "default"
    if pre not in PRE:
        raise DataError(f"{source}: unknown pre-tokenizer {said!r:.40}; known: {', '.join(PRE)}")
    if not _is_texts(merges := found.get("merges")):
        raise DataError(f"{source}: {KEY}merges must be a list of strings")
    model = {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": pre == _WHOLE}
    steps = PRE[pre]
    before = steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps}
    normalizer = {"type": "NFC"} if pre == _COMPOSED else None
    return {"normalizer": normalizer, "pre_tokenizer": before, "decoder": _GPT2, "model": model}


def _merges_by_score(scores: Any, pieces: list[str], vocab: dict[str, int], source: str) -> list[list[str]]:
    if not isinstance(scores, Numbers) or len(scores.array) < len(vocab):
        raise DataError(f"{source}: {KEY}scores must be a list of one number per token")
    if any(len(piece) > _LONGEST for piece in pieces):
        raise DataError(f"{source}: its vocabulary has a piece longer than {_LONGEST} characters")
    score = np.nan_to_num(scores.array.astype(np.float64))
    order = sorted(pieces, key=lambda piece: -float(score[vocab[piece]]))
    return [list(pair) for piece in order for pair in _splits(piece, vocab)]


def _of_blanks(vocab: dict[str, int], merges: list[list[str]], prefix: bool) -> dict[str, Any]:
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": BLANK}
    back = {"type": "Replace", "pattern": {"String": BLANK}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    decoders = [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
    first = [{"type": "Prepend", "prepend": BLANK}] if prefix else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*first, replace]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, "byte_fallback": True, "fuse_unk": True},
    }


def _begin(text: str, token_id: int) -> dict[str, Any]:
    """Return a post-processor that prepends one token."""
    token = {"SpecialToken": {"id": text, "type_id": 0}}
    single = [token, {"Sequence": {"id": "A", "type_id": 0}}]
    known = {text: {"id": text, "ids": [token_id], "tokens": [text]}}
    return {"type": "TemplateProcessing", "single": single, "pair": [*single], "special_tokens": known}
