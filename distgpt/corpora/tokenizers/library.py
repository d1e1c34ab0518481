"""Limits on the `tokenizers` library for untrusted documents: errors, memory and time."""

from __future__ import annotations

import base64
import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from math import inf, prod
from typing import TYPE_CHECKING, Any, TypeVar

from distgpt.core.base.errors import DataError, first_line

if TYPE_CHECKING:
    import tokenizers

SECONDS = 10.0  # for any text
CHARACTERS = 100_000  # characters per additional second, 1/10 of the usual speed
MOST = 16  # maximum growth in characters; known families need 4 (blanks before pieces, symbols for bytes)
TABLES = 18  # maximum characters for one by Unicode's tables (U+FDFA in NFKC), however often they are applied
SHORT = 64  # characters of a string to replace, which is compared at each position
SAME_LENGTH = """
    NFC NFD NFKC NFKD Nmt Lowercase Strip StripAccents Precompiled BertPreTokenizer CharDelimiterSplit Digits
    FixedLength Punctuation Split UnicodeScripts Whitespace WhitespaceSplit
"""
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORDS += r"|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_WORDS, QWEN_WORDS = _WORDS % "{1,3}", _WORDS % ""

Step = dict[str, Any]
T = TypeVar("T")


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turn any exception of the library into a DataError that starts with `what`."""
    try:
        yield
    except BaseException as error:  # the library raises PanicException for unforeseen errors
        is_panic = type(error).__name__ == "PanicException"
        if isinstance(error, MemoryError) or not (isinstance(error, Exception) or is_panic):
            raise
        raise DataError(f"{what}: {first_line(error) or type(error).__name__}") from None


def refuse_growth(library: tokenizers.Tokenizer, source: str) -> None:
    """Raise a DataError if the steps before the model may expand their input too much.

    A few steps that each replace one letter by sixteen use up all memory for a single letter.
    """
    steps = _steps_before_model(library)
    if (unknown := next((step["type"] for step in steps if not growth(step)), None)) is not None:
        raise DataError(f"{source}: unknown step {unknown!r:.40}, which may make text longer")
    most = prod(map(growth, steps)) * max(1.0, prod(map(_longest_mapped, steps)) / TABLES)
    if most > MOST:
        raise DataError(
            f"{source}: its normalizer and pre-tokenizer may make text {most:.3g} times as long;"
            f" the limit is {MOST} times"
        )


def growth(step: Step) -> float:
    """Return the maximum number of characters that a step makes of one; 0 if unknown."""
    match step:
        case {"type": "Replace", "pattern": {"Regex": _}, "content": content}:
            return 1.0 + len(content)  # it may match one character, or the empty string between two
        case {"type": "Replace", "pattern": {"String": text}, "content": content}:
            return max(1.0, len(content) / len(text)) if text else inf  # empty: the library fails
        case {"type": "Prepend", "prepend": text}:
            return 1.0 + len(text)  # before each text between added tokens
        case {"type": "BertNormalizer"}:
            return 3.0  # blanks around each Chinese character
        case {"type": "ByteLevel"}:
            # A character of two bytes gives two symbols. Longer characters count as more than one here.
            return 4.0 if step.get("add_prefix_space") else 2.0
        case {"type": "Metaspace"}:
            return 2.0
    return float(step["type"] in SAME_LENGTH.split())


def _longest_mapped(step: Step) -> float:
    """Return the length of the longest text in SentencePiece's table; 1 for other steps."""
    if step["type"] != "Precompiled":
        return 1.0
    table = base64.b64decode(step["precompiled_charsmap"])
    texts = table[4 + int.from_bytes(table[:4], "little") :]
    return max(1.0, *(float(len(text.decode("utf-8", "replace"))) for text in texts.split(b"\0")))


def may_be_slow(library: tokenizers.Tokenizer) -> bool:
    """Return whether encoding time may grow faster than linearly.

    Reasons are unknown regular expressions, long strings to replace, and models other than BPE, which try all
    entries at each position.
    """
    patterns = [step.get("pattern") for step in _steps_before_model(library)]
    is_quick = all(
        pattern["Regex"] in (LLAMA3_WORDS, QWEN_WORDS)
        if "Regex" in pattern
        else len(pattern["String"]) <= SHORT
        for pattern in patterns
        if isinstance(pattern, dict)
    )
    return not is_quick or type(library.model).__name__ != "BPE"


def _steps_before_model(library: tokenizers.Tokenizer) -> list[Step]:
    """Return the steps before the model, with their defaults filled in."""

    def steps(part: Any) -> Iterator[Step]:
        inner = part.get("normalizers", part.get("pretokenizers"))
        if inner is None:
            yield part
        for each in inner or ():  # a Sequence may contain another Sequence
            yield from steps(each)

    parts = [part for part in (library.normalizer, library.pre_tokenizer) if part is not None]
    return [step for part in parts for step in steps(json.loads(part.__getstate__()))]


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Run `work` in a daemon thread, which does not delay an exit."""
    result = Future[T]()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="encoder", daemon=True).start()
    return result


class Encoder:
    """A thread-safe encoder that uses the library. Raises a DataError if it fails or is too slow.

    Only a tokenizer that may be slow uses a thread for each text. The library cannot be interrupted, so a
    slow call keeps its thread busy, and further input is rejected until it ends.
    """

    def __init__(self, library: tokenizers.Tokenizer, source: str, may_be_slow: bool) -> None:
        # Otherwise the library starts one thread per processor, for a single text.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._library, self._may_be_slow = library, may_be_slow
        self._fails = f"{source}: the tokenizers library cannot encode this text"
        self._stuck: Future[tokenizers.Encoding] | None = None

    def encode(self, text: str) -> tokenizers.Encoding:
        def work() -> tokenizers.Encoding:
            # Only encode_batch releases the GIL, so encode a list of one text.
            return self._library.encode_batch([text], add_special_tokens=False)[0]

        with library_errors(self._fails):
            if not self._may_be_slow:
                return work()
        if self._stuck is not None and not self._stuck.done():
            raise DataError(f"{self._fails}: it is still encoding an earlier text")
        result, seconds = in_thread(work), SECONDS + len(text) / CHARACTERS
        if not wait([result], seconds).done:
            self._stuck = result
            raise DataError(f"{self._fails}: {len(text):,} characters take longer than {seconds:.0f} s")
        with library_errors(self._fails):
            return result.result()
