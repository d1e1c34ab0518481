"""A separate OpenPBS of two hosts on this machine: network namespaces with a pbs_mom each. It requires root."""

import os
import re
import shutil
import stat
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import hosts
from schedulers import Scheduler, free_ports

PREFIXES = ("/opt/pbs", "/usr")  # prefixes of a local build and of packages
DAEMONS = ("pbs_server", "pbs_sched", "pbs_comm", "pbs_mom")
SECONDS_TO_START = 60
NODES = ("node1", "node2")  # the server is on the first
USER, UID = "trainer", 64321  # only in the namespaces; pbs_mom ignores root's processes
REPOSITORY = Path(__file__).resolve().parents[2]

CONFIGURATION = """
PBS_EXEC={prefix} PBS_HOME={home} PBS_SERVER={server} PBS_START_SERVER={serves} PBS_START_SCHED={serves}
PBS_START_COMM={serves} PBS_START_MOM=1 PBS_DATA_SERVICE_PORT={port}
""".replace(" ", "\n").lstrip()
# A job on any node may submit its successor (flatuid), and the scheduler runs often.
SERVER = """\
set server flatuid = True
set server job_history_enable = True
set server scheduler_iteration = 2
set server node_fail_requeue = 2
"""
# pbs_tmrsh starts no shell, which would remove the quotes of MPICH's launcher.
REMOTE_START = """\
#!/bin/sh
host=$1
shift
exec pbs_tmrsh "$host" /bin/sh -c "$*"
"""


def prefix():
    here = (Path(root) for root in PREFIXES)
    return next((root for root in here if all((root / "sbin" / name).exists() for name in DAEMONS)), None)


def lacking():
    if reason := hosts.lacking():
        return reason
    if (found := prefix()) is None:
        return "needs OpenPBS, built with --prefix=/opt/pbs"
    if not (found / "sbin/pbs_iff").stat().st_mode & stat.S_ISUID:
        return "needs pbs_iff of OpenPBS with its set-uid bit, as its INSTALL says"
    return ""


class Cluster(Scheduler):
    system, submitted = "pbs", r"^(\d+)(?:\[\])?\.node1$"
    element = "{}[{}]"
    shows = ("qstat", "-xs")
    logs_at = "*/*_logs/*"

    def __init__(self, folder, spaces):
        super().__init__(folder, {})
        self.spaces = spaces
        self.prefix = prefix()
        self.path = f"{self.prefix}/bin:{os.environ['PATH']}"
        self.home = folder / USER

    def spool(self, node):
        return self.folder / node

    def configuration(self, node):
        return self.folder / f"{node}.conf"

    def inside(self, node):
        space = self.spaces[NODES.index(node)]
        environ = f"env PBS_CONF_FILE={self.configuration(node)} PATH={self.path} PYTHONPATH={REPOSITORY}"
        script = f'hostname {node}; {_opened(self.folder)}exec {environ} "$0" "$@"'
        return [*hosts.inside(space), "unshare", "-m", "sh", "-c", script]

    def call(self, *words, node=NODES[0], **how):
        return super().call(*self.inside(node), *words, **{"timeout": 120, **how})

    def by_user(self, *words, **how):
        who = ["setpriv", "--reuid", UID, "--regid", UID, "--clear-groups"]
        environ = ["env", f"HOME={self.home}", f"USER={USER}", f"LOGNAME={USER}"]
        return self.call(*who, *environ, *words, **how)

    def place(self, folder):
        path = self.home / f"{folder.name} 1"
        path.mkdir()
        os.chown(path, UID, UID)
        return path

    def output(self, job):
        """PBS delivers it when the job has ended."""
        return "my-run-s.o" + ".".join(filter(None, (job.number, job.element)))

    def distgpt(self, folder, *words):
        return self.by_user(sys.executable, "-m", "distgpt", *words, cwd=folder)

    def submit(self, folder, *options, **how):
        """Add a line that makes MPICH start remote ranks through PBS. An installed Grid Engine also has a qsub."""
        starts = f"HYDRA_LAUNCHER=rsh HYDRA_LAUNCHER_EXEC={self.folder / 'remote-start'}"
        return super().submit(folder, "--setup", f"export PATH={self.prefix}/bin:$PATH {starts}", *options, **how)

    def queued(self):
        return self.call("qstat").splitlines()[2:]

    def attribute(self, number, name):
        shown = self.call("qstat", "-xf", number).replace("\n\t", "")
        found = re.search(rf"^    {re.escape(name)} = (.*)$", shown, re.M)
        return found[1] if found else ""

    def daemon(self, name, node=NODES[0]):
        self.call(self.prefix / "sbin" / name, node=node)

    def lose(self, node):
        hosts.kill_all_in(self.spaces[NODES.index(node)])

    def return_node(self, node):
        self.daemon("pbs_mom", node)
        self.wait_for(partial(self.is_free, node), SECONDS_TO_START)

    def is_free(self, node):
        return "state = free" in self.call("pbsnodes", node, check=False).stdout

    def prepare(self, node, port):
        serves = int(node == NODES[0])
        values = {"prefix": self.prefix, "home": self.spool(node), "server": NODES[0], "port": port}
        self.configuration(node).write_text(CONFIGURATION.format(serves=serves, **values))
        if serves:
            self.call(self.prefix / "libexec/pbs_habitat", node=node)
        else:
            version = self.call("qstat", "--version", node=node).split()[-1]
            words = ("execution", version, self.prefix, self.spool(node), "", "sameconf")
            self.call(self.prefix / "libexec/pbs_postinstall", *words, node=node)
        # Jobs need the commands of this PBS, and this repository.
        environ = {"PATH": self.path, "PBS_CONF_FILE": self.configuration(node), "PYTHONPATH": REPOSITORY}
        lines = "".join(f"{name}={value}\n" for name, value in environ.items())
        (self.spool(node) / "pbs_environment").write_text(lines)
        with (self.spool(node) / "mom_priv/config").open("a") as file:
            file.write("$usecp *:/ /\n")  # all nodes share a disk


