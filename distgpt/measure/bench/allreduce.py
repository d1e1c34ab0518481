"""`distgpt bench allreduce`: time the sums over ranks that training uses, by size and algorithm."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from distgpt.cluster.jobs.launchers import find_launcher
from distgpt.cluster.launch.environment import launched_as
from distgpt.core.base.errors import DistgptError, UsageError
from distgpt.core.base.formatting import count, duration, parse_size
from distgpt.core.base.formatting import size as in_bytes
from distgpt.core.comm.agree import collective_error, gather, gather_bytes, on_every_rank, on_root
from distgpt.core.comm.api import Array, Comm
from distgpt.core.config import GpuConfig
from distgpt.core.cpu.stages import Stage, open_stage
from distgpt.core.train.parallel_strategy import Allreduce
from distgpt.measure.jobs import BenchOptions, Row, ask, say
from distgpt.parallel.node_memory import SharedSum, one_by_one, shared_rows
from distgpt.parallel.reductions import Hierarchical
from distgpt.show.page import Block, Column, tabulated

SIZES = [8 * 4**i for i in range(20)]  # bytes
ONE_CALL, SHARED, BY_NODE = "allreduce", "shared memory", "hierarchical"  # names in summary.json
ON_GPU = ("nccl", "host")
FEWEST = 3  # repetitions of a size
COPIES = 3  # copies of an array: the array, MPI's buffer, the staging copy
PERIOD = 251  # period of an array's values; a prime, to detect shifted pieces
FLOAT = np.dtype(np.float32)  # the dtype in which gradients are summed
ALONE = "bench allreduce requires at least 2 ranks"


@dataclass(frozen=True, slots=True)
class AllreduceOptions(BenchOptions):
    """Options of the command. `measure_only`: print the result as JSON and save nothing."""

    stage: str = "mpi"
    sizes: str | None = None
    max_bytes: str = "256M"
    algorithms: str | None = None
    repeats: int = 30
    seconds: float = 60.0
    measure_only: bool = False

    def array_sizes(self) -> list[int]:
        """Return the sizes to measure, in order."""
        if self.sizes:
            return list(dict.fromkeys(array_size("--sizes", word) for word in self.sizes.split(",")))
        largest = array_size("--max-bytes", self.max_bytes)
        return [*(size for size in SIZES if size < largest), largest]


def array_size(flag: str, text: str) -> int:
    """Parse a size, such as "64K", in bytes. Gradients have elements of 4 bytes."""
    try:
        result = parse_size(text)
    except UsageError as error:
        raise UsageError(f"{flag}: {error}") from None
    if result < 4 or result % 4 or result > 1 << 40:
        raise UsageError(f"{flag} {text!r} must be a multiple of 4 bytes, at most 1024G")
    return result


def bench(options: AllreduceOptions) -> None:
    """Measure with the ranks of this launch, or start ranks."""
    options.array_sizes()  # rejects invalid sizes
    if launched_as() > 1:
        # Use the host, which always works; `algorithms` opens the other transports later.
        on_gpu = GpuConfig(allreduce="host") if options.stage == "mpi-cuda" else None
        stage = open_stage(options.stage, None, on_gpu)
        if not options.measure_only:
            on_root(stage.comm, options.prepare)
        result = measure_all(stage, options)
        if stage.comm.rank:
            return
    else:
        if options.ranks < 2:
            raise UsageError(ALONE)
        options.prepare()
        result = start(options)
    if options.measure_only:
        print(json.dumps(result))
    else:
        options.finish("allreduce", f"{result['stage']}-{result['ranks']}", result, blocks(result))


def start(options: AllreduceOptions) -> Row:
    words = ["bench", "allreduce", "--measure-only"]
    for key in ("stage", "max_bytes", "repeats", "seconds", "sizes", "algorithms"):
        value = getattr(options, key)
        words += [f"--{key.replace('_', '-')}", value] if value else []
    what = f"bench allreduce on {count(options.ranks, 'rank')}"
    say(f"{what}: about {duration(options.seconds)} at most")
    return ask(what, words, find_launcher(options.launcher, options.hostfile), options.ranks)


# -- measuring


# Arrays of this process, with the interface of a GPU device.
HOST = SimpleNamespace(zeros=np.zeros, upload=np.copyto, download=np.asarray, synchronize=lambda: None)

Sum = Callable[[Array], object]


def algorithms(stage: Stage, names: str | None) -> tuple[dict[str, Sum], dict[str, str]]:
    """Return the stage's algorithms by name, and why others are not available. Collective."""
    comm = stage.comm
    if comm.size < 2:
        raise collective_error(UsageError(ALONE))
    known: tuple[str, ...] = ON_GPU if stage.on_gpu else (ONE_CALL,)
    if not stage.on_gpu and (comm.size == comm.local_size or comm.split_by_node()):
        known += (SHARED,) if comm.size == comm.local_size else (BY_NODE,)
    wanted = [word.strip() for word in names.split(",")] if names else known
    for name in wanted:
        if name not in known:
            raise collective_error(UsageError(f"--algorithms {name!r} is not one of {', '.join(known)}"))
    result: dict[str, Sum] = {}
    reasons: dict[str, str] = {}
    for name in known:
        if name in wanted:
            try:
                result[name] = _algorithm(stage, name)
            except UsageError as error:  # raised on all ranks
                reasons[name] = str(error)
    return result, reasons


