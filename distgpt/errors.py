"""The ways a run can end badly, each with the exit code that every rank leaves with."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class DistgptError(Exception):
    """An expected failure: shown to the user as one line, without a traceback."""

    exit_code = 70
    shared = False  # raised by all ranks at once, so that each may leave on its own


class DisagreementError(DistgptError):
    """Ways that should compute the same do not, or one of them died on the way."""

    exit_code = 1


class UsageError(DistgptError):
    """The command, a flag or a configuration value makes no sense."""

    exit_code = 2


class DataError(DistgptError):
    """A text, token, weights or checkpoint file is not what it should be."""

    exit_code = 65


class StorageError(DistgptError):
    """Reading or writing failed: missing rights, a full disk, a vanished directory."""

    exit_code = 74


class NonFiniteError(DistgptError):
    """The loss or the gradient became infinite or not a number."""

    exit_code = 76


def error_for(exit_code: int) -> type[DistgptError]:
    """The error class that leaves with this exit code, so that one rank's verdict can be raised on all."""
    kinds = (DisagreementError, UsageError, DataError, StorageError, NonFiniteError)
    return next((kind for kind in kinds if kind.exit_code == exit_code), DistgptError)


def printable(text: str) -> str:
    """Text out of a file, for a message or a page: control characters are spelled out, as \\n or \\x1b."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def nearest(word: str, known: Iterable[str]) -> str:
    """“; did you mean …?” with the closest known word, then what is allowed when that is short."""
    options = list(known)
    close = get_close_matches(word, options, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return hint if len(options) > 40 else f"{hint} (allowed: {', '.join(sorted(options))})"
