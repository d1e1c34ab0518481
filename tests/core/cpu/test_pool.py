"""The thread pool of a process: jobs in Python, and calls of compiled loops."""

import gc
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from distgpt.core.cpu.compiling.barrier import counters, wait_for_all
from distgpt.core.cpu.compiling.jit import jit
from distgpt.core.cpu.fused import muon
from distgpt.core.cpu.graphs.calls import PackedArgs
from distgpt.core.cpu.graphs.launch import CommandSlot, ParallelLaunch
from distgpt.core.cpu.graphs.loops import unpack_args
from distgpt.core.cpu.kernels import Bfloat16Kernels, CpuKernels
from distgpt.core.cpu.matmul.blas import rows_round_alike
from distgpt.core.cpu.pool import Pool, pool_of
from distgpt.core.cpu.teams import LOSS, Cost, Team, run_in_teams, share_out
from distgpt.core.ops.api import MuonMatrix
from hypothesis import given
from hypothesis import strategies as st


def forked(act):
    heard, tell = os.pipe()
    if not (child := os.fork()):
        os.write(tell, json.dumps(act()).encode())
        os._exit(0)
    os.close(tell)
    answered = select.select([heard], [], [], 20)[0]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(heard) as told:
        return json.loads(told.read()) if answered else None


@jit
def count(seen, number, value, counter, n_threads):
    seen[0, number] += value
    wait_for_all(counter, 0, n_threads)
    for each in range(n_threads):
        seen[1, number] += seen[0, each]


@jit
def fail(number, failing, counter, n_threads):
    if number == failing:
        raise RuntimeError
    wait_for_all(counter, 0, n_threads)


@jit
def read_packed(seen, number, packed):
    values, factor = unpack_args(packed)
    seen[number] = values[0] * factor


class Counting:
    def __init__(self, pool):
        self.seen, self.counter = np.zeros((2, pool.threads), np.int64), counters(1, pool.threads)[0]
        arguments = [(self.seen, i, 1, self.counter, pool.threads) for i in range(pool.threads)]
        self.orders = ParallelLaunch(pool, count, arguments, [self.counter])

    def own(self):
        count(self.seen, 0, 1, self.counter, len(self.seen[0]))

    def check(self, value=1):
        self.seen[...] = 0
        self.orders.put(2, value)
        assert self.orders.run() == []
        threads = len(self.seen[0])
        assert self.seen.tolist() == [[value] * threads, [value * threads] * threads]


def test_models_share_one_pool():
    before = threading.active_count()
    alive = [CpuKernels("float32", 3) for _ in range(4)]
    assert alive and threading.active_count() <= before + 2


@pytest.mark.parametrize("threads", [2, 3, 16])
def test_launch_calls_all_threads(threads):
    pool = Pool(threads)
    counting = Counting(pool)
    for value in range(1, 50):
        counting.check(value)
    assert isinstance(pool.task, CommandSlot)
    time.sleep(0.05)
    began = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - began < 0.1  # helpers sleep
    counting.check()  # wakes them


def test_python_jobs_reclaim_helpers():
    pool = Pool(3)
    countings = [Counting(pool) for _ in range(2)]
    for turn in range(200):
        countings[turn % 2].check()
        if turn % 3:
            done = []
            pool.run_parts(done.append, 1 + turn % 5)  # also jobs of fewer parts than helpers
            assert sorted(done) == list(range(1 + turn % 5))


@pytest.mark.parametrize("call", ["run_parts", "split_range", "run_together", "orders"])
def test_user_threads_share_the_pool(call):
    pool, wrong = Pool(2), []

    def work(size):
        done = [0] * size

        def count(first, last):
            for i in range(first, last):
                done[i] += 1

        if call == "run_parts":
            pool.run_parts(lambda i: count(i, i + 1), size)
        elif call == "split_range":
            pool.split_range(size, 1, count)
        else:
            pool.run_together(lambda: pool.split_range(size, 1, count))
        assert done == [1] * size

    def use(size):
        try:
            counting = Counting(pool)
            for turn in range(100):
                if call == "orders":
                    counting.check()
                if call != "orders" or turn % 7 == size:
                    work(size)
        except BaseException as error:
            wrong.append(error)

    users = [threading.Thread(target=use, args=(size,)) for size in (2, 3, 7)]
    for user in users:
        user.start()
    for user in users:
        user.join()
    assert not wrong


