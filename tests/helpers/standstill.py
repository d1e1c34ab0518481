"""Ranks of a real job that stand still while a test looks at them."""

import os
import signal
import time
from contextlib import contextmanager, suppress


@contextmanager
def standing_still(ranks):
    """Stop these processes, which are folders of /proc, and wake those that are left in the end."""
    for rank in ranks:
        os.kill(int(rank.name), signal.SIGSTOP)
    while any(map(_runs, ranks)):  # or one would still take a signal that a test wants to see pending
        time.sleep(0.001)
    try:
        yield ranks
    finally:
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(int(rank.name), signal.SIGCONT)


def _runs(rank):
    """Whether it neither stands still nor has ended."""
    with suppress(OSError):
        return (rank / "stat").read_text().rpartition(")")[2].split()[0] not in "TtZX"
    return False
