"""Common code of batch systems in tests, and their jobs."""

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from conftest import distgpt, succeeded

# Debian's Open MPI, if it is the default MPI. It lacks PBS's library.
_IS_OPEN_MPIS = Path(shutil.which("mpiexec") or "none").resolve().name == "orterun"
OPEN_MPI = next(Path("/usr/lib").glob("*/libmpi.so.40"), None) if _IS_OPEN_MPIS else None
RUN = "my run's"
STEPS = 80
_USR1 = 1 << signal.SIGUSR1 - 1  # signal mask
_MODEL = "--n-layer 2 --n-head 2 --n-embd 64 --seq-len 64 --data story --tokenizer word --batch-size 16"
WORDS = ["train", *_MODEL.split(), *f"--dtype float64 --lr 1e-3 --steps {STEPS} --val-fraction 0.1".split()]
WORDS += ["--save-every", "20"]


class Scheduler:
    system = ""  # --system
    submitted = ""  # the line of its answer that has a job's number
    sign = "PMI_RANK"  # a variable that each rank has
    element = "{}.{}"  # a job and its element in names of files
    shows = ()  # the command that lists its jobs
    logs_at = "*.log"  # the daemons' logs

    def __init__(self, folder, environ):
        self.folder, self.environ = folder, environ

    def call(self, *words, check=True, **how):
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

    def finish(self):
        self.wait_for(lambda: not self.queued())

    def logs(self):
        return {log.name: log.read_text().splitlines()[-8:] for log in self.folder.glob(self.logs_at)}

    def distgpt(self, folder, *words):
        return succeeded(*words, cwd=folder, env=self.environ, by=distgpt).stdout

    def submit(self, folder, *options, words=WORDS):
        head = ["submit", "--system", self.system, "--submit", *options]
        said = self.distgpt(folder, *head, "--", *words, "--out", RUN)
        return [BatchJob(self, folder, number) for number in re.findall(self.submitted, said, re.MULTILINE)]

    def place(self, folder):
        return folder

    def output(self, job):
        return f"my-run-s-{job.called}.log"

    def successor(self, job):
        return str(int(job.number) + 1)


class BatchJob:
    def __init__(self, cluster, folder, number, element="", run=""):
        self.cluster, self.folder, self.number, self.element = cluster, folder, number, element
        self.called = cluster.element.format(number, element) if element else number
        self.run = folder / RUN / (run or element)
        self.begun_with = self._checkpoints()

    def _checkpoints(self):
        return {path.name for path in (self.run / "checkpoints").glob("step-*")}

    def newest(self):
        return int(max(self._checkpoints())[5:])

    def said(self):
        path = self.folder / self.cluster.output(self)
        self.cluster.wait_for(path.exists)
        return path.read_text()

    def log(self, attempt=0):
        path = self.folder / f"my-run-s-{self.called}.{attempt}.log"
        self.cluster.wait_for(path.exists)
        return path.read_text()

    def followed(self):
        return [path.name for path in self.run.glob("followed-*")]

    def successor(self):
        run = self.run.name if self.run.name != RUN else ""
        return BatchJob(self.cluster, self.folder, self.cluster.successor(self), run=run)

    @contextmanager
    def held(self, sign="", count=2):
        """Stop the ranks between a checkpoint and the last step, and resume them at the end."""
        self.cluster.wait_for(lambda: self._checkpoints() - self.begun_with)
        ranks = self.cluster.wait_for(lambda: self._ranks(sign or self.cluster.sign))
        assert len(ranks) == count
        for rank in ranks:
            os.kill(int(rank.name), signal.SIGSTOP)
        while any(map(_runs, ranks)):  # a running rank would handle a pending signal
            time.sleep(0.001)
        try:
            yield ranks
        finally:
            for rank in ranks:
                with suppress(ProcessLookupError):
                    os.kill(int(rank.name), signal.SIGCONT)

    def _ranks(self, sign):
        """Return the training processes in the job's directory, by a variable of their launcher."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                is_train = b"train" in (process / "cmdline").read_bytes().split(b"\0")
                is_rank = sign.encode() in (process / "environ").read_bytes()
                if is_train and is_rank and (process / "cwd").readlink() == self.folder:
                    found.append(process)
        return found


def _runs(rank):
    with suppress(OSError):
        return (rank / "stat").read_text().rpartition(")")[2].split()[0] not in "TtZX"
    return False


def variable(process, name):
    rows = (process / "environ").read_bytes().split(b"\0")
    return next(row.partition(b"=")[2].decode() for row in rows if row.startswith(f"{name}=".encode()))


def is_asked(rank):
    with suppress(OSError):
        masks = re.findall(r"^(?:Sig|Shd)Pnd:\s+(\w+)", (rank / "status").read_text(), re.MULTILINE)
        return any(int(mask, 16) & _USR1 for mask in masks)
    return True


def signal_all(number, *mine):
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            variables = (process / "environ").read_bytes().split(b"\0")
            if {*map(str.encode, mine)} <= {*variables} and int(process.name) != os.getpid():
                os.kill(int(process.name), number)


def end_all(mine):
    signal_all(signal.SIGKILL, mine)


def free_ports(count):
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
