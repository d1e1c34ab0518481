"""The thread pool: shared by all models of a process, and by threads of the user one after the other."""

import os
import subprocess
import sys
import threading
import time

import pytest

from distgpt.kernels.cpu import CpuKernels
from distgpt.kernels.pool import Pool, pool_of


def test_models_share_one_pool():
    before = threading.active_count()
    pools = {CpuKernels("float32", 3)._pool for _ in range(4)}
    assert len(pools) == 1
    assert threading.active_count() <= before + 2


@pytest.mark.parametrize("call", ["run", "ranges", "run_together"])
def test_threads_of_the_user_take_turns(call):
    """Each gets the results of its own job, though all share one pool."""
    pool, wrong = Pool(2), []

    def job(size):
        for _ in range(100):
            done = [0] * size

            def count(first, last, done=done):
                for i in range(first, last):
                    done[i] += 1

            if call == "run":
                pool.run(lambda i, count=count: count(i, i + 1), size)
            elif call == "ranges":
                pool.ranges(size, 1, count)
            else:
                pool.run_together(lambda count=count, size=size: pool.ranges(size, 1, count))
            if done != [1] * size:
                wrong.append(done)

    users = [threading.Thread(target=job, args=(size,)) for size in (2, 3, 7)]
    for user in users:
        user.start()
    for user in users:
        user.join()
    assert not wrong


def test_a_job_inside_a_part_is_done_whole_by_its_worker():
    pool, seen = Pool(2), []
    pool.run(lambda part: pool.ranges(10, 1, lambda first, last: seen.append((first, last))), 2)
    assert seen == [(0, 10), (0, 10)]


@pytest.mark.parametrize("failing", [0, 1])
def test_what_a_worker_raises_is_raised_and_the_pool_lives_on(failing):
    pool = Pool(2)

    def work(part):
        time.sleep(0.01)
        if part == failing:
            raise ValueError(f"part {part}")

    with pytest.raises(ValueError, match=f"part {failing}"):
        pool.run(work, 2)
    done = []
    pool.run(done.append, 2)
    assert sorted(done) == [0, 1]


INTERRUPTED = """
import random, signal, threading, time
from distgpt.kernels.pool import Pool

pool, moments, main = Pool(3), random.Random(1), threading.main_thread().ident

def interrupt():
    time.sleep(moments.uniform(0, 0.002))
    signal.pthread_kill(main, signal.SIGINT)

for _ in range(200):
    try:
        threading.Thread(target=interrupt).start()
        while True:
            pool.run(lambda part: None, 3)
    except KeyboardInterrupt:
        pass
    done = [0, 0, 0]
    def count(part):
        time.sleep(0.0005 * part)
        done[part] += 1
    pool.run(count, 3)
    assert done == [1, 1, 1], done
"""


def test_an_interrupt_is_raised_wherever_it_comes_and_the_pool_lives_on():
    """The job under way is over by then, and the next one is not mistaken for it."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], stderr=subprocess.PIPE, text=True, timeout=60)
    assert not done.returncode and not done.stderr, done.stderr


def test_a_forked_process_makes_a_pool_of_its_own():
    done = []
    pool_of(2).run(done.append, 2)
    child = os.fork()
    if not child:
        made = []
        pool_of(2).run(made.append, 2)
        os._exit(sorted(made) != [0, 1])
    assert os.waitpid(child, 0)[1] == 0
