"""BPE for large texts: the compiled loops, and what they have to ask for on the way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from distgpt.data.tokenizers import bpe_loops
from distgpt.data.tokenizers.api import Ids, id_dtype
from distgpt.data.tokenizers.bpe_loops import BLANK, LETTER, LONGEST_MERGED, NUMBER, OTHER, Memory, Merges
from distgpt.kernels.api import Array

MEMORY_ROWS = 1 << 19  # 16 MB
MEMORY_IDS = 1 << 20  # 4 MB
IDS_AT_ONCE = 1 << 18
AHEAD = 1 << 16  # bytes in which to look for more characters of unknown kind once there is one
_KINDS = np.zeros(0x110000, np.uint8)  # of every code point, as far as `_learn_kinds` has been asked


class FastEncoder:
    """Gives the ids that merging gives, several times faster; threads may use it side by side.

    Most pieces of a text have been seen before: their ids are remembered, by each thread for itself, in
    memory that is emptied when full. `encode_long` encodes a piece that is too long for the compiled loops.
    """

    def __init__(
        self,
        id_of: dict[str, int],
        byte_symbols: str,
        merges: Sequence[tuple[str, str]],
        encode_long: Callable[[str], list[int]],
    ) -> None:
        pairs = np.array([(id_of[a], id_of[b]) for a, b in merges], np.uint64).reshape(-1, 2)
        results = np.array([id_of[a + b] for a, b in merges], np.uint64)
        slots = 1 << (2 * len(merges) + 1).bit_length()
        keys, values = np.full((2, slots), 2**64 - 1, np.uint64)
        bpe_loops.fill_merges(pairs, results, keys, values)
        id_of_byte = np.array([id_of[symbol] for symbol in byte_symbols], np.uint32)
        self._merges = Merges(keys, values, id_of_byte)
        self._dtype = id_dtype(len(id_of))
        self._encode_long = encode_long
        self._own = threading.local()

    def encode(self, text: bytes) -> Ids:
        """The ids of this valid UTF-8."""
        data = np.frombuffer(text, np.uint8)
        memory, out, ahead = self._scratch()
        parts = []
        at, why = 0, bpe_loops.OUT_FULL
        while why != bpe_loops.DONE:
            at, filled, why, what = bpe_loops.encode(data, at, _KINDS, self._merges, memory, out, ahead)
            parts.append(out[:filled].astype(self._dtype))
            if why == bpe_loops.UNKNOWN_KIND:
                _learn_kinds(text[what : what + AHEAD])
            elif why == bpe_loops.MEMORY_FULL:
                memory.rows.fill(0)
                memory.used.fill(0)
            elif why == bpe_loops.LONG_PIECE:
                parts.append(np.array(self._encode_long(text[at:what].decode("utf-8")), self._dtype))
                at = what
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _scratch(self) -> tuple[Memory, Array, Array]:
        if not hasattr(self._own, "scratch"):
            memory = Memory(
                np.zeros((MEMORY_ROWS, 4), np.uint64), np.empty(MEMORY_IDS, np.uint32), np.zeros(2, np.int64)
            )
            self._own.scratch = (
                memory,
                np.empty(IDS_AT_ONCE, np.uint32),
                np.empty(LONGEST_MERGED, np.uint64),
            )
        scratch: tuple[Memory, Array, Array] = self._own.scratch
        return scratch


def _learn_kinds(text: bytes) -> None:
    """Ask the library's own splitting rule about the characters here that are new.

    Which characters are letters depends on the version of Unicode; taking the library's word for it, both
    encode alike. A character is of the kind of one that it shares a piece with.
    """
    from tokenizers import pre_tokenizers

    found = np.frombuffer(text.decode("utf-8", "ignore").encode("utf-32-le"), np.uint32)
    codes = np.unique(found)
    codes = codes[_KINDS[codes] == 0]
    split = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str

    def begins_at(place: int, pattern: str) -> Array:
        """Whether a piece begins at this place of the pattern, around each character."""
        pieces = split("".join(pattern.replace("x", chr(code)) for code in codes))
        begins = np.zeros(3 * len(codes), bool)
        begins[[span[0] for _, span in pieces]] = True
        return begins[place::3]

    learned = np.full(len(codes), BLANK, np.uint8)
    learned[~begins_at(1, "ax\n")] = LETTER
    learned[~begins_at(1, "1x\n")] = NUMBER
    learned[~begins_at(2, "\nx!") & (codes != ord(" "))] = OTHER  # a space goes with anything that follows
    _KINDS[codes] = learned
