"""Processes of a job, and signals at a chosen moment."""

import os
import re
import signal
from contextlib import suppress
from pathlib import Path


def of_job(out):
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            rank = re.search(rb"(?:PMI|COMM_WORLD)_RANK=(\d+)", (folder / "environ").read_bytes())
            if rank and os.fsencode(out) in (folder / "cmdline").read_bytes().split(b"\0"):
                found[int(rank[1])] = int(folder.name)
    return [found[rank] for rank in sorted(found)]


def at_call(monkeypatch, owner, name, count, number, times=1):
    called, original = [], getattr(owner, name)

    def sending(*args, **kwargs):
        called.append(name)
        if len(called) == count:
            for _ in range(times):
                signal.raise_signal(number)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, sending)
