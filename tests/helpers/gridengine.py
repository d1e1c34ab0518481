"""A separate Grid Engine of one host on this machine, with free ports. It requires root."""

import os
import shutil
import socket
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path

from schedulers import Scheduler, end_all, free_ports

LIBRARY = Path("/usr/lib/gridengine")  # Debian's daemons
SHARED = Path("/usr/share/gridengine")
INSTALLED = Path("/var/lib/gridengine")
SECONDS_TO_START = 30


def lines(words):
    rows = iter(words.split())
    return "".join(f"{name:<18} {value}\n" for name, value in zip(rows, rows, strict=True))


BOOTSTRAP = lines("""
admin_user none default_domain none ignore_fqdn true spooling_method classic spooling_lib libspoolc
spooling_params {spool} binary_path /usr/sbin qmaster_spool_dir {folder}/spool/qmaster security_mode none
listener_threads 2 worker_threads 2 scheduler_threads 1
""")
ENVIRONMENT = lines("""
pe_name mpi slots 999 user_lists NONE xuser_lists NONE start_proc_args NONE stop_proc_args NONE
allocation_rule $fill_up control_slaves TRUE job_is_first_task FALSE urgency_slots min
accounting_summary FALSE qsort_args NONE
""")
QUEUE = {"qname": "all.q", "hostlist": "localhost", "slots": "8", "pe_list": "mpi", "shell": "/bin/bash"}
QUEUE |= {"load_thresholds": "NONE", "notify": "00:00:20", "rerun": "TRUE"}
SCHEDULER = {"schedule_interval": "0:0:1", "flush_submit_sec": "1", "flush_finish_sec": "1"}


def lacking():
    if not all((LIBRARY / name).exists() for name in ("sge_qmaster", "sge_execd", "qsub")):
        return "needs Grid Engine: apt install gridengine-master gridengine-exec gridengine-client"
    return "" if os.geteuid() == 0 else "a Grid Engine of our own needs root"


class Cell(Scheduler):
    system, submitted = "sge", r"Your job(?:-array)? (\d+)"
    shows = ("qstat", "-f")

    def __init__(self, folder):
        ports = dict(zip(("SGE_QMASTER_PORT", "SGE_EXECD_PORT"), map(str, free_ports(2)), strict=True))
        path = os.pathsep.join([str(LIBRARY), os.environ["PATH"]])
        super().__init__(folder, {"SGE_ROOT": str(folder), "SGE_CELL": "default", "PATH": path, **ports})

    def queued(self):
        return {int(line.split()[0]) for line in self.call("qstat").splitlines()[2:]}

    def changed(self, show, change, values):
        rows = [line.split(None, 1) for line in self.call("qconf", show).splitlines() if line[:1] != " "]
        file = self.folder / "changed"
        file.write_text("".join(f"{row[0]} {values.get(row[0], row[-1])}\n" for row in rows))
        self.call("qconf", change, file)


@contextmanager
def grid_engine():
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="sge"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        cell = Cell(folder)
        spool = _prepared(folder)
        for kind, source in (
            ("configuration", _configuration(folder)),
            ("complexes", SHARED / "util/resources/centry"),
            ("usersets", SHARED / "util/resources/usersets"),
            ("managers", "root"),
        ):
            if kind == "configuration":
                cell.call(LIBRARY / "spoolinit", "classic", "libspoolc", spool, "init")
            cell.call(LIBRARY / "spooldefaults", kind, source)
        stack.callback(end_all, f"SGE_ROOT={folder}")
        cell.call(LIBRARY / "sge_qmaster")
        cell.wait_for(lambda: cell.call("qconf", "-sh", check=False).returncode == 0, SECONDS_TO_START)
        cell.call("qconf", "-as", "localhost")
        cell.call(LIBRARY / "sge_execd")
        (folder / "pe").write_text(ENVIRONMENT)
        cell.call("qconf", "-Ap", folder / "pe")
        cell.changed("-sq", "-Aq", QUEUE)
        cell.changed("-ssconf", "-Msconf", SCHEDULER)
        cell.wait_for(lambda: "lx-amd64" in cell.call("qstat", "-f"), SECONDS_TO_START)
        yield cell


def _prepared(folder):
    folder.chmod(0o755)
    common = folder / "default" / "common"
    common.mkdir(parents=True)
    (folder / "spool" / "qmaster").mkdir(parents=True)
    (folder / "spool" / "execd").mkdir()
    for name in ("bin", "lib", "util", "utilbin"):
        (folder / name).symlink_to(INSTALLED / name)
    spool = f"{common};{folder}/spool/qmaster"
    (common / "bootstrap").write_text(BOOTSTRAP.format(folder=folder, spool=spool))
    (common / "act_qmaster").write_text("localhost\n")
    (common / "host_aliases").write_text(f"localhost {socket.gethostname()}\n")
    return spool


def _configuration(folder):
    own = {"execd_spool_dir": folder / "spool/execd", "min_uid": 0, "min_gid": 0}
    own |= {"load_report_time": "00:00:02"}
    rows = [line.split(None, 1) for line in (SHARED / "default-configuration").read_text().splitlines()]
    path = folder / "configuration"
    rows = [row for row in rows if len(row) == 2 and row[0] != "#"]
    path.write_text("".join(f"{name} {own.get(name, value)}\n" for name, value in rows))
    return path
