"""Ctrl-C ends a command wherever it comes, once, and as an interrupt."""

import signal
import threading

import numpy as np
import pytest
from distgpt.core.base.interrupts import signals_deferred
from distgpt.core.cpu.compiling.jit import jit
from distgpt.core.train.step import Step
from llvmlite.binding.executionengine import ExecutionEngine

from conftest import SMALL, inside


class Finalized:
    def __del__(self):
        interrupt()


def interrupt():
    signal.raise_signal(signal.SIGINT)


def in_a_finalizer():
    del [Finalized()][0]


def in_an_import_in_c():
    """What importing NumPy makes of it."""
    try:
        interrupt()
    except KeyboardInterrupt:
        raise ImportError("PyCapsule_Import could not import module") from None


@pytest.mark.parametrize("broken", [interrupt, in_a_finalizer, in_an_import_in_c])
def test_an_interrupt_ends_a_run_wherever_it_comes(broken, tmp_path, monkeypatch):
    """As an interrupt, with one line."""
    launch = Step.launch

    def interrupted(step, number, batches, *flags):
        if number == 3:
            broken()
        return launch(step, number, batches, *flags)

    monkeypatch.setattr(Step, "launch", interrupted)
    result = inside("train", *SMALL, "--steps", "3000", "--out", tmp_path / "run")
    assert result.returncode == 130 and result.stderr.startswith("distgpt: interrupted"), result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_an_interrupt_while_a_loop_is_compiled_or_loaded_comes_after_that(monkeypatch):
    """LLVM calls back then, and an exception raised there was lost, or ended the process with SIGSEGV."""
    called = []
    find = ExecutionEngine._find_module_ptr

    def interrupted(engine, pointer):
        """What a callback calls."""
        interrupt()
        called.append(pointer)
        return find(engine, pointer)

    @jit
    def doubled(x):
        for i in range(len(x)):
            x[i] *= 2

    monkeypatch.setattr(ExecutionEngine, "_find_module_ptr", interrupted)
    x = np.ones(3, np.float32)
    with pytest.raises(KeyboardInterrupt):
        doubled(x)
    assert called and (x == 1).all()
    doubled(x)
    assert (x == 2).all()


def test_what_is_held_comes_at_the_end_and_once():
    came = []
    with pytest.raises(KeyboardInterrupt):
        with signals_deferred():
            with signals_deferred():
                interrupt()
                interrupt()
            came.append("after the inner one")
        came.append("after the outer one")
    assert came == ["after the inner one"]


def test_what_is_ignored_stays_ignored_and_other_threads_hold_nothing():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    with signals_deferred():
        interrupt()
    assert signal.signal(signal.SIGINT, before) == signal.SIG_IGN
    done = []

    def elsewhere():
        with signals_deferred():
            done.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert done == [before]
