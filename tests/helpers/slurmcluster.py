"""A separate Slurm cluster of two nodes on this machine, with free ports. It requires root."""

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path

from schedulers import Scheduler, end_all, free_ports

DAEMONS = ("munged", "slurmctld", "slurmd")
PROGRAMS = (*DAEMONS, "setpriv", "sbatch", "srun", "scontrol", "scancel", "squeue")
# Debian's directories of daemons, which may be missing in PATH.
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"])
NODES = ("n1", "n2")
SECONDS_TO_START = 30

# A requeued job waits for its credential to expire, here after 5 seconds.
CONFIGURATION = """
ClusterName=distgpt SlurmctldHost=localhost(127.0.0.1) SlurmUser=root SlurmctldPort={ports[0]}
AuthType=auth/munge AuthInfo=socket={folder}/munge.socket,cred_expire=5 TaskPlugin=task/none
SlurmctldPidFile={folder}/slurmctld.pid SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log SlurmdLogFile={folder}/slurmd.%n.log
StateSaveLocation={folder}/state SlurmdSpoolDir={folder}/spool.%n ProctrackType=proctrack/pgid
JobAcctGatherType=jobacct_gather/none SelectType=select/cons_tres SelectTypeParameters=CR_Core
SchedulerParameters=sched_min_interval=0,sched_interval=1,bf_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio PreemptMode=REQUEUE ReturnToService=2 JobRequeue=1 KillWait=20
CompleteWait=0 MpiDefault=pmi2 SlurmdParameters=config_overrides
""".replace(" ", "\n")
CONFIGURATION += """\
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 RealMemory=100
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 RealMemory=100
PartitionName=low Nodes=n1,n2 Default=YES PriorityTier=1
PartitionName=patient Nodes=n1,n2 PriorityTier=1 GraceTime=20
PartitionName=high Nodes=n1,n2 PriorityTier=2 PreemptMode=OFF
"""


def lacking():
    if missing := [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]:
        return f"needs Slurm and munge ({', '.join(missing)}): apt install slurmctld slurmd slurm-client munge"
    return "" if os.geteuid() == 0 else "a Slurm of our own needs root"


class Cluster(Scheduler):
    system, submitted, element = "slurm", r"^Submitted batch job (\d+)", "{}_{}"
    shows = ("squeue", "-l")

    def __init__(self, folder):
        super().__init__(folder, {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH})

    def queued(self):
        return self.call("squeue", "-h").split()

    def job(self, number):
        words = self.call("scontrol", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)


# Nodes with two real CPUs, so that ranks can be bound.
BINDING = {"task/none": "task/affinity", "CPUs=8": "Sockets=1 CoresPerSocket=2 ThreadsPerCore=1"}


@contextmanager
def slurm_cluster(changed=()):
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="slurm"))  # a short path for sockets
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.chmod(0o755)
        cluster = Cluster(folder)
        stack.callback(end_all, f"SLURM_CONF={folder / 'slurm.conf'}")
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        (folder / "state").mkdir()
        host = socket.gethostname().split(".")[0]
        text = CONFIGURATION.format(folder=folder, host=host, ports=free_ports(3))
        for words in changed:
            text = text.replace(words, changed[words])
        (folder / "slurm.conf").write_text(text)
        files = {"key-file": key, "socket": folder / "munge.socket", "pid-file": folder / "munged.pid"}
        files |= {"log-file": folder / "munged.log", "seed-file": folder / "munge.seed"}
        _start(cluster, stack, "munged", "--foreground", *(f"--{name}={at}" for name, at in files.items()))
        cluster.wait_for((folder / "munge.socket").exists, SECONDS_TO_START)
        _start(cluster, stack, "slurmctld", "-D", "-c")
        for node in NODES:
            _start(cluster, stack, "slurmd", "-D", "-c", "-N", node)
        cluster.wait_for(lambda: _idle(cluster) == len(NODES), SECONDS_TO_START)
        yield cluster


def _start(cluster, stack, *words):
    program = [shutil.which(words[0], path=PATH), *words[1:]]
    log = stack.enter_context((cluster.folder / f"{words[0]}{len(words)}.log").open("ab"))
    env = {**os.environ, **cluster.environ}
    bound = ["setpriv", "--pdeathsig", "KILL", "--", *program]
    daemon = subprocess.Popen(bound, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    stack.callback(_end, daemon)


def _end(daemon):
    daemon.terminate()
    try:
        daemon.wait(5)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _idle(cluster):
    told = cluster.call("sinfo", "-h", "-N", "-p", "low", "-t", "idle", "-o", "%N", check=False)
    return len(told.stdout.split())