def test_nested_work_runs_in_its_thread():
    pool, seen, inside, after = Pool(2), [], [], []
    pool.run_parts(lambda part: pool.split_range(10, 1, lambda first, last: seen.append((first, last))), 2)
    assert seen == [(0, 10), (0, 10)]

    def stretch(first, last):
        pool.split_range(10, 1, lambda *inner: inside.append((first, last, *inner)))

    def work():
        pool.split_range(4, 1, stretch)
        pool.split_range(6, 1, lambda *own: after.append(own))

    pool.run_together(work)
    assert sorted(inside) == [(0, 2, 0, 10), (2, 4, 0, 10)] and sorted(after) == [(0, 3), (3, 6)]


@pytest.mark.parametrize("failing", [0, 1])
def test_worker_exception_keeps_the_pool(failing):
    pool = Pool(2)

    def work(part):
        time.sleep(0.01)
        if part == failing:
            raise ValueError(f"part {part}")

    with pytest.raises(ValueError, match=f"part {failing}"):
        pool.run_parts(work, 2)
    done = []
    pool.run_parts(done.append, 2)
    assert sorted(done) == [0, 1]


@pytest.mark.parametrize("failing", range(3))
def test_failed_call_keeps_the_pool(failing):
    pool, counter = Pool(3), counters(1, 3)[0]
    failing_orders = ParallelLaunch(pool, fail, [(i, failing, counter, 3) for i in range(3)], [counter])
    for _ in range(5):
        assert failing_orders.run() == [failing]
        Counting(pool).check()


def test_failed_own_work_releases_threads():
    pool = Pool(3)
    counting = Counting(pool)

    def broken():
        time.sleep(0.01)  # the others are waiting
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        counting.orders.run(broken)
    for _ in range(3):
        counting.check()


def test_launch_passes_packed_arguments():
    pool, seen = Pool(2), np.zeros(2, np.int64)
    packed = [PackedArgs((np.array([10 + i]), 3)) for i in range(2)]
    reading = ParallelLaunch(pool, read_packed, [(seen, i, packed[i]) for i in range(2)], [])
    assert reading.run() == [] and seen.tolist() == [30, 33]
    other = np.zeros(2, np.int64)
    reading.put(0, other)
    assert reading.run() == [] and other.tolist() == [30, 33]


@pytest.mark.ci
@pytest.mark.parametrize("state", ["idle", "busy", "lent"])
def test_pool_restarts_in_forked_child(state):
    """`multiprocessing` forks by default up to Python 3.13, also during another thread's job."""
    pool, ready, go = pool_of(2), threading.Event(), threading.Event()
    counting = Counting(pool)

    def job():
        done = []
        pool.run_parts(done.append, 2)
        pool.run_together(lambda: pool.split_range(4, 1, lambda first, last: done.append(last)))
        return sorted(done)

    def wait(part):
        ready.set()
        go.wait()

    def act():
        counting.check()
        return job()

    assert job() == [0, 1, 2, 4]
    user = threading.Thread(target=pool.run_parts, args=(wait, 2))
    if state == "busy":
        user.start()
        ready.wait()
    if state == "lent":
        counting.check()
    try:
        assert forked(act) == [0, 1, 2, 4]
    finally:
        go.set()
    if state == "busy":
        user.join()
    assert act() == [0, 1, 2, 4]


def test_pool_releases_arrays_after_launch():
    pool = Pool(2)
    counting = Counting(pool)
    counting.check()
    with pytest.raises(ZeroDivisionError):
        counting.orders.run(lambda: 1 / 0)
    seen = weakref.ref(counting.seen)
    gc.disable()  # nothing may wait for it
    try:
        del counting
        assert seen() is None
    finally:
        gc.enable()


