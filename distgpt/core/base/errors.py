"""Errors that end a command, with their exit codes, and output to the terminal."""

from __future__ import annotations

import shlex
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

from distgpt.core.base.system import PACKAGE, python

Say = Callable[[str], None]  # prints a line for the user


class DistgptError(Exception):
    """An expected failure, shown as one line without a traceback."""

    exit_code = 70
    stop = "failed"  # the reason in the run's summary
    shared = False  # raised on every rank, so each can exit on its own


class DisagreementError(DistgptError):
    """Backends or methods that should agree give different results, or one of them failed."""

    exit_code = 1


class UndecidedError(DistgptError):
    """Results differ, possibly only by rounding."""

    exit_code = 3


class UsageError(DistgptError):
    """An invalid command, option or configuration value."""

    exit_code = 2


class DataError(DistgptError):
    """A corrupt or wrong kind of text, token, weights or checkpoint file."""

    exit_code = 65


class MismatchError(DistgptError):
    """Results that differ between ranks or passes and can only differ through a hardware error."""

    exit_code = 71


class StorageError(DistgptError):
    """A failed read or write: missing permissions, a full disk, a missing directory."""

    exit_code = 74


class NonFiniteError(DistgptError):
    """An infinite or NaN loss or gradient."""

    exit_code = 76
    stop = "not finite"


class OutlierError(DistgptError):
    """A loss or gradient far above its recent values."""

    exit_code = 76
    stop = "outlier"


def reject_combination(what: str, others: Mapping[str, object], why: str) -> None:
    """Raise a UsageError if one of the `others`, options with their values, is set."""
    for option, value in others.items():
        if value:
            raise UsageError(f"{what} and --{option} cannot be combined: {why}")


def error_for(exit_code: int) -> type[DistgptError]:
    """Return the error class of this exit code, to raise one rank's error on all ranks."""
    kinds = (DisagreementError, UsageError, DataError, MismatchError, StorageError, NonFiniteError)
    return next((kind for kind in kinds if kind.exit_code == exit_code), DistgptError)


SCREEN = 1500  # characters


def one_line(text: str) -> str:
    """Escape text for a terminal and shorten it to one screen."""
    line = escape(text)
    return line if len(line) <= SCREEN else f"{line[: SCREEN - 200]} … {line[-190:]}"


def first_line(error: BaseException) -> str:
    """Return the first line of a third-party error, or its class name."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def escape_lines(text: str) -> str:
    """Escape each line as `one_line` does."""
    return "\n".join(map(one_line, text.split("\n")))


def print_lines(text: object, err: bool = False) -> None:
    """Print a result or a note. Everything except JSON and generated text is printed through this function.

    Errors while writing to standard error are ignored.
    """
    with suppress(*[OSError] * err):
        print(escape_lines(str(text)), file=sys.stderr if err else sys.stdout, flush=True)


def escape(text: str) -> str:
    """Escape control characters in text from a file, such as \\n or \\x1b."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


BIDI_OVERRIDES = frozenset(map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A))))


def escape_model_text(text: str) -> str:
    """Replace control characters, surrogates and bidi overrides in generated text with U+FFFD."""
    bad = {c for c in text if unicodedata.category(c) in ("Cc", "Cs") or c in BIDI_OVERRIDES} - {"\n", "\t"}
    return "".join("\ufffd" if c in bad else c for c in text)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a suggestion, "; did you mean …?", and a short list of the allowed words, in order."""
    options = sorted(known) if isinstance(known, set | frozenset) else list(known)
    close = get_close_matches(word, options, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return hint if len(options) > 40 else f"{hint} (allowed: {', '.join(options)})"


def nearest_path(path: Path) -> str:
    """Suggest an existing path for a missing one, by its first component that does not exist; "" if none."""
    with suppress(OSError, ValueError):
        missing = next((part for part in (path, *path.parents) if part.parent.is_dir()), path)
        names = [other.name for other in missing.parent.iterdir()]
        for close in get_close_matches(missing.name, names, n=1):
            if (meant := missing.with_name(close) / path.relative_to(missing)).exists():
                return f"; did you mean {str(meant)!r}?"
    return ""


def command_line(*words: object) -> str:
    """Return a distgpt command to copy: quoted, with the program's path if the shell would not find it."""
    program = ["distgpt"]
    if not shutil.which("distgpt"):
        program = sys.argv[:1] if Path(sys.argv[0]).name == "distgpt" else python(PACKAGE)
    return shlex.join([*program, *map(str, words)])
