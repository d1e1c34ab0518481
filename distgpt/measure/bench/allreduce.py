"""Sums over ranks, timed by size and by the way they take: the very calls that training makes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from distgpt.comm.agree import gather_bytes, gather_ints, shared
from distgpt.comm.api import Array, Comm
from distgpt.config import GpuConfig
from distgpt.errors import DistgptError, UsageError
from distgpt.machine.stages import Stage
from distgpt.training.step import GRAD_SYNCS

ON_CPU = tuple(GRAD_SYNCS)
ON_GPU = ("nccl", "host", "host-chunked", "cuda-aware")
FEWEST, MOST = 3, 30  # repetitions of a size
FIRST_SIZE, STEP, LARGEST = 8, 4, 256 << 20  # bytes, and the factor between sizes
LATENCY_BOUND = 64 << 10  # arrays below this size take about as long as each other
COPIES = 3  # of an array: its own, what MPI keeps beside it, and what is staged
PERIOD = 251  # of the numbers in an array: a prime, so that shifted pieces are noticed
FLOAT = np.dtype(np.float32)  # what gradients are summed in


@dataclass(frozen=True, slots=True)
class Way:
    """A way to sum arrays. `fill` writes what a host array holds, `read` gives it back."""

    make: Callable[[int], Array]
    fill: Callable[[Array, Any], None]
    sum: Callable[[Array], object]
    read: Callable[[Array], Any]
    wait: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure, in this order, in about how many seconds altogether."""

    sizes: Sequence[int]
    repeats: int = MOST
    seconds: float = 60.0