def _algorithm(stage: Stage, name: str) -> Sum:
    if not stage.on_gpu:
        return stage.comm.sum if name == ONE_CALL else InNodeMemory(stage.comm)
    from distgpt.gpu.stage import GpuStage
    from distgpt.gpu.transport import choose_transport

    assert isinstance(stage, GpuStage)
    return choose_transport(name, stage.comm, stage.device).sum


class InNodeMemory:
    """Sums arrays in shared memory of each node, then over nodes."""

    def __init__(self, comm: Comm) -> None:
        """Raise a UsageError if the ranks of a node share no memory. Collective."""
        self._comm, self._node = comm, comm
        self._peers: Comm | None = None
        if levels := comm.split_by_node():
            self._node, self._peers = levels
        on_every_rank(comm, lambda: shared_rows(self._node, 1, FLOAT))

    def zeros(self, shape: tuple[int], dtype: np.dtype) -> Array:
        """Return an array, the only one that can be summed from now on. Collective.

        Raises a UsageError on all ranks if a node has too little shared memory.
        """
        rows = on_every_rank(self._comm, lambda: shared_rows(self._node, shape[0], dtype))
        array = rows[self._node.rank, : shape[0]]
        within = SharedSum(self._node, rows, one_by_one, 1)
        peers = self._peers
        self._way = Hierarchical(self._node, within, Allreduce(peers, array)) if peers else within
        return array

    def __call__(self, array: Array) -> None:
        self._way.sum(0, array.size, 0)


def measure_all(stage: Stage, options: AllreduceOptions) -> Row:
    """Measure everything. Collective."""
    from distgpt.core.comm.mpi import library

    comm = stage.comm
    table, reasons = algorithms(stage, options.algorithms)
    if not table:
        raise collective_error(UsageError("; ".join(reasons.values())))
    every = sorted(measure(stage, table, options), key=lambda row: int(row["bytes"]))
    rows = [row for row in every if "left_out" not in row]
    if not rows:
        raise collective_error(UsageError("the smallest array does not fit into memory"))
    return {
        "stage": stage.name,
        "ranks": comm.size,
        "nodes": sum(gather(comm, int(comm.local_rank == 0))),
        "ranks_per_node": comm.allreduce_max(comm.local_size),
        "cores_per_rank": min(gather(comm, round(1000 * comm.cores))) / 1000,
        "library": library(),
        "rows": rows,
        "not_measured": [row for row in every if "left_out" in row],
        "left_out": reasons,
    }


