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
from pathlib import Path

import numpy as np
import pytest
from distgpt.core.cpu.compiling.barrier import counters, wait_for_all
from distgpt.core.cpu.compiling.jit import jit
from distgpt.core.cpu.graphs.calls import PackedArgs
from distgpt.core.cpu.graphs.launch import CommandSlot, ParallelLaunch
from distgpt.core.cpu.graphs.loops import unpack_args
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.cpu.pool import Pool, pool_of


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
