"""A profile's steps as a timeline, in the trace event format that Perfetto and chrome://tracing read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from distgpt.measure.profile.accounting import NOBODY, Lane
from distgpt.measure.profile.operations import ORDER, WORKERS
from distgpt.measure.profile.profiler import Traced

STEPS = 0  # the thread that shows the steps; the workers come after it
SHORTEST_WAIT = 1e-6

Event = dict[str, Any]


def events(rank: int, steps: Sequence[Traced], on_gpu: bool) -> list[Event]:
    """Of one rank: a process, with a thread for each worker."""
    workers = max((len(step.account.lanes) for step in steps), default=1)
    names = {STEPS: "steps"} | {
        1 + worker: "GPU" if on_gpu else f"worker {worker}" for worker in range(workers)
    }
    found = [_metadata("process_name", rank, STEPS, {"name": f"rank {rank}"})]
    found += [_metadata("process_sort_index", rank, STEPS, {"sort_index": rank})]
    for thread, name in names.items():
        found.append(_metadata("thread_name", rank, thread, {"name": name}))
        found.append(_metadata("thread_sort_index", rank, thread, {"sort_index": thread}))
    for step in steps:
        length = step.account.seconds
        found.append(_complete(rank, STEPS, f"step {step.number + 1}", "step", step.begin, length))
        for thread, lane in enumerate(step.account.lanes, 1):
            found += _of_worker(rank, thread, lane, step.begin)
    return found


def as_trace(events: list[Event], about: dict[str, Any]) -> dict[str, Any]:
    """The whole file. `about` is shown by viewers as the trace's own facts."""
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _of_worker(rank: int, thread: int, lane: Lane, begin: float) -> Iterator[Event]:
    spans = zip(lane.names, lane.rows.tolist(), lane.begins.tolist(), lane.ends.tolist(), strict=True)
    for name, row, first, last in spans:
        if row != NOBODY:
            yield _complete(rank, thread, name, ORDER[row], begin + first, last - first)
    for first, last in lane.waits:
        if last - first > SHORTEST_WAIT:
            yield _complete(rank, thread, "waits", WORKERS, begin + first, last - first)


def _complete(rank: int, thread: int, name: str, category: str, begin: float, seconds: float) -> Event:
    """Times in microseconds."""
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": rank,
        "tid": thread,
        "ts": round(begin * 1e6, 3),
        "dur": round(seconds * 1e6, 3),
    }


def _metadata(kind: str, rank: int, thread: int, content: dict[str, Any]) -> Event:
    return {"name": kind, "ph": "M", "pid": rank, "tid": thread, "args": content}