def sizes_up_to(largest: int) -> list[int]:
    """8 bytes and on by factors of 4, and the largest itself."""
    sizes = [FIRST_SIZE]
    while sizes[-1] * STEP <= largest:
        sizes.append(sizes[-1] * STEP)
    return sizes if sizes[-1] == largest or largest < FIRST_SIZE else [*sizes, largest // 4 * 4]


def ways(stage: Stage, wanted: Sequence[str]) -> tuple[dict[str, Way], dict[str, str]]:
    """Those of the stage, by name, and of those that cannot be had the reason. Collective."""
    if stage.comm.size < 2:
        raise shared(UsageError("bench allreduce needs at least 2 ranks: one has nobody to exchange with"))
    known = ON_GPU if stage.device is not None else ON_CPU
    for name in wanted:
        if name not in known:
            raise shared(UsageError(f"--algorithms {name!r}: stage {stage.name} has {', '.join(known)}"))
    chosen = [name for name in known if not wanted or name in wanted]
    if stage.device is None:
        return {name: _on_host(stage.comm, name) for name in chosen}, {}
    return _on_devices(stage, chosen)


def _on_host(comm: Comm, name: str) -> Way:
    return Way(
        make=lambda count: np.zeros(count, FLOAT),
        fill=np.copyto,
        sum=partial(GRAD_SYNCS[name], comm),
        read=lambda array: array,
        wait=lambda: None,
    )


def _on_devices(stage: Stage, chosen: Sequence[str]) -> tuple[dict[str, Way], dict[str, str]]:
    from distgpt.gpu.exchange import choose_exchange
    from distgpt.gpu.launching import address

    found: dict[str, Way] = {}
    reasons: dict[str, str] = {}
    device = stage.device
    for name in chosen:
        try:
            kind = name.removesuffix("-chunked")
            way = choose_exchange(kind, stage.comm, device, device.stream.ptr, address, stage.sharing)
        except UsageError as error:  # on all ranks at once
            reasons[name] = str(error)
            continue
        found[name] = Way(
            make=lambda count: device.zeros((count,), FLOAT),
            fill=device.upload,
            sum=partial(way.sum, chunked=name.endswith("-chunked")),
            read=device.download,
            wait=device.synchronize,
        )
    return found, reasons


def measure(stage: Stage, table: Mapping[str, Way], plan: Plan) -> Iterator[dict[str, Any]]:
    """A row for each size and way, as they are found. Collective.

    A size that does not fit into memory, or into the time that is left, has `left_out` in its row, and no
    seconds. The first one is always given its time.
    """
    comm, begun = stage.comm, time.monotonic()
    most = -comm.largest(-min(stage.free_memory()[0] // COPIES, 1 << 62))
    last: dict[str, tuple[int, float]] = {}  # by way, the size before, and its seconds
    left = len(plan.sizes) * len(table)
    for size in plan.sizes:
        for name, way in table.items():
            remaining = plan.seconds - comm.largest(int(1000 * (time.monotonic() - begun))) / 1000
            before, once = last.get(name, (size, 0.0))
            expected = once * max(size, LATENCY_BOUND) / max(before, LATENCY_BOUND) * (FEWEST + 1)
            if size > most or expected > remaining:
                lack = "memory" if size > most else "time"
                yield {"algorithm": name, "bytes": size, "left_out": lack}
            else:
                row = _row(comm, way, size, plan.repeats, max(remaining, 0.0) / left)
                last[name] = size, row["seconds"]
                yield {"algorithm": name, **row}
            left -= 1


def _row(comm: Comm, way: Way, size: int, repeats: int, seconds: float) -> dict[str, Any]:
    """One size, one way: as often as `seconds` allow, each time from all ranks at once to the slowest."""
    count = max(1, size // FLOAT.itemsize)
    array, pattern = way.make(count), np.resize(np.arange(PERIOD, dtype=FLOAT), count)
    pattern += comm.rank
    warm_up = max(_once(comm, way, array, pattern) for _ in range(2))
    _check(comm, way, array)
    once = comm.largest(int(1e9 * warm_up)) / 1e9
    often = max(FEWEST, min(repeats, int(seconds / max(once, 1e-9))))
    own = np.array([_once(comm, way, array, pattern) for _ in range(often)])
    _check(comm, way, array)
    slowest = np.max([np.frombuffer(each) for each in gather_bytes(comm, own.tobytes())], axis=0).tolist()
    median = statistics.median(slowest)
    return {
        "bytes": count * FLOAT.itemsize,
        "seconds": median,
        "min_seconds": min(slowest),
        "bytes_per_s": count * FLOAT.itemsize / median,
        "bus_bytes_per_s": 2 * (comm.size - 1) / comm.size * count * FLOAT.itemsize / median,
        "repeats": often,
    }


def _once(comm: Comm, way: Way, array: Array, numbers: Any) -> float:
    way.fill(array, numbers)
    way.wait()
    comm.barrier()
    begun = time.perf_counter()
    way.sum(array)
    way.wait()
    return time.perf_counter() - begun


def _check(comm: Comm, way: Way, array: Array) -> None:
    """Small whole numbers, whose sums are exact in any order."""
    found = way.read(array)
    ranks = comm.size
    expected = np.arange(PERIOD, dtype=FLOAT) * ranks + ranks * (ranks - 1) // 2
    whole = len(found) // PERIOD * PERIOD
    right = (found[:whole].reshape(-1, PERIOD) == expected).all()
    right = right and (found[whole:] == expected[: len(found) - whole]).all()
    if comm.largest(int(not right)):
        raise shared(DistgptError(f"a sum of {array.nbytes:,} bytes over {ranks} ranks came out wrong"))


def allreduce(
    stage: Stage, wanted: Sequence[str], plan: Plan, hear: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """All of it, as it goes into a file; `hear` is told each row on rank 0. Collective."""
    table, reasons = ways(stage, wanted)
    if not table:
        raise shared(UsageError("; ".join(reasons.values())))
    rows: list[dict[str, Any]] = []
    lacking: list[dict[str, Any]] = []
    for row in measure(stage, table, plan):
        (lacking if "left_out" in row else rows).append(row)
        if stage.comm.rank == 0:
            hear(row)
    if not rows:
        raise shared(UsageError("not even the smallest array fits into memory"))
    return {
        "stage": stage.name,
        "ranks": stage.comm.size,
        **_places(stage.comm),
        "library": _library(),
        "rows": sorted(rows, key=lambda row: int(row["bytes"])),
        "not_measured": sorted(lacking, key=lambda row: int(row["bytes"])),
        "left_out": reasons,
    }


def _places(comm: Comm) -> dict[str, Any]:
    """Hosts need not have the same number of ranks: the fullest and the most crowded count. Collective."""
    return {
        "nodes": sum(gather_ints(comm, int(comm.local_rank == 0))),
        "ranks_per_node": comm.largest(comm.local_size),
        "cores_per_rank": min(gather_ints(comm, round(1000 * comm.cores))) / 1000,
    }


def _library() -> str:
    from distgpt.comm.mpi import library

    return " ".join(library().split())


def gpu_config() -> GpuConfig:
    """Through the host: it works everywhere, and the others are opened one by one."""
    return GpuConfig(allreduce="host")
