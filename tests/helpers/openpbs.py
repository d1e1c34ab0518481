"""An OpenPBS of two hosts on this machine: a server, and a pbs_mom in each of two network namespaces.

Root alone can start one. It knows nothing of a PBS that is there already.
"""

import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import hosts

PREFIXES = ("/opt/pbs", "/usr")  # where a build of one's own and packages put it
SERVICE = "postgres"  # the user of its database
SECONDS_TO_START = 60
NODES = ("node1", "node2")  # the server is on the first
USER, UID = "trainer", 64321  # known in the namespaces alone: pbs_mom overlooks the processes of root

CONFIGURATION = """\
PBS_EXEC={prefix}
PBS_HOME={home}
PBS_SERVER={server}
PBS_START_SERVER={serves}
PBS_START_SCHED={serves}
PBS_START_COMM={serves}
PBS_START_MOM=1
PBS_DATA_SERVICE_PORT={port}
"""
SERVER = """\
set server job_history_enable = True
set server scheduler_iteration = 2
set server job_requeue_timeout = 10
"""


def prefix():
    """Where it is installed; None without one."""
    here = (Path(root) for root in PREFIXES)
    return next((root for root in here if all((root / "sbin" / name).exists() for name in DAEMONS)), None)


DAEMONS = ("pbs_server", "pbs_sched", "pbs_comm", "pbs_mom")


def lacking():
    """Why there can be none here; "" if there can."""
    return hosts.lacking() or ("" if prefix() else "needs OpenPBS, built with --prefix=/opt/pbs")


class Cluster:
    """Its commands run in a namespace of its nodes, as root or as the user whose jobs it runs."""

    def __init__(self, folder, spaces, ssh):
        self.folder, self.spaces, self.ssh = folder, spaces, ssh
        self.prefix = prefix()
        self.path = f"{self.prefix}/bin:{os.environ['PATH']}"
        self.home = folder / USER

    def configuration(self, node):
        return self.folder / f"{node}.conf"

    def spool(self, node):
        return self.folder / node

    def inside(self, node):
        """The words before a program that runs on a node."""
        space = self.spaces[NODES.index(node)]
        environ = f"env PBS_CONF_FILE={self.configuration(node)} PATH={self.path}"
        script = f"hostname {node}; {_opened(self.folder)} exec {environ} \"$0\" \"$@\""
        return ["env", "-u", "TMPDIR", *hosts.inside(space), "unshare", "-m", "sh", "-c", script]

    def call(self, *words, node=NODES[0], check=True, given=None, cwd=None):
        """Run a command of it as root; returns what it wrote."""
        words = [*self.inside(node), *map(str, words)]
        done = subprocess.run(words, input=given, cwd=cwd, capture_output=True, text=True, timeout=120)
        assert not check or done.returncode == 0, (words, done.returncode, done.stdout, done.stderr, self.logs())
        return done.stdout if check else done

    def by_user(self, *words, **how):
        """Run a command as the user; returns what it wrote."""
        groups = ["--reuid", str(UID), "--regid", str(UID), "--clear-groups"]
        who = ["env", f"HOME={self.home}", f"USER={USER}", f"LOGNAME={USER}"]
        return self.call("setpriv", *groups, *who, *words, **how)

    def place(self, name):
        """A new folder of the user."""
        path = self.home / name
        path.mkdir()
        os.chown(path, UID, UID)
        return path

    def logs(self):
        """The last lines of what its daemons have written."""
        files = sorted(self.folder.glob("*/*_logs/*"))
        return "".join(f"{file}:\n" + "".join(file.read_text().splitlines(True)[-15:]) for file in files)

    def queued(self):
        """The numbers of its jobs that have not ended, as in "12" or "12[]"."""
        return {line.split(".")[0] for line in self.call("qstat").splitlines()[2:]}

    def attribute(self, number, name):
        """An attribute of a job, also of one that has ended; "" without it."""
        shown = self.call("qstat", "-xf", number).replace("\n\t", "")
        found = re.search(rf"^    {re.escape(name)} = (.*)$", shown, re.M)
        return found[1] if found else ""

    def wait_for(self, what, seconds=150):
        deadline = time.monotonic() + seconds
        while not (found := what()):
            assert time.monotonic() < deadline, self.call("qstat", "-s", check=False).stdout
            time.sleep(0.1)
        return found

    def daemon(self, name, node=NODES[0]):
        self.call(self.prefix / "sbin" / name, node=node)

    def prepare(self, node, port):
        """Write what a node needs before its first start."""
        serves = int(node == NODES[0])
        values = {"prefix": self.prefix, "home": self.spool(node), "server": NODES[0]}
        self.configuration(node).write_text(CONFIGURATION.format(serves=serves, port=port, **values))
        if serves:
            self.call(self.prefix / "libexec/pbs_habitat", node=node)
        else:
            version = self.call("qstat", "--version", node=node).split()[-1]
            words = ("execution", version, self.prefix, self.spool(node), "", "sameconf")
            self.call(self.prefix / "libexec/pbs_postinstall", *words, node=node)
        environment = self.spool(node) / "pbs_environment"
        # A job submits its successor: it has to find the server's commands.
        more = f"PBS_CONF_FILE={self.configuration(node)}\nPATH={self.path}\n"
        environment.write_text(more)
        # One disk for both: no output is copied over the network.
        with (self.spool(node) / "mom_priv/config").open("a") as file:
            file.write("$usecp *:/ /\n")


