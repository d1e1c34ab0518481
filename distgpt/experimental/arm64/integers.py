"""Tiles of int8 and int4 on arm64: those of rounded/loops/, with NEON's loads and stores."""

from __future__ import annotations

from distgpt.experimental.arm64.neon import NeonTile
from distgpt.rounded.loops.int4 import Int4Tile
from distgpt.rounded.loops.int8 import Int8Tile


class NeonInt8Tile(Int8Tile, NeonTile):
    """Writes the function for one number of rows on arm64."""


class NeonInt4Tile(Int4Tile, NeonTile):
    """Writes the function for one number of rows on arm64."""
