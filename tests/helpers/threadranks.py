"""Ranks of a job as threads that meet at a barrier."""

import threading

import numpy as np
from distgpt.core.base.errors import DistgptError
from distgpt.core.comm.api import SerialComm


class ThreadComm(SerialComm):
    """A rank as a thread, with `per_node` ranks per node."""

    def __init__(self, rank, size, meeting, shared, per_node=None):
        self.rank, self.size, self.cores = rank, size, 1.0
        self.local_size = per_node or size
        self.local_rank = rank % self.local_size
        self.meeting, self.shared = meeting, shared

    def broadcast_bytes(self, data):
        assert (data is None) == (self.rank != 0)
        return self._all(data)[0]

    def broadcast(self, array):
        array[...] = self._all(array.copy())[0]

    def sum(self, array):
        array[...] = np.sum(self._all(array.copy()), axis=0)

    def allreduce_max(self, value):
        return max(self._all(value))

    def all_to_all(self, received, sent, starts, counts):
        cut = [sent[start : start + count].copy() for start, count in zip(starts, counts, strict=True)]
        for rank, theirs in enumerate(self._all(cut)):
            received[rank, : counts[self.rank]] = theirs[self.rank]

    def all_gather(self, array, bounds):
        for rank, theirs in enumerate(self._all(array[bounds[self.rank] : bounds[self.rank + 1]].copy())):
            array[bounds[rank] : bounds[rank + 1]] = theirs

    def barrier(self, resting=False):
        self._all(None)

    def send(self, array, source, target):
        """Send, with all ranks taking part."""
        theirs = self._all(array.copy() if self.rank == source else None)[source]
        if self.rank == target:
            array[...] = theirs

    def split_by_node(self):
        if self.local_size in (1, self.size):
            return None
        return self._some(lambda rank: rank // self.local_size), self._some(lambda rank: rank % self.local_size)

    def _some(self, group):
        ranks = [rank for rank in range(self.size) if group(rank) == group(self.rank)]
        made = {group(self.rank): (threading.Barrier(len(ranks), timeout=20), {})} if self.rank == ranks[0] else {}
        groups = {key: each for found in self._all(made) for key, each in found.items()}
        return ThreadComm(ranks.index(self.rank), len(ranks), *groups[group(self.rank)])

    def _all(self, mine):
        self.shared[self.rank] = mine
        self.meeting.wait()
        everything = [self.shared[rank] for rank in range(self.size)]
        self.meeting.wait()
        return everything


def on_all_ranks(size, act, per_node=None, patience=20):
    """Return the result or error of act(comm) on each rank. Other exceptions, such as a failed assert, are raised."""
    meeting, shared, results, failures = threading.Barrier(size, timeout=patience), {}, [None] * size, []

    def run(rank):
        try:
            results[rank] = act(ThreadComm(rank, size, meeting, shared, per_node))
        except (DistgptError, threading.BrokenBarrierError) as error:
            results[rank] = error
        except BaseException as error:
            failures.append(error)
            meeting.abort()  # the other ranks would wait for this one

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in failures:
        raise error
    return results
