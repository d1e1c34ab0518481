"""The ranks of a job as threads of one process, which meet at a barrier."""

import threading

import numpy as np

from distgpt.comm.serial import SerialComm
from distgpt.errors import DistgptError


class ThreadComm(SerialComm):
    def __init__(self, rank, size, meeting, shared):
        self.rank, self.size = self.local_rank, self.local_size = rank, size
        self.meeting, self.shared = meeting, shared

    def broadcast_bytes(self, data):
        assert (data is None) == (self.rank != 0)
        return self._all(data)[0]

    def broadcast(self, array):
        array[...] = self._all(array.copy())[0]

    def sum(self, array):
        array[...] = np.sum(self._all(array.copy()), axis=0)

    def largest(self, value):
        return max(self._all(value))

    def _all(self, mine):
        """What every rank brought, in order."""
        self.shared[self.rank] = mine
        self.meeting.wait()
        everything = [self.shared[rank] for rank in range(self.size)]
        self.meeting.wait()
        return everything


def on_all_ranks(size, act):
    """What act(comm) returned or raised on each rank."""
    meeting, shared, results = threading.Barrier(size, timeout=20), {}, [None] * size

    def run(rank):
        try:
            results[rank] = act(ThreadComm(rank, size, meeting, shared))
        except (DistgptError, threading.BrokenBarrierError) as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
