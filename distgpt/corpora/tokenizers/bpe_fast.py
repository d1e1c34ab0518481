"""A BPE encoder for large inputs, and its compiled loops.

The loops split bytes into pieces, cache the ids of pieces, and merge new pieces. Pieces follow GPT-2's rule:

    's|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from distgpt.core.cpu.compiling.jit import inline, jit
from distgpt.core.data.tokenizers import Ids, id_dtype
from distgpt.core.ops.api import Array

LETTER, NUMBER, BLANK, OTHER = 1, 2, 3, 4  # kinds of characters; 0: not known yet
DONE, OUT_FULL, MEMORY_FULL, UNKNOWN_KIND, LONG_PIECE = range(5)  # why `fill_ids` returned

LONGEST_KEPT = 24  # bytes of a cached piece: three words
LONGEST_MERGED = 256  # merging takes quadratic time here
FULL = 0.6  # maximum load factor; beyond it, finding a free slot takes long
MEMORY_ROWS = 1 << 19  # 16 MB
MEMORY_IDS = 1 << 20  # 4 MB
IDS_AT_ONCE = 1 << 18
AHEAD = 1 << 16  # bytes in which to find more characters of unknown kind, after the first one

_EMPTY = np.uint64(2**64 - 1)
KINDS = np.zeros(0x110000, np.uint8)  # kind of every code point, filled by `_learn_kinds`


class Merges(NamedTuple):
    """`keys` (left id << 32 | right id) with open addressing, `values` (rank << 32 | merged id)."""

    keys: Array
    values: Array
    id_of_byte: Array


class Memory(NamedTuple):
    """A cache from pieces to ids. A row has three words of text and one of length, count of ids and place.

    The place of a single id is the id itself. `used` counts rows and places.
    """

    rows: Array
    ids: Array
    used: Array


class _Scratch(threading.local):
    """Buffers of the loops, separate for each thread."""

    def __init__(self) -> None:
        rows, ids = np.zeros((MEMORY_ROWS, 4), np.uint64), np.empty(MEMORY_IDS, np.uint32)
        self.memory = Memory(rows, ids, np.zeros(2, np.int64))
        self.out = np.empty(IDS_AT_ONCE, np.uint32)
        self.ahead = np.empty(LONGEST_MERGED, np.uint64)


class FastEncoder:
    """A BPE encoder with the same results as merging step by step, but several times as fast. Thread-safe.

    Most pieces repeat, so each thread has a cache of their ids, which is emptied when full. `encode_long`
    encodes a piece that is too long for the compiled loops.
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
        fill_merges(pairs, results, keys, values)
        id_of_byte = np.array([id_of[symbol] for symbol in byte_symbols], np.uint32)
        self._merges = Merges(keys, values, id_of_byte)
        self._dtype = id_dtype(len(id_of))
        self._encode_long = encode_long
        self.scratch = _Scratch()
        self.encode(b"")  # compile the loops

    def encode(self, text: bytes) -> Ids:
        """Return the ids of valid UTF-8."""
        data = np.frombuffer(text, np.uint8)
        memory, out, ahead = self.scratch.memory, self.scratch.out, self.scratch.ahead
        parts: list[Ids] = []
        at, why = 0, OUT_FULL
        while why != DONE:
            at, filled, why, what = fill_ids(data, at, KINDS, self._merges, memory, out, ahead)
            parts.append(out[:filled].astype(self._dtype))
            if why == UNKNOWN_KIND:
                _learn_kinds(text[what : what + AHEAD])
            elif why == MEMORY_FULL:
                memory.rows.fill(0)
                memory.used.fill(0)
            elif why == LONG_PIECE:
                parts.append(np.array(self._encode_long(text[at:what].decode("utf-8")), self._dtype))
                at = what
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _learn_kinds(text: bytes) -> None:
    """Classify new characters by the library's splitting rule.

    Which characters are letters depends on the version of Unicode. With the library's answers, both encoders
    agree. A character has the kind of the character that it shares a piece with.
    """
    from tokenizers import pre_tokenizers

    result = np.frombuffer(text.decode("utf-8", "ignore").encode("utf-32-le"), np.uint32)
    codes = np.unique(result)
    codes = codes[KINDS[codes] == 0]
    split = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str

    def begins_at(place: int, pattern: str) -> Array:
        """Return whether a piece starts at this position of the pattern, around each character."""
        pieces = split("".join(pattern.replace("x", chr(code)) for code in codes))
        begins = np.zeros(3 * len(codes), bool)
        begins[[span[0] for _, span in pieces]] = True
        return begins[place::3]

    learned = np.full(len(codes), BLANK, np.uint8)
    learned[~begins_at(1, "ax\n")] = LETTER
    learned[~begins_at(1, "1x\n")] = NUMBER
    learned[~begins_at(2, "\nx!") & (codes != ord(" "))] = OTHER  # a space joins any following character
    KINDS[codes] = learned


