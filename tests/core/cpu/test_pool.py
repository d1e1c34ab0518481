"""The thread pool: shared by all models of a process, and by threads of the user one after the other."""

import threading
import time

import pytest
from distgpt.api import GPT
from distgpt.core.comm.api import SerialComm
from distgpt.core.config import ModelConfig, RunConfig
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.cpu.pool import Pool, pool_of
from distgpt.core.model.model import Architecture, Model
from distgpt.core.saved.modelfile import Description
from forks import forked


def test_models_share_one_pool():
    before = threading.active_count()
    alive = [CpuKernels("float32", 3) for _ in range(4)]
    assert alive and threading.active_count() <= before + 2


@pytest.mark.parametrize("call", ["run_parts", "split_range", "run_together"])
def test_threads_of_the_user_take_turns(call):
    """Each gets the results of its own job, though all share one pool."""
    pool, wrong = Pool(2), []

    def job(size):
        for _ in range(100):
            done = [0] * size

            def count(first, last, done=done):
                for i in range(first, last):
                    done[i] += 1

            if call == "run_parts":
                pool.run_parts(lambda i, count=count: count(i, i + 1), size)
            elif call == "split_range":
                pool.split_range(size, 1, count)
            else:
                pool.run_together(lambda count=count, size=size: pool.split_range(size, 1, count))
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
    pool.run_parts(lambda part: pool.split_range(10, 1, lambda first, last: seen.append((first, last))), 2)
    assert seen == [(0, 10), (0, 10)]


def test_a_range_inside_a_stretch_of_all_threads_is_done_whole_by_its_thread():
    pool, inside, after = Pool(2), [], []

    def stretch(first, last):
        pool.split_range(10, 1, lambda *inner: inside.append((first, last, *inner)))

    def work():
        pool.split_range(4, 1, stretch)
        pool.split_range(6, 1, lambda *own: after.append(own))

    pool.run_together(work)
    assert sorted(inside) == [(0, 2, 0, 10), (2, 4, 0, 10)] and sorted(after) == [(0, 3), (3, 6)]


@pytest.mark.parametrize("failing", [0, 1])
def test_what_a_worker_raises_is_raised_and_the_pool_lives_on(failing):
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


@pytest.mark.ci
@pytest.mark.parametrize("busy", [False, True])
def test_pools_from_before_a_fork_begin_anew_in_the_child(busy):
    """`multiprocessing` forks by default up to Python 3.13; another thread may have a job under way."""
    pool, ready, go = pool_of(2), threading.Event(), threading.Event()

    def job():
        done = []
        pool.run_parts(done.append, 2)
        pool.run_together(lambda: pool.split_range(4, 1, lambda first, last: done.append(last)))
        return sorted(done)

    def wait(part):
        ready.set()
        go.wait()

    assert job() == [0, 1, 2, 4]
    if busy:
        (user := threading.Thread(target=pool.run_parts, args=(wait, 2))).start()
        ready.wait()
    try:
        assert forked(job) == [0, 1, 2, 4]
    finally:
        go.set()
    if busy:
        user.join()
    assert job() == [0, 1, 2, 4]


@pytest.mark.ci
def test_a_model_from_before_a_fork_computes_in_the_child():
    model = Model(
        Architecture(ModelConfig(vocab_size=5, seq_len=8, n_layer=1, n_head=2, n_embd=16)), CpuKernels("float32", 2)
    )
    model.initialise(1)
    gpt = GPT(model, Description(RunConfig(model=model.config), None), SerialComm())
    expected = gpt.logits([[1, 2, 3]] * 8).tolist(), gpt.generate([1, 2], 5)
    assert forked(lambda: [gpt.logits([[1, 2, 3]] * 8).tolist(), gpt.generate([1, 2], 5)]) == [*expected]
