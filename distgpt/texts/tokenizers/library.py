"""Calls of the library `tokenizers` for documents that are not trusted: its failures, and its time."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from distgpt.core.base.errors import DataError, first_line

if TYPE_CHECKING:
    import tokenizers

SECONDS = 10.0  # for any text
CHARACTERS = 100_000  # for which there is one second more: a tenth of what is usual


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turn whatever the library raises inside into one line that begins with `what`."""
    try:
        yield
    except BaseException as error:  # what is not foreseen there comes as a PanicException
        is_panic = type(error).__name__ == "PanicException"
        if isinstance(error, MemoryError) or not (isinstance(error, Exception) or is_panic):
            raise
        raise DataError(f"{what}: {first_line(error) or type(error).__name__}") from None


class Encoder:
    """Encodes by a tokenizer of the library, beside other threads; a DataError where it fails or is too slow.

    Only one that may be slow has a thread for each text: no code of ours can end what the library has begun,
    so a text that takes too long keeps its thread busy, and further ones are refused until it has ended.
    """

    def __init__(self, library: tokenizers.Tokenizer, source: str, may_be_slow: bool) -> None:
        # Else it starts as many threads as there are processors, for one text.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._library, self._may_be_slow = library, may_be_slow
        self._fails = f"{source}: the library tokenizers cannot encode this text"
        self._stuck: threading.Thread | None = None

    def encode(self, text: str) -> tokenizers.Encoding:
        if self._may_be_slow:
            return self._in_time(text)
        with library_errors(self._fails):
            return self._now(text)

    def _now(self, text: str) -> tokenizers.Encoding:
        """Encode a list of texts: meanwhile other threads run, as they do not while it encodes one alone."""
        return self._library.encode_batch([text], add_special_tokens=False)[0]

    def _in_time(self, text: str) -> tokenizers.Encoding:
        if self._stuck is not None and self._stuck.is_alive():
            raise DataError(f"{self._fails}: it is still busy with one before it that takes too long")
        found: list[tokenizers.Encoding | BaseException] = []

        def work() -> None:
            try:
                found.append(self._now(text))
            except BaseException as error:
                found.append(error)

        thread = threading.Thread(target=work, name="encoder", daemon=True)
        thread.start()
        thread.join(seconds := SECONDS + len(text) / CHARACTERS)
        if not found:
            self._stuck = thread
            raise DataError(
                f"{self._fails}: {len(text):,} characters take longer than {seconds:.0f} s by its rules"
            )
        with library_errors(self._fails):
            if isinstance(result := found[0], BaseException):
                raise result
        return result
