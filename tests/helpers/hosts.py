"""Hosts on one machine: network namespaces with an sshd each, joined by a cable or bridge.

Names include the process ID, so that concurrent runs do not collide.
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
# Otherwise MPICH's UCX would use shared memory on the common machine.
OVER_TCP = "UCX_TLS=tcp,self UCX_NET_DEVICES=eth0"
# MPICH's ranks spin while they wait; with few cores they should sleep.
SHARING_CORES = "MPIR_CVAR_POLLS_BEFORE_YIELD=16 MPIR_CVAR_ENABLE_HEAVY_YIELD=1"


class Unavailable(Exception):
    """This system cannot provide hosts."""


def lacking():
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
    """Start a daemon whose sessions have the host name `name`; `alone`: with separate process IDs."""
    Path("/run/sshd").mkdir(exist_ok=True)
    options = {
        "AuthorizedKeysFile": folder / "user.pub", "StrictModes": "no", "PermitRootLogin": "yes",
        "UsePAM": "no", "PidFile": "none", **more,
    }  # fmt: skip
    flags = " ".join(shlex.join(["-o", f"{key}={value}"]) for key, value in options.items())
    daemon = f"{SSHD} -D -f /dev/null -h {folder / 'host'} {flags}"
    start = f"hostname {name}; exec {daemon}"
    if alone:
        start = f"hostname {name}; {daemon} & exec sleep infinity"
    return subprocess.Popen([*inside(space, alone), "sh", "-c", start])


def inside(space, alone=False):
    processes = ["-p", "-f", "--mount-proc", "--kill-child"] if alone else []
    return ["ip", "netns", "exec", space, "unshare", "-u", *processes]


def program(path, script):
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@contextmanager
def namespaces(word, count):
    """Yield names of new namespaces; at the end kill their processes and delete them."""
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
    subprocess.run(["ip", "netns", "del", space], capture_output=True)
    return not Path("/run/netns", space).exists()


@contextmanager
def device(name, *words):
    made_by("network device", name, "ip", *words)
    try:
        yield name
    finally:
        subprocess.run(["ip", "link", "del", name], capture_output=True)


def made_by(kind, name, *words):
    """Create a device or namespace; raise Unavailable if it exists or cannot be created."""
    try:
        call(*words)
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode().strip()
        if "File exists" in said or "resource busy" in said:
            raise Unavailable(f"a {kind} {name} is there already, perhaps left by a killed run") from error
        raise Unavailable(f"this system does not let us make the {kind} {name}: {said}") from error


def inhabitants(space):
    told = subprocess.run(["ip", "netns", "pids", space], check=True, capture_output=True, text=True)
    return [int(word) for word in told.stdout.split()]


def kill_all_in(space):
    deadline = time.monotonic() + 5
    while (left := inhabitants(space)) and time.monotonic() < deadline:
        for number in left:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        time.sleep(0.05)


@contextmanager
def running(processes):
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextmanager
def joined_hosts(folder, connect, count=2, ranks=1, alone=False):
    """Yield an mpirun on the first host, a hostfile, and the hosts' namespaces.

    `connect(stack, spaces)` creates joined network devices with the names of the namespaces. `alone`: hosts
    have separate process IDs.
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
        known = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
        ssh = program(folder / "ssh", f'exec {shutil.which("ssh")} -i {folder / "user"} {known} "$@"')
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
    words = ["link", "add", spaces[0], "type", "veth", "peer", "name", spaces[1]]
    stack.enter_context(device(spaces[0], *words))


def bridge(stack, spaces):
    middle = f"{spaces[0].partition('-')[0]}b"
    stack.enter_context(device(middle, "link", "add", middle, "type", "bridge"))
    call("ip", "link", "set", middle, "up")
    for space in spaces:
        stack.enter_context(device(space, "link", "add", space, "type", "veth", "peer", "name", f"{space}c"))
        call("ip", "link", "set", f"{space}c", "master", middle, "up")
