"""Hosts on one machine: network namespaces with an sshd each, and a cable or a bridge between them.

All names have this process's number in them, so that runs at the same time leave each other's hosts alone.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

BIN = Path(sys.executable).parent
TOOLS = ("ip", "ssh", "ssh-keygen", "unshare")
SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
MPIRUN = BIN / "mpiexec.hydra"
NET = "10.77.21"  # no other host sees its addresses
# All hosts are one machine, which MPICH's UCX notices: it would go through shared memory.
OVER_TCP = "UCX_TLS=tcp,self UCX_NET_DEVICES=eth0"
# MPICH's ranks spin while they wait. Where there are more of them than cores, they sleep instead.
SHARING_CORES = "MPIR_CVAR_POLLS_BEFORE_YIELD=16 MPIR_CVAR_ENABLE_HEAVY_YIELD=1"


class Unavailable(Exception):
    """This system has no such thing, for the reason given."""


def lacking():
    """Why there can be no hosts here; "" if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not (all(map(shutil.which, TOOLS)) and Path(SSHD).exists()):
        return "needs iproute2 and openssh"
    return "" if MPIRUN.exists() else "needs the mpich wheel"


def call(*words):
    subprocess.run(list(map(str, words)), check=True, capture_output=True)


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def start_sshd(folder, space, name, alone=False, **more):
    """A daemon in this namespace, whose sessions call their host `name`; `more` of its options.

    `alone`: it sees no processes but its own, and its end is not theirs.
    """
    Path("/run/sshd").mkdir(exist_ok=True)
    options = {
        "AuthorizedKeysFile": folder / "user.pub",
        "StrictModes": "no",
        "PermitRootLogin": "yes",
        "UsePAM": "no",
        "PidFile": "none",
        **more,
    }
    flags = " ".join(shlex.join(["-o", f"{key}={value}"]) for key, value in options.items())
    daemon = f"{SSHD} -D -f /dev/null -h {folder / 'host'} {flags}"
    start = f"hostname {name}; exec {daemon}"
    if alone:
        start = f"hostname {name}; {daemon} & exec sleep infinity"
    return subprocess.Popen([*inside(space, alone), "sh", "-c", start])


def inside(space, alone=False):
    """The words that start a program in a namespace; `alone`: where it is the first of all processes."""
    processes = ["-p", "-f", "--mount-proc", "--kill-child"] if alone else []
    return ["ip", "netns", "exec", space, "unshare", "-u", *processes]


def ssh_program(folder):
    """An ssh that gets into those without asking."""
    known = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
    return program(folder / "ssh", f'exec {shutil.which("ssh")} -i {folder / "user"} {known} "$@"')


def program(path, script):
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@contextmanager
def namespaces(word, count):
    """New ones by name. At the end whatever runs in them is killed, and they are gone."""
    made = []
    try:
        for i in range(1, count + 1):
            space = f"{word}{os.getpid()}-{i}"
            made_by("namespace", space, "ip", "netns", "add", space)
            made.append(space)
        yield made
    finally:
        for space in made:
            kill_all_in(space)
            wait_for(lambda space=space: is_gone(space))


def is_gone(space):
    """Take a namespace away. Linux says it is busy while somebody just starts a program in another one."""
    subprocess.run(["ip", "netns", "del", space], capture_output=True)
    return not Path("/run/netns", space).exists()


@contextmanager
def device(name, *words):
    """A new network device, which is taken away at the end if it was not lost with its namespace."""
    made_by("network device", name, "ip", *words)
    try:
        yield name
    finally:
        subprocess.run(["ip", "link", "del", name], capture_output=True)


def made_by(kind, name, *words):
    """Make a thing by a command; it is not ours if there was one of this name before."""
    try:
        call(*words)
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode().strip()
        if "File exists" in said or "resource busy" in said:
            raise Unavailable(f"a {kind} {name} is there already, perhaps left by a killed run") from error
        raise Unavailable(f"this system does not let us make the {kind} {name}: {said}") from error


def inhabitants(space):
    """The numbers of all processes in a namespace."""
    told = subprocess.run(["ip", "netns", "pids", space], check=True, capture_output=True, text=True)
    return [int(word) for word in told.stdout.split()]


def kill_all_in(space):
    """What a killed mpirun left behind, too."""
    deadline = time.monotonic() + 5
    while (left := inhabitants(space)) and time.monotonic() < deadline:
        for number in left:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        time.sleep(0.05)


@contextmanager
def running(processes):
    """Those in the list at the end are killed."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextmanager
def joined_hosts(folder, connect, count=2, ranks=1, alone=False):
    """An mpirun on the first of some hosts, a hostfile with so many ranks on each, and the hosts' namespaces.

    `connect(stack, spaces)` makes what joins new network devices, named as the namespaces. `alone`: each
    sees its own processes only.
    """
    if reason := lacking():
        raise Unavailable(reason)
    daemons = []
    with ExitStack() as stack:
        spaces = stack.enter_context(namespaces("dgc", count))
        connect(stack, spaces)
        stack.enter_context(running(daemons))
        for key in ("user", "host"):
            call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key)
        for i, space in enumerate(spaces, 1):
            call("ip", "link", "set", space, "netns", space, "name", "eth0")
            call("ip", "-n", space, "addr", "add", f"{NET}.{i}/24", "dev", "eth0")
            call("ip", "-n", space, "link", "set", "lo", "up")
            call("ip", "-n", space, "link", "set", "eth0", "up")
            daemons.append(start_sshd(folder, space, f"node{i}", alone))
        first = ["ip", "netns", "exec", spaces[0]]
        ssh = ssh_program(folder)
        addresses = [f"{NET}.{i}" for i in range(1, count + 1)]
        for address in addresses:
            wait_for(lambda to=address: subprocess.run([*first, ssh, to, "true"]).returncode == 0)
        hosts = folder / "hostfile"
        hosts.write_text("".join(f"{address}:{ranks}\n" for address in addresses))
        start = f'{" ".join(first)} unshare -u sh -c \'hostname node1; exec "$0" "$@"\''
        hydra = f"{MPIRUN} -launcher ssh -launcher-exec {ssh}"
        how = OVER_TCP if count * ranks <= os.cpu_count() else f"{OVER_TCP} {SHARING_CORES}"
        yield program(folder / "mpirun", f'{how} exec {start} {hydra} "$@"'), hosts, spaces


def plain_link(stack, spaces):
    """A cable as fast as the machine."""
    words = ["link", "add", spaces[0], "type", "veth", "peer", "name", spaces[1]]
    stack.enter_context(device(spaces[0], *words))


def bridge(stack, spaces):
    """A cable from each host to a bridge on this machine, where the cable is called as the host and a c."""
    middle = f"{spaces[0].partition('-')[0]}b"
    stack.enter_context(device(middle, "link", "add", middle, "type", "bridge"))
    call("ip", "link", "set", middle, "up")
    for space in spaces:
        stack.enter_context(device(space, "link", "add", space, "type", "veth", "peer", "name", f"{space}c"))
        call("ip", "link", "set", f"{space}c", "master", middle, "up")
