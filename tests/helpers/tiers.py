"""Check the tiers of tests (see CONTRIBUTING.md).

With DISTGPT_TEST_TIERS=check, a test fails if its tier is too low for its CPU time or processes. Compiling is
not counted, because it happens in the first test that needs a loop.
"""

import contextlib
import json
import os
import sys
import time

import pytest

# Seconds of CPU time on the slowest machine in use, where most tests take twice as long as on the fastest.
LIMITS = {"test": 6.0, "ci": 60.0}
CHECKED = os.environ.get("DISTGPT_TEST_TIERS") == "check"
LOG = os.environ.get("DISTGPT_TEST_TIERS_LOG")  # a file that gets a line of JSON per test
STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}
# Runs call git for the commit, empty caches start compilers, and the first test with a chat template starts
# the process that renders them.
INCIDENTAL = ("git ", "compile_workers", "g++", "chats/worker.py")
_started: list[str] = []
_uncounted = [0]
_compiling = [0.0]
_begun: list[float] = []  # CPU time at the start of each compilation under way


def tier(item):
    if any(item.get_closest_marker(mark) for mark in ("slow", "peer", "cluster", "rehearsal")):
        return "all"
    return "ci" if item.get_closest_marker("ci") else "test"


@contextlib.contextmanager
def uncounted():
    """Do not count processes that start in the block."""
    _uncounted[0] += 1
    try:
        yield
    finally:
        _uncounted[0] -= 1


def _noted(event, arguments):
    words = " ".join(map(str, arguments[1])) if event == "subprocess.Popen" else event
    if event in STARTS and not (_uncounted[0] or any(word in words for word in INCIDENTAL)):
        _started.append(words)


def _log(**entry):
    if LOG:
        entry |= {"processes": len(_started), "ranks": any("mpirun" in words for words in _started)}
        with open(LOG, "a") as out:  # noqa: PTH123
            out.write(json.dumps(entry) + "\n")


if CHECKED or LOG:
    from numba.core import event as numba_events

    class _Compiled(numba_events.Listener):
        def on_start(self, event):
            _begun.append(time.process_time())

        def on_end(self, event):
            begun = _begun.pop()
            if not _begun:
                _compiling[0] += time.process_time() - begun

    sys.addaudithook(_noted)
    numba_events.register("numba:compiler_lock", _Compiled())

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(fixturedef):
        """Do not count processes of shared fixtures."""
        if fixturedef.scope == "function":
            return (yield)
        own = _started[:]
        _started.clear()
        try:
            return (yield)
        finally:
            _log(fixture=fixturedef.argname, scope=fixturedef.scope, file=fixturedef.baseid)
            _started[:] = own

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup():
        _started.clear()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(item):
        begun, clock, compiled = time.process_time(), time.monotonic(), _compiling[0]
        try:
            return (yield)
        finally:
            item.cpu_seconds = time.process_time() - begun - (_compiling[0] - compiled)
            _log(
                test=item.nodeid, tier=tier(item), cpu=round(item.cpu_seconds, 3),
                wall=round(time.monotonic() - clock, 3), fixtures=item.fixturenames,
            )  # fmt: skip

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(item, call):
        report = yield
        if CHECKED and call.when == "call" and report.passed and (wrong := _misplaced(item)):
            report.outcome, report.longrepr = "failed", f"E {wrong}"
        return report


def _misplaced(item):
    own = tier(item)
    if own == "test" and _started and not item.get_closest_marker("smoke"):
        return f"starts {_started[0][:200]}: mark it ci (or smoke: one test per feature)"
    if item.cpu_seconds > LIMITS.get(own, item.cpu_seconds):
        return f"takes {item.cpu_seconds:.1f} s in tier {own}, which allows {LIMITS[own]:g} s"
    return ""
