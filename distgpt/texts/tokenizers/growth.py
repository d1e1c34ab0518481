"""A bound on how much longer a tokenizer.json makes a text before it is cut into tokens.

A few steps that each write sixteen letters for one take all memory for a text of one letter.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from math import prod
from typing import TYPE_CHECKING, Any

from distgpt.core.base.errors import DataError

if TYPE_CHECKING:
    import tokenizers

MOST = 16  # times as many characters. Known families need 4: a blank before each piece, symbols for bytes
TABLES = 18  # characters for one in Unicode's tables at most (U+FDFA in NFKC), however often they are used
SHORT = 64  # characters of a text to replace, which is compared at each place

Step = dict[str, Any]


def refuse_growth(library: tokenizers.Tokenizer, source: str) -> None:
    """Raise a DataError if the steps before the model may lengthen a text beyond all use."""
    steps = _all_steps(library)
    if unknown := next((step["type"] for step in steps if step["type"] not in _GROWTH), None):
        raise DataError(f"{source}: its step {unknown!r:.40} is unknown: it may make texts longer")
    most = prod(_GROWTH[step["type"]](step) for step in steps)
    most *= max(1.0, prod(map(_longest_mapped, steps)) / TABLES)
    if most > MOST:
        raise DataError(
            f"{source}: its normalizer and pre-tokenizer may make a text {most:.3g} times as long;"
            f" more than {MOST} times is refused"
        )


def may_be_slow(library: tokenizers.Tokenizer) -> bool:
    """Tell whether encoding may take more time than is proportional to the text.

    Regular expressions may, but for those that are known, long texts to replace, and models that try all
    entries at each place.
    """
    patterns = [step["pattern"] for step in _all_steps(library) if isinstance(step.get("pattern"), dict)]
    is_quick = all(
        pattern["Regex"] in _KNOWN if "Regex" in pattern else len(pattern["String"]) <= SHORT
        for pattern in patterns
    )
    return not is_quick or type(library.model).__name__ != "BPE"


def _all_steps(library: tokenizers.Tokenizer) -> list[Step]:
    """Return the steps before the model, with all that the document leaves out."""
    parts = [part for part in (library.normalizer, library.pre_tokenizer) if part is not None]
    return [step for part in parts for step in _steps(json.loads(part.__getstate__()))]


def _steps(part: Any) -> Iterator[Step]:
    """Yield the steps of a part, also of a Sequence in a Sequence."""
    for name in ("normalizers", "pretokenizers"):
        if name in part:
            for each in part[name]:
                yield from _steps(each)
            return
    yield part


def _replaced(step: Step) -> float:
    """An expression may match one character, or nothing between any two."""
    pattern, content = step["pattern"], len(step["content"])
    if "Regex" in pattern:
        return 1.0 + content
    if not pattern["String"]:
        return float("inf")  # the library fails
    return max(1.0, content / len(pattern["String"]))


def _byte_level(step: Step) -> float:
    """Two symbols for a character of two bytes; longer ones count as several here."""
    return 4.0 if step.get("add_prefix_space") else 2.0


def _longest_mapped(step: Step) -> float:
    """Return the characters of the longest text in the table of SentencePiece; 1 for other steps."""
    if step["type"] != "Precompiled":
        return 1.0
    table = base64.b64decode(step["precompiled_charsmap"])
    texts = table[4 + int.from_bytes(table[:4], "little") :]
    return max(1.0, *(float(len(text.decode("utf-8", "replace"))) for text in texts.split(b"\0")))


def _same(step: Step) -> float:
    return 1.0


_GROWTH: dict[str, Callable[[Step], float]] = {
    "Replace": _replaced,
    "Prepend": lambda step: 1.0 + len(step["prepend"]),  # to each text between added tokens
    "BertNormalizer": lambda step: 3.0,  # blanks around each Chinese character
    "ByteLevel": _byte_level,
    "Metaspace": lambda step: 2.0,
    **dict.fromkeys(("NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "Strip", "StripAccents"), _same),
    **dict.fromkeys(
        ("BertPreTokenizer", "CharDelimiterSplit", "Digits", "FixedLength", "Punctuation"), _same
    ),
    **dict.fromkeys(("Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit", "Precompiled"), _same),
}
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORDS += r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_KNOWN = {_WORDS % "{1,3}", _WORDS % ""}  # Llama 3; Qwen
