"""Shares of a micro-batch for --balance auto: more sequences on faster ranks."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from zlib import crc32

import numpy as np

from distgpt.comm.agree import gather_bytes, gather_ints, on_root
from distgpt.comm.api import Comm
from distgpt.config import TrainConfig
from distgpt.formatting import count
from distgpt.model.model import Model
from distgpt.model.passes import Pass
from distgpt.training.step import even_shares

TRIES = 3  # passes of each rank, of which the fastest counts, after one to warm up
LEAST_GAIN = 0.03  # of a step, that an uneven split has to bring


def measured_shares(model: Model, t: TrainConfig, comm: Comm) -> list[int]:
    """Return shares by the time that each rank takes while all of them have an even share. Collective."""
    even = even_shares(t, comm.size)
    micros = gather_ints(comm, max(1, round(1e6 * _seconds(model, even[0], t, comm))))
    found: list[int] = on_root(comm, lambda: shares_by(micros, sum(even)))
    return found


def hosts_checksum(comm: Comm, threads: int | None) -> int:
    """Return a checksum of the ranks' hosts and threads, in their order. Collective."""
    return crc32(b" ".join(gather_bytes(comm, f"{platform.node()}/{threads}".encode())))


def shares_by(seconds: Sequence[float], total: int) -> list[int]:
    """Split `total` sequences so that the slowest rank is done early; evenly if that hardly helps.

    `seconds`: of each rank, for the same number of sequences. Every rank takes one at least.
    """
    shares = [1] * len(seconds)
    for _ in range(total - len(seconds)):  # the next one to whoever would be done with it first
        done = [(share + 1) * each for share, each in zip(shares, seconds, strict=True)]
        shares[done.index(min(done))] += 1
    even = [total // len(seconds)] * len(seconds)
    took, takes = (max(np.multiply(split, seconds)) for split in (even, shares))
    return shares if takes < (1 - LEAST_GAIN) * took else even


def described_shares(shares: Sequence[int]) -> str:
    least, most = min(shares), max(shares)
    if least == most:
        return f"{count(most, 'sequence')} of a micro-batch on every rank"
    fast, slow = shares.index(most), shares.index(least)
    return (
        f"of a micro-batch of {sum(shares)} sequences {most} on rank {fast}, down to {least} on rank {slow}"
    )


def _seconds(model: Model, rows: int, t: TrainConfig, comm: Comm) -> float:
    """Return the seconds of a forward and backward pass over this many sequences."""
    k, seq_len = model.kernels, model.config.seq_len
    work = Pass(model, rows, seq_len, training=True, recompute=t.recompute)
    tokens = k.integers(np.zeros(rows * seq_len))
    found = []
    for _ in range(1 + TRIES):
        comm.barrier()
        begun = time.perf_counter()
        work.loss_and_gradients(tokens, tokens, 1.0, accumulate=False)
        k.to_host(model.grads.flags)  # waits
        found.append(time.perf_counter() - begun)
    return min(found[1:])
