"""A Flux instance of one's own on this machine: needs no root and no daemon, and no Flux that runs already.

Its brokers stand for nodes; all of them have the cores of this machine.
"""

import os
import shutil
import subprocess
import time
from contextlib import contextmanager

PATH = os.pathsep.join([os.environ["PATH"], "/opt/flux/bin"])  # where a build from source is looked for, too
SECONDS_TO_START = 60


def lacking():
    """Why there can be none here; "" if there can."""
    return "" if shutil.which("flux", path=PATH) else "needs Flux: flux in PATH, or flux-core in /opt/flux"


class Instance:
    """`environ` is what commands need to talk to it."""

    def __init__(self, uri):
        self.environ = {"FLUX_URI": uri, "PATH": PATH}

    def call(self, *words, check=True):
        """Run a command of it; returns what it wrote."""
        env = {**os.environ, **self.environ}
        done = subprocess.run(["flux", *map(str, words)], env=env, capture_output=True, text=True, timeout=60)
        assert not check or done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout if check else done

    def jobs(self, form="{id.f58plain}", states="active"):
        """Its jobs in some states, the newest first, each as a line of a form."""
        return self.call("jobs", "-a", "-n", f"--filter={states}", "-o", form).splitlines()

    def wait_for(self, what, seconds=150):
        deadline = time.monotonic() + seconds
        while not (found := what()):
            assert time.monotonic() < deadline, self.call("jobs", "-a", check=False).stdout
            time.sleep(0.1)
        return found


@contextmanager
def flux_instance(brokers=1):
    """An instance that is ready for jobs, and gone afterwards, with whatever runs in it."""
    words = ["flux", "start", f"--test-size={brokers}", "--test-exit-mode=leader"]
    process = subprocess.Popen(
        [*words, "sh", "-c", "echo $FLUX_URI; cat >/dev/null; flux cancel --all; flux queue idle --quiet"],
        **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": {**os.environ, "PATH": PATH}},
        text=True,
    )
    with process:
        uri = process.stdout.readline().strip()
        assert uri.startswith("local://"), uri
        yield Instance(uri)
        process.stdin.close()
        process.wait(SECONDS_TO_START)
