"""A separate volclava, an open clone of LSF, of one host on this machine, with free ports. It requires root."""

import os
import shutil
import signal
import socket
import tempfile
from contextlib import contextmanager
from pathlib import Path

from schedulers import Scheduler, end_all, free_ports, signal_all

PREFIX = Path("/opt/volclava")  # prefix of a local build
DAEMONS = ("lim", "res", "sbatchd", "mbatchd", "pim", "eauth")
SECONDS_TO_START = 60
TO_TERM = 4  # seconds from INT to TERM and from TERM to KILL; LSF's own default is 10
# Options of LSF 10 that its clone rejects; a test or the queue replaces them.
NOT_ITS_OWN = "-(wa|wt|Q) "

CONFIGURATION = """
LSF_SERVERDIR={prefix}/sbin LSF_BINDIR={folder}/bin LSB_SHAREDIR={folder}/work LSF_ENVDIR={folder}
LSF_CONFDIR={folder} LSB_CONFDIR={folder} LSF_LOGDIR={folder}/log LSF_TMPDIR={folder}/tmp
LSF_PIM_INFODIR={folder}/tmp LSF_LOG_MASK=LOG_WARNING LSF_LIM_PORT={ports[0]} LSF_RES_PORT={ports[1]}
LSB_MBD_PORT={ports[2]} LSB_SBD_PORT={ports[3]} LSF_AUTH=eauth LSB_MAILTO=!U LSF_ROOT_REX=all
LSF_PIM_SLEEPTIME=1 LSF_PIM_SLEEPTIME_UPDATE=y
""".replace(" ", "\n").lstrip()


def section(name, *lines):
    return "\n".join([f"Begin {name}", *lines, f"End {name}", ""])


FILES = {
    "lsf.shared": section("Cluster", "ClusterName", "test")
    + section("HostType", "TYPENAME", "linux")
    + section("HostModel", "MODELNAME CPUFACTOR ARCHITECTURE", "any 100 (x86_64)")
    + section("Resource", "RESOURCENAME TYPE INTERVAL INCREASING DESCRIPTION", "cs Boolean () () (any)"),
    # Hosts accept jobs up to a load of 100.
    "lsf.cluster.test": section("ClusterAdmins", "Administrators = root")
    + section("Host", "HOSTNAME model type server r1m RESOURCES", "{host} any linux 1 100 (cs)"),
    "lsf.task": section("RemoteTasks", "wc"),
    "lsb.users": "",
    "lsb.hosts": section("Host", "HOST_NAME MXJ r1m", "default 8 ()"),
    "lsb.params": section(
        *("Parameters", "DEFAULT_QUEUE = normal", "MBD_SLEEP_TIME = 1", "SBD_SLEEP_TIME = 1"),
        *("JOB_ACCEPT_INTERVAL = 0", "JOB_TERMINATE_INTERVAL = {to_term}"),
    ),
    "lsb.queues": section("Queue", "QUEUE_NAME = normal", "PRIORITY = 30", "REQUEUE_EXIT_VALUES = 99"),
}


def lacking():
    if not all((PREFIX / "sbin" / name).exists() for name in DAEMONS):
        return "needs volclava, built with --prefix=/opt/volclava"
    return "" if os.geteuid() == 0 else "a volclava of our own needs root"


class Lava(Scheduler):
    system, submitted = "lsf", r"^Job <(\d+)> is submitted"
    shows = ("bjobs", "-al")
    logs_at = "log/*"

    def __init__(self, folder):
        path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
        super().__init__(folder, {"LSF_ENVDIR": str(folder), "PATH": path, "HOME": str(folder)})

    def warn(self, job):
        """Send URG to all processes of a job like LSF's -wa, which the clone lacks."""
        own = {"LSF_ENVDIR": self.folder, "LSB_JOBID": job.number, "LSB_JOBINDEX": job.element or 0}
        signal_all(signal.SIGURG, *(f"{name}={value}" for name, value in own.items()))

    def states(self):
        rows = [line.split() for line in self.call("bjobs", "-aw", check=False).stdout.splitlines()[1:]]
        return [(int(row[0]), row[2]) for row in rows]

    def queued(self):
        return [job for job, state in self.states() if state not in ("DONE", "EXIT")]


@contextmanager
def lava():
    folder = Path(tempfile.mkdtemp(prefix="lava"))
    cluster = Lava(folder)
    try:
        _prepare(folder)
        for name in ("lim", "res", "sbatchd"):  # sbatchd starts mbatchd
            cluster.call(PREFIX / "sbin" / name, "-d", folder)
        is_ready = lambda: " ok " in cluster.call("bhosts", check=False).stdout  # noqa: E731
        cluster.wait_for(is_ready, SECONDS_TO_START)
        yield cluster
    finally:
        for _ in range(2):  # sbatchd starts mbatchd again
            end_all(f"LSF_ENVDIR={folder}")
        shutil.rmtree(folder, ignore_errors=True)


def _prepare(folder):
    folder.chmod(0o755)
    for name in ("bin", "log", "tmp", "work/logdir"):
        (folder / name).mkdir(parents=True)
    for program in (PREFIX / "bin").iterdir():
        (folder / "bin" / program.name).symlink_to(program)
    bsub = folder / "bin" / "bsub"
    bsub.unlink()
    bsub.write_text(f"#!/bin/sh\ngrep -Ev '^#BSUB {NOT_ITS_OWN}' | exec {PREFIX}/bin/bsub \"$@\"\n")
    bsub.chmod(0o755)
    values = {"prefix": PREFIX, "folder": folder, "ports": free_ports(4)}
    (folder / "lsf.conf").write_text(CONFIGURATION.format(**values))
    for name, text in FILES.items():
        (folder / name).write_text(text.format(host=socket.gethostname(), to_term=TO_TERM))