@inline
def _code_at(data: Array, at: int) -> tuple[Any, int]:
    """Return (code point, number of bytes) at this position."""
    first = np.int64(data[at])
    if first < 0x80:
        return first, 1
    second = np.int64(data[at + 1]) & 0x3F
    if first < 0xE0:
        return (first & 0x1F) << 6 | second, 2
    third = np.int64(data[at + 2]) & 0x3F
    if first < 0xF0:
        return (first & 0x0F) << 12 | second << 6 | third, 3
    return (first & 0x07) << 18 | second << 12 | third << 6 | np.int64(data[at + 3]) & 0x3F, 4


@inline
def _contraction(data: Array, at: int) -> int:
    """Return the bytes of 's 't 'm 'd 're 've 'll at this apostrophe, or 0."""
    a = data[at + 1] if at + 1 < data.size else np.uint8(0)
    b = data[at + 2] if at + 2 < data.size else np.uint8(0)
    if a == ord("s") or a == ord("t") or a == ord("m") or a == ord("d"):
        return 2
    if (a == ord("r") or a == ord("v")) and b == ord("e"):
        return 3
    return 3 if a == ord("l") and b == ord("l") else 0


@inline
def _run_end(data: Array, at: Any, kind: Any, kinds: Array) -> Any:
    """Return the end of the run of this kind, or -1 - the position of a character of unknown kind."""
    while at < data.size:
        code, width = _code_at(data, at)
        if kinds[code] != kind:
            return at if kinds[code] else -1 - at
        at += width
    return at


@inline
def _piece_end(data: Array, start: Any, kinds: Array) -> Any:
    """Return the end of this piece, or -1 - the position of a character of unknown kind."""
    code, width = _code_at(data, start)
    if code == ord("'") and _contraction(data, start):
        return start + _contraction(data, start)
    kind, end = kinds[code], start + width
    if kind == 0:
        return -1 - start
    if code == ord(" ") and end < data.size:
        code, width = _code_at(data, end)
        if kinds[code] != BLANK:
            return _run_end(data, end, kinds[code], kinds) if kinds[code] else -1 - end
    end = _run_end(data, end, kind, kinds)
    if kind != BLANK or end < 0 or end == data.size:
        return end
    last = end - 1  # the last blank before a visible character belongs to the next piece
    while data[last] & 0xC0 == 0x80:
        last -= 1
    return last if last > start else end


@inline
def _word_at(data: Array, start: Any, end: Any) -> Any:
    """Return up to eight bytes of [start, end) as one number."""
    word = np.uint64(0)
    if start + 8 <= data.size:  # the compiler turns these reads into one load
        at = np.uint64(start)
        word = (
            np.uint64(data[at])
            | np.uint64(data[at + np.uint64(1)]) << np.uint64(8)
            | np.uint64(data[at + np.uint64(2)]) << np.uint64(16)
            | np.uint64(data[at + np.uint64(3)]) << np.uint64(24)
            | np.uint64(data[at + np.uint64(4)]) << np.uint64(32)
            | np.uint64(data[at + np.uint64(5)]) << np.uint64(40)
            | np.uint64(data[at + np.uint64(6)]) << np.uint64(48)
            | np.uint64(data[at + np.uint64(7)]) << np.uint64(56)
        )
        if end - start < 8:
            word &= (np.uint64(1) << np.uint64(8 * (end - start))) - np.uint64(1)
        return word
    for k in range(end - start):
        word |= np.uint64(data[start + k]) << np.uint64(8 * k)
    return word


@inline
def _mixed(h: Any) -> Any:
    h = (h ^ (h >> np.uint64(32))) * np.uint64(0x9E3779B97F4A7C15)
    return h ^ (h >> np.uint64(29))


@inline
def _merge_of(left: np.uint32, right: np.uint32, merges: Merges) -> Any:
    """Return rank << 32 | merged id, or the largest number if the two do not merge."""
    key = np.uint64(left) << np.uint64(32) | np.uint64(right)
    mask = np.uint64(merges.keys.size - 1)
    slot = _mixed(key) & mask
    while merges.keys[slot] != key:
        if merges.keys[slot] == _EMPTY:
            return _EMPTY
        slot = (slot + np.uint64(1)) & mask
    return merges.values[slot]


