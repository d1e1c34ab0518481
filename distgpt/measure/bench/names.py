"""The forward-pass study's work: names as tokens, with a boundary at both ends."""

from __future__ import annotations

import random

BOUNDARY = 0  # and 1 … 26 for the letters
_ORDER = 11  # of the seed that shuffles them: the file is sorted by alphabet


def tokens_of(name: str) -> list[int]:
    return [BOUNDARY, *(ord(letter) - ord("a") + 1 for letter in name), BOUNDARY]


def bundled_names(count: int) -> list[str]:
    """That many of the bundled names, the same ones in every run; from the start again when they run out."""
    from distgpt.data.loading import bundled

    names = bundled("data", "names.txt").read_text().split()
    random.Random(_ORDER).shuffle(names)
    return [names[i % len(names)] for i in range(count)]
