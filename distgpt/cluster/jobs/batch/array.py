"""Job arrays: one script for many runs, in which a variable of the shell is the number of each."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from distgpt.core.base.errors import UsageError

ANY = "ELEMENT"  # may stand in a command in place of the system's own variable
MOST = 100_000  # elements
MOST_CHECKED = 100  # elements whose command is checked before
_AT_ONCE = re.compile(r"[1-9]\d{0,8}")
_NUMBERS = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::([1-9]\d{0,8}))?)?")


def elements(text: str) -> list[int]:
    """Return the numbers of an array's elements, as in "1-4", "0-8:2%3" or "0,3,7"; [] for ""."""
    rows, percent, most = text.partition("%")
    if percent and not _AT_ONCE.fullmatch(most):
        raise UsageError(f"--array={text}: after % give how many may run at once, as in --array=1-40%8")
    numbers: list[int] = []
    for part in rows.split(",") if text else ():
        if (found := _NUMBERS.fullmatch(part)) is None:
            raise UsageError(f"--array={text}: give numbers, as in --array=1-4 or --array=0,3,7")
        several = range(int(found[1]), int(found[2] or found[1]) + 1, int(found[3] or 1))[:MOST]
        if not several:  # a job without elements would take one directory for all that the system makes of it
            raise UsageError(f"--array={text}: {part} ends before it begins")
        numbers += several
    return list(dict.fromkeys(numbers))  # Flux would start one that is named twice in one directory, twice


def renamed(words: Iterable[str], names: Iterable[str], element: str) -> list[str]:
    """Return the words with `element`, "$NAME", wherever they have a variable of one of the names."""
    pattern = re.compile(r"\$(?:{(?:%s)}|(?:%s)(?!\w))" % (("|".join(names),) * 2))
    return [pattern.sub(lambda _: element, word) for word in words]


def with_own_directories(words: Sequence[str], element: str) -> tuple[list[str], str]:
    """Return the words with an --out in which every element has a directory of its own, and that directory.

    It is "" where there is no --out.
    """
    out, changed = "", list(words)
    for place, word in enumerate(words):
        name, equals, value = word.partition("=") if word.startswith("--out=") else ("", "", word)
        if equals or (place and words[place - 1] == "--out"):
            out = value if element in value else str(Path(value) / element)
            changed[place] = f"{name}{equals}{out}"
    return changed, out


def commands(words: Sequence[str], numbers: Sequence[int], element: str) -> list[list[str]]:
    """Return the command of each element, or one where all are alike; of a long array those of the first."""
    if not any(element in word for word in words):
        return [list(words)]
    if not numbers:
        raise UsageError(f"{element} is the number of an element of a job array: give --array 1-4")
    return [[word.replace(element, str(number)) for word in words] for number in numbers[:MOST_CHECKED]]


def quoting(element: str) -> Callable[[str], str]:
    """Return a function that quotes a word for a shell that puts in an element's number."""

    def quoted(word: str) -> str:
        parts = [shlex.quote(part) if part else "" for part in word.split(element)]
        return f'"{element}"'.join(parts) or "''"

    return quoted