def measure(stage: Stage, table: Mapping[str, Sum], options: AllreduceOptions) -> Iterator[Row]:
    """Yield a row for each size and algorithm. The first one is always measured. Collective.

    If memory or time are too short for a size, its row has `left_out` instead of seconds.
    """
    for add_up in table.values():  # compiles loops, which would use the time of larger sizes
        with suppress(UsageError):  # raised on all ranks
            _row(stage, add_up, options.array_sizes()[0], 1, 0.0)
    comm, begun = stage.comm, time.monotonic()
    most = -comm.allreduce_max(-min(stage.free_memory()[0] // COPIES, 1 << 62))
    to_do = [(size, name) for size in options.array_sizes() for name in table]
    for done, (size, name) in enumerate(to_do):
        passed = comm.allreduce_max(int(1000 * (time.monotonic() - begun))) / 1000
        remaining = max(0.0, options.seconds - passed)
        row: Row = {"bytes": size, "left_out": "memory" if size > most else "time"}
        if size <= most and (remaining or not done):
            try:
                row = _row(stage, table[name], size, options.repeats, remaining / (len(to_do) - done))
            except UsageError:  # raised on all ranks if a node has too little shared memory
                row["left_out"] = "memory"
        yield {"algorithm": name, **row}


def _row(stage: Stage, add_up: Sum, size: int, repeats: int, seconds: float) -> Row:
    """Time one size for about `seconds`. A sum lasts from when all ranks start until the slowest is done."""
    comm = stage.comm
    device: Any = stage.device if stage.on_gpu else HOST  # type: ignore[attr-defined]  # of a GpuStage
    count = size // FLOAT.itemsize
    zeros = add_up.zeros if isinstance(add_up, InNodeMemory) else device.zeros
    array, pattern = zeros((count,), FLOAT), np.resize(np.arange(PERIOD, dtype=FLOAT), count)
    pattern += comm.rank

    def once() -> float:
        device.upload(array, pattern)
        device.synchronize()
        comm.barrier()
        begun = time.perf_counter()
        add_up(array)
        device.synchronize()
        return time.perf_counter() - begun

    warm_up = max(once() for _ in range(2))
    _check(comm, device.download(array))
    slow = comm.allreduce_max(int(1e9 * warm_up)) / 1e9
    often = max(FEWEST, min(repeats, int(seconds / max(slow, 1e-9))))
    own = np.array([once() for _ in range(often)])
    _check(comm, device.download(array))
    slowest = np.max([np.frombuffer(each) for each in gather_bytes(comm, own.tobytes())], axis=0).tolist()
    median = statistics.median(slowest)
    return {
        "bytes": size,
        "seconds": median,
        "min_seconds": min(slowest),
        "bytes_per_s": size / median,
        "bus_bytes_per_s": 2 * (comm.size - 1) / comm.size * size / median,
        "repeats": often,
    }


def _check(comm: Comm, found: Any) -> None:
    """Check the sums. They are of small integers, so they are exact in any order."""
    ranks, whole = comm.size, len(found) // PERIOD * PERIOD
    expected = np.arange(PERIOD, dtype=FLOAT) * ranks + ranks * (ranks - 1) // 2
    right = (found[:whole].reshape(-1, PERIOD) == expected).all()
    right = right and (found[whole:] == expected[: len(found) - whole]).all()
    if comm.allreduce_max(int(not right)):
        raise collective_error(DistgptError(f"a sum of {found.nbytes:,} bytes over {ranks} ranks is wrong"))


# -- showing


COLUMNS: tuple[Column, ...] = (
    ("array", "bytes", in_bytes),
    ("algorithm", "algorithm", str),
    ("median", "seconds", duration),
    ("fastest", "min_seconds", duration),
    ("GB/s", "bytes_per_s", lambda rate: f"{rate / 1e9:.3g}"),
    ("bus GB/s", "bus_bytes_per_s", lambda rate: f"{rate / 1e9:.3g}"),
)


def blocks(found: Row) -> list[Block]:
    where = "on one machine" if found["nodes"] == 1 else f"on {found['nodes']} hosts"
    heading = f"{count(found['ranks'], 'rank')} {where}, {found['library']}"
    return [tabulated(COLUMNS, found["rows"], heading), *left_out(found)]


def left_out(found: Row) -> list[str]:
    """List the unavailable algorithms and the sizes that were not measured, with the reasons."""
    sizes: dict[tuple[str, str], list[str]] = {}
    for row in found["not_measured"]:
        sizes.setdefault((row["algorithm"], row["left_out"]), []).append(in_bytes(row["bytes"]))
    return [f"{name} skipped: {reason}" for name, reason in found["left_out"].items()] + [
        f"{name} not measured, because there is not enough {lack}: {', '.join(several)}"
        for (name, lack), several in sizes.items()
    ]
