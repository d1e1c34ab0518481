"""The errors a command can end with, each with the exit code of every rank; and how text reaches the user."""

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

Say = Callable[[str], None]  # tells the user a line


class DistgptError(Exception):
    """An expected failure: shown to the user as one line, without a traceback."""

    exit_code = 70
    stop = "failed"  # what ended a run, in its summary
    shared = False  # raised by all ranks at once, so that each may exit on its own


class DisagreementError(DistgptError):
    """Stages or methods that should compute the same do not, or one of them failed."""

    exit_code = 1


class UndecidedError(DistgptError):
    """Numbers differ, and rounding may have caused that or not."""

    exit_code = 3


class UsageError(DistgptError):
    """The command, a flag or a configuration value makes no sense."""

    exit_code = 2


class DataError(DistgptError):
    """A text, token, weights or checkpoint file is damaged or of the wrong kind."""

    exit_code = 65


class MismatchError(DistgptError):
    """Ranks, or two passes over the same data, differ where a processor or its memory does not err."""

    exit_code = 71


class StorageError(DistgptError):
    """Reading or writing failed: missing permissions, a full disk, a missing directory."""

    exit_code = 74


class NonFiniteError(DistgptError):
    """The loss or the gradient became infinite or NaN."""

    exit_code = 76
    stop = "not finite"


class OutlierError(DistgptError):
    """The loss or the gradient is far above what it was."""

    exit_code = 76
    stop = "outlier"


def refuse_beside(what: str, others: Mapping[str, object], why: str) -> None:
    """Raise a UsageError about the first of the `others`, options with their values, that is set."""
    for option, value in others.items():
        if value:
            raise UsageError(f"{what} and --{option} exclude each other: {why}")


def error_for(exit_code: int) -> type[DistgptError]:
    """Return the error class with this exit code, to raise on all ranks what one of them found."""
    kinds = (DisagreementError, UsageError, DataError, MismatchError, StorageError, NonFiniteError)
    return next((kind for kind in kinds if kind.exit_code == exit_code), DistgptError)


SCREEN = 1500  # characters


def one_line(text: str) -> str:
    """Make a text a line for a terminal: escaped, and no longer than a screen."""
    line = escape(text)
    return line if len(line) <= SCREEN else f"{line[: SCREEN - 200]} … {line[-190:]}"


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error, or the name of its class."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def escape_lines(text: str) -> str:
    """Make each line of a text fit for a terminal, as `one_line` does."""
    return "\n".join(map(one_line, text.split("\n")))


def print_lines(text: object, err: bool = False) -> None:
    """Print a result or a note. All that commands print goes through here, except JSON and models' texts.

    Nothing depends on standard error: a note that cannot be written is dropped.
    """
    with suppress(*[OSError] * err):
        print(escape_lines(str(text)), file=sys.stderr if err else sys.stdout, flush=True)


def escape(text: str) -> str:
    """Escape control characters in a text from a file, as \\n or \\x1b."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


BIDI_OVERRIDES = frozenset(map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A))))


def escape_model_text(text: str) -> str:
    """Replace control characters, surrogates and bidi overrides in a text of a model by U+FFFD."""
    bad = {c for c in text if unicodedata.category(c) in ("Cc", "Cs") or c in BIDI_OVERRIDES} - {"\n", "\t"}
    return "".join("\ufffd" if c in bad else c for c in text)


def nearest(word: str, known: Iterable[str]) -> str:
    """Suggest the closest known word, “; did you mean …?”, and a short list of the allowed ones, in order."""
    options = sorted(known) if isinstance(known, set | frozenset) else list(known)
    close = get_close_matches(word, options, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return hint if len(options) > 40 else f"{hint} (allowed: {', '.join(options)})"


def nearest_path(path: Path) -> str:
    """Suggest an existing path for a missing one, by the first name in it that does not exist; "" if none."""
    with suppress(OSError, ValueError):
        missing = next((part for part in (path, *path.parents) if part.parent.is_dir()), path)
        names = [other.name for other in missing.parent.iterdir()]
        for close in get_close_matches(missing.name, names, n=1):
            if (meant := missing.with_name(close) / path.relative_to(missing)).exists():
                return f"; did you mean {str(meant)!r}?"
    return ""


def command_line(*words: object) -> str:
    """Return a distgpt command to copy: quoted, and as it was called where the shell would not find it."""
    program = ["distgpt"]
    if not shutil.which("distgpt"):
        program = sys.argv[:1] if Path(sys.argv[0]).name == "distgpt" else python(PACKAGE)
    return shlex.join([*program, *map(str, words)])