@contextmanager
def open_pbs():
    """A cluster whose two nodes are ready for jobs, and gone afterwards."""
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="pbs", dir="/var/spool"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.chmod(0o755)  # the database has a user of its own
        _, _, spaces = stack.enter_context(hosts.joined_hosts(folder, partial(_connected, folder)))
        cluster = Cluster(folder, spaces, folder / "ssh")
        port = _free_port()
        cluster.home.mkdir()
        os.chown(cluster.home, UID, UID)
        for node in NODES:
            cluster.prepare(node, port)
        for name in ("pbs_comm", "pbs_mom", "pbs_sched", "pbs_server"):
            cluster.daemon(name)
        cluster.daemon("pbs_mom", NODES[1])
        cluster.call("qmgr", given=SERVER + "".join(f"create node {node}\n" for node in NODES[1:]))
        for node in NODES:
            cluster.wait_for(lambda node=node: _is_free(cluster, node), SECONDS_TO_START)
        yield cluster


def _is_free(cluster, node):
    return "state = free" in cluster.call("pbsnodes", node, check=False).stdout


def _connected(folder, stack, spaces):
    """Join the two hosts by a cable, and tell each the other's name."""
    hosts.plain_link(stack, spaces)
    names = [f"{hosts.NET}.{i} {node}\n" for i, node in enumerate(NODES, 1)]
    for space in spaces:
        own = Path("/etc/netns", space)  # from here `ip netns exec` takes the files of a namespace
        own.mkdir(parents=True)
        stack.callback(shutil.rmtree, own)
        (own / "hosts").write_text("127.0.0.1 localhost\n" + "".join(names))
        for file, line in (
            ("passwd", f"{USER}:x:{UID}:{UID}::{folder / USER}:/bin/bash\n"),
            ("group", f"{USER}:x:{UID}:\n"),
        ):
            (own / file).write_text(Path("/etc", file).read_text() + line)


def _opened(folder):
    """The shell's commands that let the user get at our Python, also where it lies in a folder of root's alone."""
    needed = [Path(sys.base_prefix), Path(sys.prefix), hosts.HERE.parents[1]]
    closed = [above for path in needed for above in path.parents if not above.stat().st_mode & stat.S_IXOTH]
    lines = []
    for above in closed[-1:]:
        real = folder / "real"
        real.mkdir(exist_ok=True)
        lines += [f"mount --bind {above} {real}", f"mount -t tmpfs -o mode=755 opened {above}"]
        for path in needed:
            if path.is_relative_to(above):
                inner = real / path.relative_to(above)
                lines += [f"mkdir -p {path}", f"mount --bind {inner} {path}"]
    return "".join(f"{line} && " for line in lines)


def _free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
