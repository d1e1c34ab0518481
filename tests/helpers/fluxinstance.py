"""A separate Flux instance on this machine, without root or daemons. Its brokers act as nodes with all cores."""

import os
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path

from schedulers import Scheduler

PATH = os.pathsep.join([os.environ["PATH"], "/opt/flux/bin"])  # also a build from source
SECONDS_TO_END = 60
# The default of 5 s is too short for busy machines.
CONFIGURATION = 'exec.kill-timeout = "30s"\n'
PRETENDED = 'resource.path = "{folder}/R"\nresource.noverify = true\n'
# Ends with its standard input.
INITIAL = "echo $FLUX_URI; cat >/dev/null; flux cancel --all --quiet; flux queue idle --quiet"


def lacking():
    return "" if shutil.which("flux", path=PATH) else "needs flux-core: flux in PATH or in /opt/flux/bin"


class Instance(Scheduler):
    system, submitted, sign = "flux", r"^(f\w+)$", "FLUX_TASK_RANK"
    shows = ("jobs", "-a")

    def __init__(self, folder, uri):
        super().__init__(folder, {"FLUX_URI": uri, "FLUX_URI_RESOLVE_LOCAL": "t", "PATH": PATH})

    def call(self, *words, **how):
        return super().call("flux", *words, **how)

    def queued(self):
        return self.call("jobs", "-n", "-o", "{id.f58plain}").split()

    def distgpt(self, folder, *words):
        return super().distgpt(folder, *words).replace("ƒ", "f")

    def successor(self, job):
        return job.said().split()[-1].replace("ƒ", "f")


@contextmanager
def flux_instance(nodes=2, pretended=""):
    """Yield an instance that is ready for jobs; `pretended`: resources of a node, as options of `flux R encode`."""
    folder = Path(tempfile.mkdtemp(prefix="flux"))
    env = {**os.environ, "PATH": PATH}
    words = ["flux", "start", f"--test-size={nodes}", "--test-exit-mode=leader", f"--config-path={folder}"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    (folder / "own.toml").write_text(CONFIGURATION + PRETENDED.format(folder=folder) * bool(pretended))
    try:
        if pretended:
            described = ["flux", "R", "encode", f"--ranks=0-{nodes - 1}", *pretended.split()]
            (folder / "R").write_bytes(subprocess.check_output(described, env=env))
        with subprocess.Popen([*words, "sh", "-c", INITIAL], env=env, **pipes) as process:
            uri = process.stdout.readline().strip()
            assert uri.startswith("local://"), uri
            try:
                yield Instance(folder, uri)
            finally:
                process.stdin.close()
                process.wait(SECONDS_TO_END)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
