"""Check NCCL's calls between ranks that share one GPU, with known sums. Does not measure speed.

    mpirun -n 2 python benchmarks/nccl_on_one_gpu.py [--quick]

Makes each call of `transport.Nccl` with odd sizes, fewer elements than ranks, and more than NCCL's buffer.
Exit code 1: a result was wrong. `--quick`: fewer and smaller sizes.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from distgpt.core.comm.mpi import MpiComm
from distgpt.core.config import GpuConfig
from distgpt.gpu.stage import device_of, open_device
from distgpt.gpu.transport import SHARED_GPU, Nccl, choose_transport, nccl_module, sharing

SIZES = (1, 2, 1000, (64 << 10) + 3, 3_000_001)
QUICK = (1, 2, 1003)
TIMED = 11_000_000  # elements of float32: the gradients of gpt-mini
MODULUS = 251  # values of 0 to 250, whose sums over a few ranks are exact in every type

Bounds = list[int]


class Checks:
    """The calls of one rank and their errors."""

    def __init__(self, way: Nccl, device: Any, rank: int, size: int) -> None:
        self.way, self.device, self.rank, self.size = way, device, rank, size
        self.made, self.wrong = 0, 0

    def expect(self, what: str, found: Any, wanted: Any) -> None:
        self.made += 1
        if not np.array_equal(found, wanted):
            self.wrong += 1
            print(f"rank {self.rank}: WRONG {what}", flush=True)

    def put(self, values: Any) -> Any:
        array = self.device.zeros(values.shape, values.dtype)
        self.device.upload(array, values)
        return array

    def bounds(self, n: int) -> Iterator[Bounds]:
        """Return equal parts with a smaller last one, and parts of any length, some of them empty."""
        yield [*(n // self.size * rank for rank in range(self.size)), n]
        yield [0, *sorted((7 * rank * n // 11) % n for rank in range(1, self.size)), n]

    def sums(self, n: int, kind: Any) -> None:
        """Return Σ over ranks r of (i mod 251) + r = size·(i mod 251) + size·(size − 1)/2."""
        own = (np.arange(n) % MODULUS + self.rank).astype(kind)
        total = (self.size * (np.arange(n) % MODULUS) + self.size * (self.size - 1) // 2).astype(kind)
        what = f"{n} {np.dtype(kind).name}"
        array = self.put(own)
        self.way.sum(array)
        self.expect(f"sum {what}", self.device.download(array), total)
        array = self.put(own)
        self.way.on_side_stream(lambda: self.way.sum(array))
        self.way.join()
        self.expect(f"sum on the side stream {what}", self.device.download(array), total)
        array = self.put(own)
        self.way.broadcast(array)
        self.expect(f"broadcast {what}", self.device.download(array), (np.arange(n) % MODULUS).astype(kind))
        for bounds in self.bounds(n):
            mine, array = slice(*bounds[self.rank : self.rank + 2]), self.put(own)
            self.way.reduce(array, bounds)
            self.expect(f"reduce {what} {bounds}", self.device.download(array)[mine], total[mine])

    def moves(self, n: int, kind: Any) -> None:
        whole, what = (np.arange(n) % MODULUS).astype(kind), f"{n} {np.dtype(kind).name}"
        for bounds in self.bounds(n):
            mine, own = slice(*bounds[self.rank : self.rank + 2]), np.zeros(n, kind)
            own[mine] = whole[mine]
            array = self.put(own)
            self.way.all_gather(array, bounds)
            self.expect(f"all_gather {what} {bounds}", self.device.download(array), whole)
            counts = [stop - start for start, stop in pairwise(bounds)]
            sent = self.put((np.arange(n) % MODULUS + self.rank).astype(kind))
            received = self.device.zeros((self.size, max(1, n)), np.dtype(kind))
            self.way.all_to_all(received, sent, bounds[:-1], counts)
            found = self.device.download(received)
            for other in range(self.size):
                wanted = (np.arange(n) % MODULUS + other).astype(kind)[mine]
                self.expect(f"all_to_all {what} {bounds}", found[other, : counts[self.rank]], wanted)


def main() -> int:
    parser = argparse.ArgumentParser(description="Check NCCL's calls between ranks that share a GPU.")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller arrays")
    quick = parser.parse_args().quick
    os.environ[SHARED_GPU] = "1"
    comm, began = MpiComm(), time.perf_counter()
    device = open_device(device_of(comm.local_rank, 1), GpuConfig())
    device.sharing = sharing(comm, device)
    way = choose_transport("nccl", comm, device)
    assert isinstance(way, Nccl)
    if comm.rank == 0:
        print(f"NCCL {nccl_module().get_version()}, {comm.size} ranks, ready after", end=" ")
        print(f"{time.perf_counter() - began:.1f} s", flush=True)
    checks = Checks(way, device, comm.rank, comm.size)
    for n in QUICK if quick else SIZES:
        for kind in (np.float32, np.float64):
            checks.sums(n, kind)
        for kind in (np.float32, np.uint16):
            checks.moves(n, kind)
    large = checks.put(np.ones(1 << 12 if quick else TIMED, np.float32))
    comm.barrier()
    for _ in range(2):  # warm-up
        device.synchronize()
        began = time.perf_counter()
        way.sum(large)
        device.synchronize()
        took = time.perf_counter() - began
    wrong = comm.allreduce_max(checks.wrong)
    if comm.rank == 0:
        print(f"a sum of {large.nbytes / 1e6:.3g} MB: {took * 1e3:.1f} ms;", end=" ")
        print(f"trouble: {way.trouble() or 'none'}")
        print(f"{checks.made} results a rank: " + (f"{wrong} WRONG" if wrong else "all right"), flush=True)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