@jit
def fill_merges(pairs: Array, results: Array, keys: Array, values: Array) -> None:
    """keys, values (a power of two, initially all ones) ← pairs (n, 2) by rank, results (n,); uint64."""
    mask = np.uint64(keys.size - 1)
    for rank in range(results.size):
        key = pairs[rank, 0] << np.uint64(32) | pairs[rank, 1]
        slot = _mixed(key) & mask
        while keys[slot] != _EMPTY:
            slot = (slot + np.uint64(1)) & mask
        keys[slot] = key
        values[slot] = np.uint64(rank) << np.uint64(32) | results[rank]


@inline
def _merged(data: Array, start: int, end: int, merges: Merges, out: Array, at: int, ahead: Array) -> int:
    """out[at:] ← the ids of a piece. Return their number. `ahead` is scratch for merges with the next id."""
    count = end - start
    for k in range(count):
        out[at + k] = merges.id_of_byte[data[start + k]]
    for k in range(count - 1):
        ahead[k] = _merge_of(out[at + k], out[at + k + 1], merges)
    while count > 1:
        best = 0
        for k in range(1, count - 1):
            if ahead[k] < ahead[best]:
                best = k
        if ahead[best] == _EMPTY:
            break
        out[at + best] = np.uint32(ahead[best] & np.uint64(0xFFFFFFFF))
        count -= 1
        for k in range(best + 1, count):
            out[at + k] = out[at + k + 1]
            ahead[k - 1] = ahead[k]
        if best > 0:
            ahead[best - 1] = _merge_of(out[at + best - 1], out[at + best], merges)
        if best < count - 1:
            ahead[best] = _merge_of(out[at + best], out[at + best + 1], merges)
    return count


@inline
def _kept(ids: Array, used: Array, length: Any, out: Array, at: Any, count: Any) -> Any:
    """Return the last word of a new row for a piece of `length` bytes with ids out[at : at + count]."""
    place = np.uint64(out[at])
    if count > 1:
        place = np.uint64(used[1])
        for k in range(count):
            ids[used[1] + k] = out[at + k]
        used[1] += count
    used[0] += 1
    return place << np.uint64(16) | np.uint64(count) << np.uint64(8) | np.uint64(length)


@jit
def fill_ids(
    data: Array, start: Any, kinds: Array, merges: Merges, memory: Memory, out: Array, ahead: Array
) -> tuple[Any, Any, int, Any]:
    """out ← ids of the UTF-8 from `start` on, as far as possible.

    Returns (position, number of ids, reason, position of the unknown character or end of the long piece).
    """
    rows, ids, used = memory
    mask = np.uint64(rows.shape[0] - 1)
    filled: Any = 0
    while start < data.size:
        end = _piece_end(data, start, kinds)
        length = end - start
        if end < 0:
            return start, filled, UNKNOWN_KIND, -1 - end
        if length > LONGEST_MERGED:
            return start, filled, LONG_PIECE, end
        if filled + length > out.size:
            return start, filled, OUT_FULL, 0
        if length > LONGEST_KEPT:
            filled += _merged(data, start, end, merges, out, filled, ahead)
            start = end
            continue
        a, b, c = _word_at(data, start, end), np.uint64(0), np.uint64(0)
        if length > 8:
            b = _word_at(data, start + 8, end)
        if length > 16:
            c = _word_at(data, start + 16, end)
        slot = _mixed(a + _mixed(b + _mixed(c + np.uint64(length)))) & mask
        while rows[slot, 3]:
            equal = rows[slot, 0] == a and rows[slot, 1] == b and rows[slot, 2] == c
            if equal and rows[slot, 3] & np.uint64(0xFF) == np.uint64(length):
                break
            slot = (slot + np.uint64(1)) & mask
        known = rows[slot, 3]
        if known:
            count: Any = np.int64(known >> np.uint64(8) & np.uint64(0xFF))
            place = np.int64(known >> np.uint64(16))
            if count == 1:
                out[filled] = np.uint32(place)
            else:
                for k in range(count):
                    out[filled + k] = ids[place + k]
        else:
            if used[0] >= FULL * rows.shape[0] or used[1] + length > ids.size:
                return start, filled, MEMORY_FULL, 0
            count = _merged(data, start, end, merges, out, filled, ahead)
            rows[slot, 0], rows[slot, 1], rows[slot, 2] = a, b, c
            rows[slot, 3] = _kept(ids, used, length, out, filled, count)
        filled += count
        start = end
    return start, filled, DONE, 0
