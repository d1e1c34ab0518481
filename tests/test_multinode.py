"""Two hosts on one machine: network namespaces joined by a bridge, an sshd in each, one mpirun."""

import json
import os
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from twohosts import (
    BIN,
    MPIRUN,
    Unavailable,
    call,
    device,
    inhabitants,
    lacking,
    made_by,
    make_keys,
    namespaces,
    running,
    ssh_program,
    start_sshd,
    wait_for,
)

BRIDGE = f"dgb{os.getpid()}"

pytestmark = pytest.mark.skipif(bool(lacking()), reason=lacking())


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """The words before a command that start it on two hosts, one rank each, and the hosts' namespaces."""
    folder, daemons = tmp_path_factory.mktemp("hosts"), []
    with ExitStack() as stack:
        try:
            spaces = stack.enter_context(namespaces("dgn"))
            stack.enter_context(device(BRIDGE, "link", "add", BRIDGE, "type", "bridge"))
        except Unavailable as reason:
            pytest.skip(str(reason))
        stack.enter_context(running(daemons))
        net = unused_net()
        call("ip", "addr", "add", f"{net}.254/24", "dev", BRIDGE)
        call("ip", "link", "set", BRIDGE, "up")
        make_keys(folder)
        for i, space in enumerate(spaces, 1):
            ours = space.replace("dgn", "dgv")
            made_by("cable", ours, *f"ip link add {ours} type veth peer name eth0 netns {space}".split())
            call("ip", "link", "set", ours, "master", BRIDGE, "up")
            call("ip", "-n", space, "addr", "add", f"{net}.{i}/24", "dev", "eth0")
            for name in ("eth0", "lo"):
                call("ip", "-n", space, "link", "set", name, "up")
            daemons.append(start_sshd(folder, space, f"node{i}"))
        (folder / "hostfile").write_text(f"{net}.1:1\n{net}.2:1\n")
        wrapper = ssh_program(folder)
        for i in (1, 2):
            wait_for(lambda i=i: subprocess.run([wrapper, f"{net}.{i}", "true"]).returncode == 0)
        hydra = ["-f", folder / "hostfile", "-launcher", "ssh", "-launcher-exec", wrapper, "-iface", BRIDGE]
        yield [MPIRUN, "-n", "2", *hydra], spaces


@pytest.fixture
def launcher(hosts):
    return hosts[0]


def unused_net():
    """The first three numbers of addresses that nobody has here."""
    known = subprocess.run(["ip", "-o", "-4", "addr"], check=True, capture_output=True, text=True).stdout
    return next(net for i in range(19, 250) if f" {(net := f'10.77.{i}')}." not in known)


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


@pytest.mark.slow
def test_a_rank_killed_on_another_host_ends_the_job(hosts, tmp_path):
    (launcher, spaces), out = hosts, tmp_path / "run"
    job = subprocess.Popen(
        [*launcher, BIN / "distgpt", *TRAIN, "--steps", "1000000", "--out", out],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: (out / "metrics.jsonl").exists())
        victims = [p for p in inhabitants(spaces[1]) if b"distgpt" in Path(f"/proc/{p}/cmdline").read_bytes()]
        call("kill", "-9", victims[-1])
        begun = time.monotonic()
        assert job.wait(timeout=30) != 0
        assert time.monotonic() - begun < 25
    finally:
        job.kill()
