"""Uneven shares of a micro-batch for --balance auto: more sequences on faster ranks."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import replace
from zlib import crc32

import numpy as np

from distgpt.core.base.formatting import count
from distgpt.core.comm.agree import gather_bytes, gather_ints, on_every_rank, on_root
from distgpt.core.comm.api import Comm
from distgpt.core.config import TrainConfig
from distgpt.core.model.model import Model
from distgpt.core.model.passes import Pass
from distgpt.core.ops.api import Kernels
from distgpt.core.saved.checkpoint import State
from distgpt.core.train.memory import SPARE, copy_bytes, needed
from distgpt.core.train.sharing import MicroBatches, Start, Strategy

TRIES = 3  # passes of each rank, of which the fastest counts, after one to warm up
LEAST_GAIN = 0.03  # of a step, that an uneven split has to bring


class Balanced(MicroBatches):
    """Each rank takes its own number of sequences, which weights its gradients in the mean over the ranks."""

    def __init__(self, config: TrainConfig, ranks: int, rank: int, shares: list[int], hosts: int = 0) -> None:
        """`shares`: sequences of each rank in a micro-batch, on hosts of this checksum."""
        super().__init__(config, ranks)
        self.shares: list[int] = shares
        self.hosts = hosts
        self.n_sequences = shares[rank]
        self.weight = self.n_sequences * ranks / config.batch_size

    def sequences_of(self, rank: int, i: int) -> slice:
        """Return the sequences of a rank, which follow those of the ranks before it."""
        start = i * sum(self.shares) + sum(self.shares[:rank])
        return slice(start, start + self.shares[rank])


def balanced(
    t: TrainConfig, ranks: int, rank: int, model: Model, start: Start, strategy: Strategy
) -> MicroBatches:
    """Return shares of a checkpoint that was written on the same hosts, or measured now. Collective."""
    hosts = hosts_checksum(start.comm, start.threads)
    shares, how = shares_so_far(start.state, t, ranks, hosts), "as before"
    if shares is None:
        shares, how = measured_shares(model, t, start.comm), "measured now"
    if not have_memory(start, model.kernels, shares, strategy):
        shares, how = even_shares(t, ranks), "as memory does not allow others"
    start.say(f"--balance auto: {described_shares(shares)}, {how}")
    return Balanced(t, ranks, rank, shares, hosts)


def even_shares(t: TrainConfig, ranks: int) -> list[int]:
    """Return the same number of sequences for each rank."""
    return [MicroBatches(t, ranks).n_sequences] * ranks


def shares_so_far(state: State, settings: TrainConfig, ranks: int, hosts: int) -> list[int] | None:
    """Return the sequences of each rank in a micro-batch so far; None if that cannot be so again."""
    known = state.shares or []
    is_same = state.ranks == len(known) == ranks and state.hosts == hosts
    return known if is_same and sum(known) * settings.grad_accum == settings.batch_size else None


def have_memory(start: Start, kernels: Kernels, shares: Sequence[int], strategy: Strategy) -> bool:
    """Return whether every rank has memory for its share of a micro-batch and for the rest. Collective."""
    comm, t = start.comm, start.config.train

    def fits() -> bool:
        rows = shares[comm.rank] * comm.size * t.grad_accum
        own = replace(start.config, train=replace(t, batch_size=rows))
        need = needed(own, kernels, strategy, start.is_evaluated)
        copied = copy_bytes(own, kernels, strategy.placement) if comm.rank == 0 and t.save == "async" else 0
        free, _ = start.free_memory()
        return need.total - need.weights - need.optimizer + copied <= SPARE * free

    return not comm.allreduce_max(not on_every_rank(comm, fits))


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
