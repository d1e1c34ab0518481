"""Teams of threads that share the jobs of a pool."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import NamedTuple

from distgpt.core.base.interrupts import signals_deferred
from distgpt.core.cpu.compiling.barrier import RELEASED, Member, counters
from distgpt.core.cpu.pool import Pool

WORTHWHILE = 0.9  # maximum time of a larger team, relative to one thread per job
LOSS = 0.03  # loss per further member, relative to its time, by waiting and duplicate packing

Shape = tuple[int, ...]


class Cost(NamedTuple):
    """The work of a job, in any unit, and the maximum number of threads that can share it."""

    work: float
    most: int


class Team(NamedTuple):
    """Threads from `first` on that run these jobs together, one job after another."""

    first: int
    members: int
    jobs: tuple[int, ...]


@cache
def share_out(shapes: tuple[Shape, ...], threads: int, cost: Callable[[Shape], Cost]) -> tuple[Team, ...]:
    """Return teams for jobs of these shapes: one per thread, if no thread would then wait long for another.

    Each job, largest first, is given to the team that would finish it first.
    """
    costs = [cost(shape) for shape in shapes]
    result: tuple[Team, ...] = ()
    least = 0.0
    for count in range(min(threads, len(shapes)), 0, -1):
        firsts = [threads * i // count for i in range(count)]
        sizes = [stop - first for first, stop in zip(firsts, [*firsts[1:], threads], strict=True)]
        ends = [0.0] * count
        jobs: list[list[int]] = [[] for _ in sizes]
        for i in sorted(range(len(costs)), key=lambda i: -costs[i].work):
            after = [end + _time(costs[i], size) for end, size in zip(ends, sizes, strict=True)]
            team = after.index(min(after))
            jobs[team].append(i)
            ends[team] = after[team]
        if not result or max(ends) < WORTHWHILE * least:
            most = [max((costs[job].most for job in some), default=0) for some in jobs]
            result = tuple(map(Team, firsts, map(min, sizes, most), map(tuple, jobs)))
            least = max(ends)
    return result


def _time(cost: Cost, members: int) -> float:
    at_work = min(members, cost.most)
    return cost.work / at_work * (1 + LOSS * (at_work - 1))


def by_job(teams: tuple[Team, ...]) -> list[tuple[int, Team]]:
    """Return all jobs in order, each with its team."""
    return sorted((job, team) for team in teams for job in team.jobs)


def run_in_teams(pool: Pool, teams: tuple[Team, ...], work: Callable[[int, Member], None]) -> None:
    """Call work(job, member) on each thread for the jobs of its team.

    All members must reach their barriers. Signals are therefore deferred, and a failing member releases the
    others.
    """
    firsts = [team.first for team in teams]
    of_jobs = counters(sum(len(team.jobs) for team in teams), pool.threads)

    def take_part(thread: int) -> None:
        first, members, jobs = teams[bisect_right(firsts, thread) - 1]
        if thread - first < members:
            try:
                for job in jobs:
                    work(job, Member(thread - first, members, of_jobs[job]))
            except BaseException:
                of_jobs[list(jobs), 0] = RELEASED
                raise

    is_shared = any(team.members > 1 for team in teams)
    with signals_deferred() if is_shared else nullcontext():
        pool.run_parts(take_part, teams[-1].first + teams[-1].members if teams else 0)
