"""Record the functions of the package that each test calls, also in child processes.

`run.py record` puts this directory on PYTHONPATH, so every interpreter that a test starts imports this module. It
writes one line per test and function to a file per process in the directory DISTGPT_TRACE.
"""

import os
import sys
import threading

FOLDER = os.environ["DISTGPT_TRACE"]
PACKAGE = os.environ["DISTGPT_TRACED"] + "/"
_seen: set = set()


def _call(frame, event, argument):
    if event != "call":
        return
    code = frame.f_code
    if code in _seen:
        return
    _seen.add(code)
    if code.co_filename.startswith(PACKAGE):
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
        if test:
            line = f"{test}\t{code.co_filename[len(PACKAGE) :]}:{code.co_qualname}\n"
            with open(f"{FOLDER}/{os.getpid()}", "a") as out:  # noqa: PTH123
                out.write(line)


def begin_test():
    """Forget the functions of the test before. Profile again: a test, or a library, may have ended that."""
    _seen.clear()
    threading.setprofile(_call)
    sys.setprofile(_call)


os.register_at_fork(after_in_child=begin_test)
begin_test()
