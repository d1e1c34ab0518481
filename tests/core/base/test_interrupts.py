"""Ctrl-C ends a command once, at any point, as an interrupt."""

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


def in_an_import_in_c():
    try:
        interrupt()
    except KeyboardInterrupt:
        raise ImportError("PyCapsule_Import could not import module") from None


@pytest.mark.parametrize("broken", [interrupt, Finalized, in_an_import_in_c])
def test_interrupt_ends_a_run_at_any_point(broken, tmp_path, monkeypatch):
    launch = Step.launch

    def interrupted(step, number, batches, *flags):
        if number == 3:
            broken()
        return launch(step, number, batches, *flags)

    monkeypatch.setattr(Step, "launch", interrupted)
    result = inside("train", *SMALL, "--steps", "3000", "--out", tmp_path / "run")
    assert result.returncode == 130 and result.stderr.startswith("distgpt: interrupted"), result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_interrupt_waits_for_compilation(monkeypatch):
    """An exception in a callback of LLVM would be lost or crash the process."""
    called, find = [], ExecutionEngine._find_module_ptr

    def interrupted(engine, pointer):
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


def test_deferred_signal_arrives_once_at_the_end():
    came = []
    with pytest.raises(KeyboardInterrupt):
        with signals_deferred():
            with signals_deferred():
                interrupt()
                interrupt()
            came.append("after the inner one")
        came.append("after the outer one")
    assert came == ["after the inner one"]


def test_signals_deferred_keeps_ignored_signals():
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