def run_alone(script):
    """Run a script in a new process, with the names that it needs."""
    head = f"""
import random, signal, sys
sys.path[:0] = {[str(Path(__file__).parent), *sys.path]}
from test_pool import Counting
from distgpt.core.base.interrupts import signals_deferred
from distgpt.core.cpu.pool import Pool
"""
    done = subprocess.run([sys.executable, "-c", head + script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


# SIGALRM arrives between any two steps of the interpreter. Exceptions keep their frames, as in a notebook.
INTERRUPTED = """
pool, moments, kept = Pool(3), random.Random(1), []
counting = Counting(pool)
counting.check()
signal.signal(signal.SIGALRM, lambda *about: signal.raise_signal(signal.SIGINT))

for _ in range(400):
    try:
        signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-6, 0.002))
        while True:
            counting.orders.run()
            with signals_deferred():
                counting.orders.run(counting.own)
            pool.run_parts(lambda part: None, 3)
    except KeyboardInterrupt as error:
        kept.append(error)
    counting.check()
"""


@pytest.mark.ci
def test_interrupt_may_arrive_anywhere():
    run_alone(INTERRUPTED)


@pytest.mark.ci
@pytest.mark.parametrize("threads", [2, 16])
def test_process_ends_with_waiting_helpers(threads):
    assert run_alone(f"Counting(Pool({threads})).check()\nprint('counted', flush=True)") == "counted\n"


KERNELS = {
    "float32": partial(CpuKernels, "float32"),
    "float64": partial(CpuKernels, "float64"),
    "bfloat16": Bfloat16Kernels,
}
# Wide, tall and square shapes, and sides that do not fill tiles.
SHAPES = {
    "one": [(1024, 320)],
    "a few": [(256, 1024), (1024, 256), (256, 256)],
    "odd": [(333, 500), (301, 287), (7, 3)],
    "equal": [(256, 272)] * 7,
    "sums that the BLAS halves": [(464, 896)],
}

# The gradients' norm, scalars, and a factor of the shape.
HOW = np.array([1.0]), np.array([1.0, 0.0, 0.9, 0.1, 0.2]), 1.0


@pytest.mark.parametrize("kind", ["float32", "bfloat16", pytest.param("float64", marks=pytest.mark.ci)])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_muon_update_is_identical_for_any_threads(kind, shapes, monkeypatch):
    monkeypatch.setattr(muon, "USES_AMX", False)
    alone, *others = (updated(KERNELS[kind](threads), shapes) for threads in (1, 2, 5, 16))
    for found in others:
        for array, wanted in zip(found, alone, strict=True):
            np.testing.assert_array_equal(array, wanted)


def updated(k, shapes):
    random = np.random.default_rng(0)
    norm, scalars = np.array([3.0]), np.array([0.5, 0.7, 0.9, 1e-2, 0.3])

    def drawn(*shape):
        return random.standard_normal(shape).astype(k.accum_dtype)

    us = [drawn(*shape) for shape in shapes]
    ms = [drawn(u.size) for u in us]
    k.muon_momentum(ms, [u.reshape(-1) for u in us], norm, scalars)
    found = [*ms, *(u.copy() for u in us)]
    k.orthogonalise(us)
    found += [u.copy() for u in us]
    matrices = [MuonMatrix(drawn(*u.shape), None, drawn(max(u.shape)) ** 2, u) for u in us]
    k.muon(matrices, norm, scalars, 0.95)
    return found + [array for p, _, v, u in matrices for array in (p, v, u)]


def test_matrix_is_shared_if_rows_round_equally():
    members = {kind: share_out(((256, 1024),), 3, make(3).polar_cost)[0].members for kind, make in KERNELS.items()}
    assert members == {"float32": 3 if rows_round_alike() else 1, "float64": 1, "bfloat16": 3}
    assert share_out(((1024, 3072),), 4, muon.step_cost)[0].members == 3


@pytest.mark.parametrize("shape", [(301, 287), (287, 301)])
def test_shared_step_is_identical(shape):
    def stepped(threads):
        random = np.random.default_rng(0)
        ps, us = random.standard_normal((2, 3, *shape)).astype("float32")
        vs = random.standard_normal((3, 301)).astype("float32") ** 2
        lows, sums = np.zeros(ps.shape, np.uint16), np.empty((2, shape[0]))

        def work(i, member):
            muon.step(ps[i], lows[i], vs[i], us[i], *HOW, 0.95, sums, member)

        run_in_teams(Pool(threads), (Team(0, threads, (0, 1, 2)),), work)
        return ps, lows, vs, us

    alone = stepped(1)
    for threads in (2, 5, 16):
        for found, wanted in zip(stepped(threads), alone, strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_muon_parts_cover_a_matrix_once():
    for short, long, members, most in ((768, 3072, 5, 9), (768, 768, 128, 108), (300, 301, 7, 3), (24, 24, 1, 1)):
        parts = muon.parts_of(short, long, members, most, 14, 32)
        assert len(parts) == members
        for start, stop, whole in (("top", "bottom", short), ("first", "last", long)):
            cuts = [(getattr(part, start), getattr(part, stop)) for part in parts]
            assert cuts[0][0] == 0 and cuts[-1][1] == whole
            assert all(one[0] <= one[1] == other[0] for one, other in pairwise(cuts))
    areas = [part.bottom**2 - part.top**2 for part in muon.parts_of(768, 3072, 4, 4, 16, 16)]
    assert max(areas) < 1.15 * min(areas)


@pytest.mark.parametrize("works, threads, most, members", [
    ([1] * 48, 16, 100, [1] * 16),
    ([1], 4, 100, [4]),
    ([1], 4, 3, [3]),
    ([1], 4, 1, [1]),
    ([1] * 2, 8, 100, [4, 4]),
    ([1] * 3, 2, 100, [2]),  # a thread each, and one would wait for a quarter of the time
    ([4, 1, 1, 1, 1], 2, 100, [1, 1]),
    ([1] * 17, 16, 1, [1] * 16),
    ([1] * 3, 5, 1, [1] * 3),
    ([100, 1], 3, 100, [3]),
])  # fmt: skip
def test_jobs_are_shared_only_if_threads_would_idle(works, threads, most, members):
    assert [team.members for team in shared(works, threads, most)] == members


def shared(works, threads, most=100):
    teams = share_out(tuple((work, most) for work in works), threads, lambda shape: Cost(shape[0], shape[1]))
    assert sorted(job for team in teams for job in team.jobs) == list(range(len(works)))
    assert all(team.first + team.members <= after.first for team, after in pairwise(teams))
    assert teams[-1].first + teams[-1].members <= threads
    return teams


@given(st.lists(st.integers(1, 99), min_size=1, max_size=60), st.integers(1, 20))
def test_largest_jobs_start_first(works, threads):
    teams = shared(works, threads)
    ends = [sum(works[job] for job in team.jobs) / team.members for team in teams]
    whole = max(sum(works) / threads, max(works) / threads)
    few = 1.34 if len(works) < 2 * threads else 1.15
    assert max(ends) <= few * whole * (1 + LOSS * threads)
    for team in teams:
        assert [works[job] for job in team.jobs] == sorted((works[job] for job in team.jobs), reverse=True)


def within(seconds, work):
    found = []

    def caught():
        try:
            work()
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=caught, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "threads wait for one that never comes"
    return found


def matrices(count):
    ones = np.ones((count, 512, 512), "float32")
    return [MuonMatrix(one, None, np.ones(512, "float32"), one.copy()) for one in ones]


def test_member_that_fails_releases_the_others():
    pool, of, sums = Pool(3), matrices(2), np.empty((2, 512))

    def work(i, member):
        if member.number == 1:
            raise ZeroDivisionError
        muon.step(*of[i], *HOW, 0.95, sums, member)

    found = within(20, lambda: run_in_teams(pool, (Team(0, 3, (0, 1)),), work))
    assert [type(error) for error in found] == [ZeroDivisionError]


def test_signal_waits_for_the_team():
    pool, of, sums = Pool(2), matrices(1), np.empty((2, 512))
    seen = []

    def work(i, member):
        if member.number == 0:
            signal.raise_signal(signal.SIGINT)
        muon.step(*of[i], *HOW, 0.95, sums, member)
        seen.append(member.number)

    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_in_teams(pool, (Team(0, 2, (0,)),), work)
    finally:
        signal.signal(signal.SIGINT, former)
    assert sorted(seen) == [0, 1]


def test_nested_job_has_no_team():
    k = Bfloat16Kernels(3)
    start = np.random.default_rng(0).standard_normal((4, 256, 272)).astype("float32")
    alone, nested = start.copy(), start.copy()
    k.orthogonalise(list(alone))
    assert not within(20, lambda: k.each(lambda i: k.orthogonalise([nested[i]]), len(nested)))
    np.testing.assert_array_equal(nested, alone)
