"""What the batch systems of tests have in common: how they are called, waited for, and ended."""

import os
import signal
import socket
import subprocess
import time
from contextlib import ExitStack, suppress
from pathlib import Path


class Scheduler:
    """A batch system in a folder of its own. `environ` is what commands need to talk to it."""

    shows = ()  # the command that lists its jobs
    logs_at = "*.log"  # of its daemons

    def __init__(self, folder, environ):
        self.folder, self.environ = folder, environ

    def call(self, *words, check=True, **how):
        """Run a command of it; returns what it wrote."""
        how = {"env": {**os.environ, **self.environ}, "capture_output": True, "text": True, **how}
        done = subprocess.run([*map(str, words)], **{"timeout": 60, **how})
        assert not check or done.returncode == 0, (words, done.stdout, done.stderr, self.logs())
        return done.stdout if check else done

    def wait_for(self, what, seconds=200):
        deadline = time.monotonic() + seconds
        while not (found := what()):
            assert time.monotonic() < deadline, (self.call(*self.shows, check=False).stdout, self.logs())
            time.sleep(0.1)
        return found

    def logs(self):
        """The last lines that its daemons have written, for a test that fails."""
        return {log.name: log.read_text().splitlines()[-8:] for log in self.folder.glob(self.logs_at)}


def signal_all(number, *mine):
    """Signal all processes but this one that have these in their environment."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            variables = (process / "environ").read_bytes().split(b"\0")
            if {*map(str.encode, mine)} <= {*variables} and int(process.name) != os.getpid():
                os.kill(int(process.name), number)


def end_all(mine):
    """Kill the daemons and whatever a job has left behind: all that has this in its environment."""
    signal_all(signal.SIGKILL, mine)


def free_ports(count):
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
