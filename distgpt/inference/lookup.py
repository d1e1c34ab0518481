"""Prompt lookup: guesses of the next tokens from what followed the same few tokens before."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST, SHORTEST = 3, 2  # tokens that have to be alike


class Lookup:
    """Remembers where each few tokens of a growing sequence came last."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._known = 0  # tokens whose endings are remembered

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        """Up to `most` tokens that followed the last ones, where these came before. Tokens only grow."""
        for end in range(max(SHORTEST, self._known), len(tokens)):
            for size in range(SHORTEST, LONGEST + 1):
                if size <= end:
                    self._after[tuple(tokens[end - size : end])] = end
        self._known = max(self._known, len(tokens))
        for size in range(LONGEST, SHORTEST - 1, -1):
            place = self._after.get(tuple(tokens[-size:])) if size <= len(tokens) else None
            if place is not None and most > 0:
                return list(tokens[place : place + most])
        return []
