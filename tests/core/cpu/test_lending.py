"""Helpers of a pool wait in compiled code for orders, and still do whatever else their pool has to do."""

import gc
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
from distgpt.core.cpu.pool import Pool
from forks import forked

THREADS = [2, 3, 16]


@jit
def count(seen, number, value, counter, n_threads):
    """Write into one's own element, meet the others, then look whether all have."""
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
    """Orders that count, and what they should have counted."""

    def __init__(self, pool):
        self.seen, self.counter = np.zeros((2, pool.threads), np.int64), counters(1, pool.threads)[0]
        arguments = [(self.seen, i, 1, self.counter, pool.threads) for i in range(pool.threads)]
        self.orders = ParallelLaunch(pool, count, arguments, [self.counter])

    def own(self):
        """Do what the first thread's call does."""
        count(self.seen, 0, 1, self.counter, len(self.seen[0]))

    def check(self, value=1):
        self.seen[...] = 0
        self.orders.put(2, value)
        assert self.orders.run() == []
        threads = len(self.seen[0])
        assert self.seen.tolist() == [[value] * threads, [value * threads] * threads]


@pytest.mark.parametrize("threads", THREADS)
def test_all_threads_make_their_calls(threads):
    pool = Pool(threads)
    counting = Counting(pool)
    for value in range(1, 50):
        counting.check(value)
    assert isinstance(pool.task, CommandSlot)


def test_helpers_that_sleep_are_woken_and_take_no_time():
    pool = Pool(3)
    counting = Counting(pool)
    counting.check()
    time.sleep(0.05)
    began = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - began < 0.1
    counting.check()


def test_jobs_in_python_call_helpers_back():
    pool = Pool(3)
    countings = [Counting(pool) for _ in range(2)]
    for turn in range(200):
        countings[turn % 2].check()
        if turn % 3:
            done = []
            pool.run_parts(done.append, 1 + turn % 5)  # also jobs of fewer parts than helpers
            assert sorted(done) == list(range(1 + turn % 5))


def test_threads_of_the_user_take_turns():
    pool, wrong = Pool(2), []

    def use(number):
        try:
            counting = Counting(pool)
            for turn in range(100):
                counting.check()
                if turn % 7 == number:
                    pool.run_parts(lambda part: None, 2)
        except BaseException as error:
            wrong.append(error)

    users = [threading.Thread(target=use, args=(number,)) for number in range(3)]
    for user in users:
        user.start()
    for user in users:
        user.join()
    assert not wrong


@pytest.mark.parametrize("failing", range(3))
def test_a_call_that_fails_is_told_and_the_pool_lives_on(failing):
    pool = Pool(3)
    counter = counters(1, 3)[0]
    failing_orders = ParallelLaunch(pool, fail, [(i, failing, counter, 3) for i in range(3)], [counter])
    for _ in range(5):
        assert failing_orders.run() == [failing]
        Counting(pool).check()


def test_others_are_released_if_the_own_work_fails():
    pool = Pool(3)
    counting = Counting(pool)

    def broken():
        time.sleep(0.01)  # the others wait by now
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        counting.orders.run(broken)
    for _ in range(3):
        counting.check()


def test_packed_arguments_and_arrays_are_passed_on():
    pool = Pool(2)
    seen = np.zeros(2, np.int64)
    packed = [PackedArgs((np.array([10 + i]), 3)) for i in range(2)]
    reading = ParallelLaunch(pool, read_packed, [(seen, i, packed[i]) for i in range(2)], [])
    assert reading.run() == [] and seen.tolist() == [30, 33]
    other = np.zeros(2, np.int64)
    reading.put(0, other)
    assert reading.run() == [] and other.tolist() == [30, 33]


@pytest.mark.ci
@pytest.mark.parametrize("is_lent", [False, True])
def test_a_child_of_a_fork_has_helpers_of_its_own(is_lent):
    pool = Pool(2)
    counting = Counting(pool)
    if is_lent:
        counting.check()

    def act():
        for _ in range(3):
            counting.check()
        return "counted"

    assert forked(act) == "counted"
    counting.check()


def test_a_pool_keeps_no_array_of_an_order_that_has_run():
    pool = Pool(2)
    counting = Counting(pool)
    counting.check()
    with pytest.raises(KeyboardInterrupt):
        counting.orders.run(interrupt)
    seen = weakref.ref(counting.seen)
    gc.disable()  # nothing may wait for it
    try:
        del counting
        assert seen() is None
    finally:
        gc.enable()


def interrupt():
    raise KeyboardInterrupt


# The clock's signal comes between any two steps of the interpreter: one that another thread sends comes
# where this one has given the interpreter's lock away. Exceptions are kept with all their frames, as a
# notebook keeps them.
INTERRUPTED = """
import random, signal, sys
sys.path[:0] = {path}
from test_lending import Counting
from distgpt.core.base.interrupts import signals_deferred
from distgpt.core.cpu.pool import Pool

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
def test_an_interrupt_may_come_anywhere():
    script = INTERRUPTED.format(path=[str(Path(__file__).parent), *sys.path])
    done = subprocess.run([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, timeout=120)
    assert not done.returncode and not done.stderr, done.stderr


ENDING = """
import sys
sys.path[:0] = {path}
from test_lending import Counting
from distgpt.core.cpu.pool import Pool

Counting(Pool({threads})).check()
print("counted", flush=True)
"""


@pytest.mark.ci
@pytest.mark.parametrize("threads", [2, 16])
def test_a_process_ends_while_its_helpers_wait(threads):
    script = ENDING.format(path=[str(Path(__file__).parent), *sys.path], threads=threads)
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (0, "counted\n", "")
