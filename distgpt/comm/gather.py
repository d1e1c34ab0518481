"""Bytes of every rank on every rank, for facts and verdicts; made of sums, so any communicator has it."""

from __future__ import annotations

import numpy as np

from distgpt.comm.api import Comm


def of_all_ranks(comm: Comm, value: int) -> list[int]:
    """A number of each rank, on all of them. Collective."""
    return [int(text) for text in gather_bytes(comm, str(value).encode())]


def gather_bytes(comm: Comm, data: bytes) -> list[bytes]:
    """What each rank passed, in the order of the ranks; of any length. Collective."""
    ends = np.zeros(comm.size, np.int64)
    ends[comm.rank :] = len(data)
    comm.sum(ends)
    everything = np.zeros(ends[-1], np.uint8)  # each byte is zero on all ranks but one, so no sum overflows
    begin = ends[comm.rank] - len(data)
    everything[begin : ends[comm.rank]] = np.frombuffer(data, np.uint8)
    comm.sum(everything)
    return [piece.tobytes() for piece in np.split(everything, ends[:-1])]
