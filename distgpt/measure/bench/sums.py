"""Sums over ranks, timed by size and algorithm: the very calls that training makes."""

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
from distgpt.errors import DistgptError, UsageError
from distgpt.machine.stages import Stage
from distgpt.training.step import GRAD_SYNCS

ON_CPU = tuple(GRAD_SYNCS)
ON_GPU = ("nccl", "host", "host-chunked", "cuda-aware")
FEWEST = 3  # repetitions of a size
LATENCY_BOUND = 64 << 10  # arrays below this size take about as long as each other
COPIES = 3  # of an array: its own, what MPI keeps beside it, and what is staged
PERIOD = 251  # of the values in an array: a prime, so that shifted pieces are noticed
FLOAT = np.dtype(np.float32)  # the type that gradients are summed in


@dataclass(frozen=True, slots=True)
class Algorithm:
    """An algorithm. `fill` copies a host array into what `make` returns, `read` copies back."""

    make: Callable[[int], Array]
    fill: Callable[[Array, Any], None]
    sum: Callable[[Array], object]
    read: Callable[[Array], Any]
    wait: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """The sizes in order, and about how many seconds to take in all."""

    sizes: Sequence[int]
    repeats: int = 30
    seconds: float = 60.0


def algorithms(stage: Stage, wanted: Sequence[str]) -> tuple[dict[str, Algorithm], dict[str, str]]:
    """The stage's algorithms by name, and why others are not available. Collective."""
    if stage.comm.size < 2:
        raise shared(UsageError("bench allreduce needs at least 2 ranks: one rank has nothing to exchange"))
    known = ON_GPU if stage.device is not None else ON_CPU
    for name in wanted:
        if name not in known:
            raise shared(UsageError(f"--algorithms {name!r}: stage {stage.name} has {', '.join(known)}"))
    chosen = [name for name in known if not wanted or name in wanted]
    if stage.device is None:
        return {name: _on_host(stage.comm, name) for name in chosen}, {}
    return _on_devices(stage, chosen)


def _on_host(comm: Comm, name: str) -> Algorithm:
    return Algorithm(
        make=lambda count: np.zeros(count, FLOAT),
        fill=np.copyto,
        sum=partial(GRAD_SYNCS[name], comm),
        read=lambda array: array,
        wait=lambda: None,
    )


def _on_devices(stage: Stage, chosen: Sequence[str]) -> tuple[dict[str, Algorithm], dict[str, str]]:
    from distgpt.gpu.exchange import choose_exchange
    from distgpt.gpu.launching import address

    found: dict[str, Algorithm] = {}
    reasons: dict[str, str] = {}
    device = stage.device
    for name in chosen:
        try:
            kind = name.removesuffix("-chunked")
            way = choose_exchange(kind, stage.comm, device, device.stream.ptr, address, stage.sharing)
        except UsageError as error:  # on all ranks at once
            reasons[name] = str(error)
            continue
        found[name] = Algorithm(
            make=lambda count: device.zeros((count,), FLOAT),
            fill=device.upload,
            sum=partial(way.sum, chunked=name.endswith("-chunked")),
            read=device.download,
            wait=device.synchronize,
        )
    return found, reasons


def measure(stage: Stage, table: Mapping[str, Algorithm], plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield a row for each size and algorithm. Collective.

    A size that does not fit into memory, or into the time that is left, has `left_out` in its row, and no
    seconds. The first one is always measured.
    """
    comm, begun = stage.comm, time.monotonic()
    most = -comm.largest(-min(stage.free_memory()[0] // COPIES, 1 << 62))
    last: dict[str, tuple[int, float]] = {}  # by algorithm, the size before, and its seconds
    left = len(plan.sizes) * len(table)
    for size in plan.sizes:
        for name, algorithm in table.items():
            remaining = max(0.0, plan.seconds - comm.largest(int(1000 * (time.monotonic() - begun))) / 1000)
            before, once = last.get(name, (size, 0.0))
            expected = once * max(size, LATENCY_BOUND) / max(before, LATENCY_BOUND) * (FEWEST + 1)
            if size > most or expected > remaining:
                lack = "memory" if size > most else "time"
                yield {"algorithm": name, "bytes": size, "left_out": lack}
            else:
                row = _row(comm, algorithm, size, plan.repeats, remaining / left)
                last[name] = size, row["seconds"]
                yield {"algorithm": name, **row}
            left -= 1


def _row(comm: Comm, algorithm: Algorithm, size: int, repeats: int, seconds: float) -> dict[str, Any]:
    """Time one size about `seconds` long: each sum from when all ranks begin to when the slowest is done."""
    count = max(1, size // FLOAT.itemsize)
    array, pattern = algorithm.make(count), np.resize(np.arange(PERIOD, dtype=FLOAT), count)
    pattern += comm.rank
    warm_up = max(_once(comm, algorithm, array, pattern) for _ in range(2))
    _check(comm, algorithm, array)
    once = comm.largest(int(1e9 * warm_up)) / 1e9
    often = max(FEWEST, min(repeats, int(seconds / max(once, 1e-9))))
    own = np.array([_once(comm, algorithm, array, pattern) for _ in range(often)])
    _check(comm, algorithm, array)
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


def _once(comm: Comm, algorithm: Algorithm, array: Array, values: Any) -> float:
    algorithm.fill(array, values)
    algorithm.wait()
    comm.barrier()
    begun = time.perf_counter()
    algorithm.sum(array)
    algorithm.wait()
    return time.perf_counter() - begun


def _check(comm: Comm, algorithm: Algorithm, array: Array) -> None:
    """Check the sums, which are of small whole numbers and so exact in any order."""
    found = algorithm.read(array)
    ranks = comm.size
    expected = np.arange(PERIOD, dtype=FLOAT) * ranks + ranks * (ranks - 1) // 2
    whole = len(found) // PERIOD * PERIOD
    right = (found[:whole].reshape(-1, PERIOD) == expected).all()
    right = right and (found[whole:] == expected[: len(found) - whole]).all()
    if comm.largest(int(not right)):
        raise shared(DistgptError(f"a sum of {array.nbytes:,} bytes over {ranks} ranks is wrong"))


def measure_all(
    stage: Stage, wanted: Sequence[str], plan: Plan, report: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Measure everything; `report` is called with each row, on rank 0. Collective."""
    from distgpt.comm.mpi import library

    table, reasons = algorithms(stage, wanted)
    if not table:
        raise shared(UsageError("; ".join(reasons.values())))
    rows: list[dict[str, Any]] = []
    lacking: list[dict[str, Any]] = []
    for row in measure(stage, table, plan):
        (lacking if "left_out" in row else rows).append(row)
        if stage.comm.rank == 0:
            report(row)
    if not rows:
        raise shared(UsageError("not even the smallest array fits into memory"))
    return {
        "stage": stage.name,
        "ranks": stage.comm.size,
        **_places(stage.comm),
        "library": " ".join(library().split()),
        "rows": sorted(rows, key=lambda row: int(row["bytes"])),
        "not_measured": sorted(lacking, key=lambda row: int(row["bytes"])),
        "left_out": reasons,
    }


def _places(comm: Comm) -> dict[str, Any]:
    """Hosts, most ranks on one of them, and fewest cores for a rank. Collective."""
    return {
        "nodes": sum(gather_ints(comm, int(comm.local_rank == 0))),
        "ranks_per_node": comm.largest(comm.local_size),
        "cores_per_rank": min(gather_ints(comm, round(1000 * comm.cores))) / 1000,
    }
