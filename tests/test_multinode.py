"""Two hosts on one machine: network namespaces joined by a bridge, an sshd in each, one mpirun."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
TOOLS = ["ip", "ssh", "ssh-keygen", "unshare"]
SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
BRIDGE, NET = "dgtest0", "10.77.19"

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(
        not (all(map(shutil.which, TOOLS)) and Path(SSHD).exists()), reason="needs iproute2 and openssh"
    ),
    pytest.mark.skipif(not (BIN / "mpiexec.hydra").exists(), reason="needs the mpich wheel"),
]


def call(*words):
    subprocess.run(words, check=True, capture_output=True)


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    """The words before a command that start it on two hosts, one rank each."""
    folder = tmp_path_factory.mktemp("hosts")
    daemons = []
    try:
        for key in ("user", "host"):
            call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key)
        try:
            call("ip", "link", "add", BRIDGE, "type", "bridge")
            for i in (1, 2):
                call("ip", "netns", "add", f"{BRIDGE}n{i}")
        except subprocess.CalledProcessError:
            pytest.skip("this system does not let us make network namespaces")
        call("ip", "addr", "add", f"{NET}.254/24", "dev", BRIDGE)
        call("ip", "link", "set", BRIDGE, "up")
        Path("/run/sshd").mkdir(exist_ok=True)
        for i in (1, 2):
            space = f"{BRIDGE}n{i}"
            call(*f"ip link add dgt{i} type veth peer name eth0 netns {space}".split())
            call("ip", "link", "set", f"dgt{i}", "master", BRIDGE, "up")
            call("ip", "-n", space, "addr", "add", f"{NET}.{i}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                call("ip", "-n", space, "link", "set", device, "up")
            options = {
                "AuthorizedKeysFile": folder / "user.pub",
                "StrictModes": "no",
                "PermitRootLogin": "yes",
                "UsePAM": "no",
                "PidFile": "none",
            }
            flags = " ".join(f"-o {key}={value}" for key, value in options.items())
            start = f"hostname node{i}; exec {SSHD} -D -f /dev/null -h {folder / 'host'} {flags}"
            daemons.append(
                subprocess.Popen(["ip", "netns", "exec", space, "unshare", "-u", "sh", "-c", start])
            )
        (folder / "hostfile").write_text(f"{NET}.1:1\n{NET}.2:1\n")
        wrapper = folder / "ssh"
        known = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
        wrapper.write_text(f'#!/bin/sh\nexec ssh -q -i {folder / "user"} {known} "$@"\n')
        wrapper.chmod(0o755)
        for i in (1, 2):
            wait_for(lambda i=i: subprocess.run([wrapper, f"{NET}.{i}", "true"]).returncode == 0)
        hydra = ["-f", folder / "hostfile", "-launcher", "ssh", "-launcher-exec", wrapper, "-iface", BRIDGE]
        yield [BIN / "mpiexec.hydra", "-n", "2", *hydra]
    finally:
        for daemon in daemons:
            daemon.kill()
            daemon.wait()
        for words in (*(["netns", "del", f"{BRIDGE}n{i}"] for i in (1, 2)), ["link", "del", BRIDGE]):
            subprocess.run(["ip", *words], capture_output=True)


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


TRAIN = ["train", "--stage", "mpi", "--threads", "1", "--n-layer", "1", "--n-embd", "16", "--n-head", "2"]
TRAIN += ["--seq-len", "16", "--batch-size", "4", "--dtype", "float64"]


def test_two_hosts_train_as_one_does(launcher, tmp_path):
    hosts, alone = tmp_path / "hosts", tmp_path / "alone"
    steps = ["--steps", "20"]
    script = 'hostname >> "$0.names"; exec "$@"'
    there = [*launcher, "sh", "-c", script, str(hosts), BIN / "distgpt", *TRAIN, *steps, "--out", hosts]
    result = subprocess.run(there, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    assert sorted(Path(f"{hosts}.names").read_text().split()) == ["node1", "node2"]
    here = [BIN / "distgpt", *TRAIN, *steps, "--stage", "serial", "--out", alone]
    subprocess.run(here, check=True, capture_output=True)
    losses = [
        [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (hosts, alone)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_a_rank_killed_on_another_host_ends_the_job(launcher, tmp_path):
    out = tmp_path / "run"
    job = subprocess.Popen(
        [*launcher, BIN / "distgpt", *TRAIN, "--steps", "1000000", "--out", out],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: (out / "metrics.jsonl").exists())
        pids = subprocess.run(["ip", "netns", "pids", f"{BRIDGE}n2"], capture_output=True, text=True).stdout
        victims = [p for p in pids.split() if b"distgpt" in Path(f"/proc/{p}/cmdline").read_bytes()]
        call("kill", "-9", victims[-1])
        begun = time.monotonic()
        assert job.wait(timeout=30) != 0
        assert time.monotonic() - begun < 10
    finally:
        job.kill()