@contextmanager
def open_pbs():
    with ExitStack() as stack:
        # PBS rejects directories below /tmp, which all users may write to.
        folder = Path(tempfile.mkdtemp(prefix="pbs", dir="/var/spool"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.chmod(0o755)  # its database has a separate user
        _, _, spaces = stack.enter_context(hosts.joined_hosts(folder, partial(_connected, folder)))
        cluster = Cluster(folder, spaces)
        cluster.home.mkdir()
        os.chown(cluster.home, UID, UID)
        (folder / "remote-start").write_text(REMOTE_START)
        (folder / "remote-start").chmod(0o755)
        [port] = free_ports(1)
        for node in NODES:
            cluster.prepare(node, port)
        for name in ("pbs_comm", "pbs_mom", "pbs_sched", "pbs_server"):
            cluster.daemon(name)
        cluster.daemon("pbs_mom", NODES[1])
        cluster.call("qmgr", input=SERVER + f"create node {NODES[1]}\n")
        for node in NODES:
            cluster.wait_for(partial(cluster.is_free, node), SECONDS_TO_START)
        yield cluster


def _connected(folder, stack, spaces):
    hosts.plain_link(stack, spaces)
    names = "".join(f"{hosts.NET}.{i} {node}\n" for i, node in enumerate(NODES, 1))
    for space in spaces:
        own = Path("/etc/netns", space)  # `ip netns exec` puts these in place of the files in /etc
        own.mkdir(parents=True)
        stack.callback(shutil.rmtree, own)
        (own / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        user = f"{USER}:x:{UID}:{UID}::{folder / USER}:/bin/bash\n"
        (own / "passwd").write_text(Path("/etc/passwd").read_text() + user)
        (own / "group").write_text(Path("/etc/group").read_text() + f"{USER}:x:{UID}:\n")


def _opened(folder):
    """Return shell commands that give the user access to this Python, even in root's home."""
    needed = [Path(sys.base_prefix), Path(sys.prefix), REPOSITORY]
    closed = [above for path in needed for above in path.parents if not above.stat().st_mode & stat.S_IXOTH]
    if not closed:
        return ""
    above, real = min(closed), folder / "real"
    real.mkdir(exist_ok=True)
    lines = [f"mount --bind {above} {real}", f"mount -t tmpfs -o mode=755 opened {above}"]
    for path in needed:
        if path.is_relative_to(above):
            lines += [f"mkdir -p {path}", f"mount --bind {real / path.relative_to(above)} {path}"]
    return "".join(f"{line} && " for line in lines)
