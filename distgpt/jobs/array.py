"""Job arrays of Slurm: one script for many runs, in which $SLURM_ARRAY_TASK_ID is the number of each."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from distgpt.core.base.errors import UsageError

ELEMENT = "$SLURM_ARRAY_TASK_ID"
MOST = 100_000  # elements
MOST_CHECKED = 100  # elements whose command is checked before
_OPTION = re.compile(r"(?:--array(?:\s+|=)|-a\s*)(.*)")
_NUMBERS = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::([1-9]\d{0,8}))?)?")


def elements(lines: Sequence[str]) -> list[int]:
    """Return the numbers that these options of sbatch give the elements of an array; [] if there is none."""
    asked = [found[1] for line in lines if (found := _OPTION.fullmatch(line))]
    numbers: list[int] = []
    for part in asked[-1].partition("%")[0].split(",") if asked else ():
        if (found := _NUMBERS.fullmatch(part)) is None:
            raise UsageError(
                f"--sbatch --array={asked[-1]}: give numbers, as in --array=1-4 or --array=0,3,7"
            )
        numbers += range(int(found[1]), int(found[2] or found[1]) + 1, int(found[3] or 1))[:MOST]
    return numbers


def with_own_directories(words: Sequence[str]) -> tuple[list[str], str]:
    """Return the words with an --out in which every element has a directory of its own, and that directory.

    It is "" where there is no --out.
    """
    out, changed = "", list(words)
    for place, word in enumerate(words):
        name, equals, value = word.partition("=") if word.startswith("--out=") else ("", "", word)
        if equals or (place and words[place - 1] == "--out"):
            out = value if ELEMENT in value else str(Path(value) / ELEMENT)
            changed[place] = f"{name}{equals}{out}"
    return changed, out


def commands(words: Sequence[str], numbers: Sequence[int]) -> list[list[str]]:
    """Return the command of each element, or one where all are alike; of a long array those of the first."""
    if not any(ELEMENT in word for word in words):
        return [list(words)]
    if not numbers:
        raise UsageError(f"{ELEMENT} is the number of an element of a job array: give --sbatch --array=1-4")
    return [[word.replace(ELEMENT, str(number)) for word in words] for number in numbers[:MOST_CHECKED]]


def quoted(word: str) -> str:
    """Quote a word for a shell that puts in an element's number."""
    parts = [shlex.quote(part) if part else "" for part in word.split(ELEMENT)]
    return f'"{ELEMENT}"'.join(parts) or "''"
