"""Uneven shares of a micro-batch for --balance auto: more sequences on faster ranks."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from zlib import crc32

import numpy as np

from distgpt.core.comm.agree import gather, gather_bytes
from distgpt.core.comm.api import Comm
from distgpt.core.config import TrainConfig
from distgpt.core.model.model import Model
from distgpt.core.model.passes import Pass
from distgpt.core.saved.checkpoint import State
from distgpt.core.train.parallel_strategy import MicroBatches, Start

TRIES = 3  # timed passes of each rank, after a warm-up; the fastest counts


class Balanced(MicroBatches):
    """Each rank has its own number of sequences, the weight of its gradients in the mean."""

    def __init__(self, config: TrainConfig, ranks: int, rank: int, shares: list[int], hosts: int = 0) -> None:
        """`shares`: sequences of each rank in a micro-batch. `hosts`: checksum of the hosts."""
        super().__init__(config, ranks)
        self.shares: list[int] = shares
        self.hosts = hosts
        self.n_sequences = shares[rank]
        self.weight = self.n_sequences * ranks / config.batch_size

    def sequences_of(self, rank: int, i: int) -> slice:
        """Return the sequences of a rank, in rank order."""
        start = i * sum(self.shares) + sum(self.shares[:rank])
        return slice(start, start + self.shares[rank])


def balanced(t: TrainConfig, ranks: int, rank: int, model: Model, start: Start) -> MicroBatches:
    """Return the shares in a checkpoint written on the same hosts, or measure them now. Collective."""
    hosts = hosts_checksum(start.comm, start.threads)
    shares, how = shares_so_far(start.state, t, ranks, hosts), "as before"
    if shares is None:
        shares, how = measured_shares(model, t, start.comm), "measured now"
    start.say(f"--balance auto: {min(shares)} to {max(shares)} sequences per micro-batch and rank, {how}")
    return Balanced(t, ranks, rank, shares, hosts)


def shares_so_far(state: State, settings: TrainConfig, ranks: int, hosts: int) -> list[int] | None:
    """Return the earlier number of sequences of each rank in a micro-batch; None if it no longer applies."""
    known = state.shares or []
    is_same = state.ranks == len(known) == ranks and state.hosts == hosts
    return known if is_same and sum(known) * settings.grad_accum == settings.batch_size else None


def measured_shares(model: Model, t: TrainConfig, comm: Comm) -> list[int]:
    """Return shares by each rank's time for an even share, measured on all ranks together. Collective."""
    even = MicroBatches(t, comm.size).n_sequences
    micros = gather(comm, max(1, round(1e6 * seconds_of(model, even, t, comm))))
    return shares_by(micros, even * comm.size)


def hosts_checksum(comm: Comm, threads: int | None) -> int:
    """Return a checksum of the ranks' hosts and threads, in rank order. Collective."""
    return crc32(b" ".join(gather_bytes(comm, f"{platform.node()}/{threads}".encode())))


def shares_by(seconds: Sequence[float], total: int) -> list[int]:
    """Split `total` sequences to minimize the slowest rank's time. Every rank gets at least one.

    `seconds` are per rank, for the same number of sequences.
    """
    shares = [1] * len(seconds)
    for _ in range(total - len(seconds)):  # the next one goes to the rank that would finish it first
        done = [(share + 1) * each for share, each in zip(shares, seconds, strict=True)]
        shares[done.index(min(done))] += 1
    return shares


def seconds_of(model: Model, rows: int, t: TrainConfig, comm: Comm) -> float:
    """Return the seconds of a forward and backward pass over `rows` sequences."""
    k, seq_len = model.kernels, model.config.seq_len
    work = Pass(model, rows, seq_len, training=True, recompute=t.recompute)
    tokens = k.integers(np.zeros(rows * seq_len))
    result = []
    for _ in range(1 + TRIES):
        comm.barrier()
        begun = time.perf_counter()
        work.loss_and_gradients(tokens, tokens, 1.0, accumulate=False)
        k.to_host(model.grads.flags)  # waits
        result.append(time.perf_counter() - begun)
    return min(result[1:])
