"""A sequence of token ids, of which only the part that is read need lie in memory."""

from __future__ import annotations

from typing import Protocol
from zlib import crc32

from distgpt.kernels.api import Array


class Tokens(Protocol):
    """`fingerprint` tells one content from another."""

    fingerprint: str

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> Array:
        """The ids [start, stop), for 0 ≤ start ≤ stop ≤ length; uint16 or uint32, maybe a view."""


class ArrayTokens:
    """All of them in one array."""

    def __init__(self, ids: Array) -> None:
        self._ids = ids
        self.fingerprint = f"crc32:{crc32(memoryview(ids).cast('B')):08x}"

    def __len__(self) -> int:
        return len(self._ids)

    def read(self, start: int, stop: int) -> Array:
        return self._ids[start:stop]
