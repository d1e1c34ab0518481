"""Hosts on one machine: joined network namespaces with an sshd each, and one mpirun."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hosts import BIN, NET, Unavailable, call, inhabitants, joined_hosts, lacking, plain_link, program, wait_for

pytestmark = pytest.mark.skipif(bool(lacking()), reason=lacking())


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    try:
        with joined_hosts(tmp_path_factory.mktemp("hosts"), plain_link) as (mpirun, hostfile, spaces):
            yield [mpirun, "-n", "2", "-f", hostfile], spaces
    except Unavailable as reason:
        pytest.skip(str(reason))


TRAIN = ["train", "--stage", "mpi", "--threads", "1", "--n-layer", "1", "--n-embd", "16", "--n-head", "2"]
TRAIN += ["--seq-len", "16", "--batch-size", "4", "--dtype", "float64"]


def test_two_hosts_match_one(hosts, tmp_path):
    together, alone = tmp_path / "hosts", tmp_path / "alone"
    steps, script = ["--steps", "20"], 'hostname >> "$0.names"; exec "$@"'
    words = ["sh", "-c", script, str(together), BIN / "distgpt", *TRAIN, *steps, "--out", together]
    result = subprocess.run([*hosts[0], *words], capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    assert sorted(Path(f"{together}.names").read_text().split()) == ["node1", "node2"]
    here = [BIN / "distgpt", *TRAIN, *steps, "--stage", "serial", "--out", alone]
    subprocess.run(here, check=True, capture_output=True)
    losses = [
        [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (together, alone)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert "2 ranks on node1, node2, 1 thread each" in result.stdout
    assert json.loads((together / "summary.json").read_text())["hosts"] == ["node1", "node2"]


def test_doctor_queries_the_other_host(hosts, tmp_path):
    launcher, spaces = hosts
    options = f"-i {Path(launcher[0]).parent / 'user'} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
    program(tmp_path / "ssh", f'exec {shutil.which("ssh")} {options} "$@"')
    start = ["ip", "netns", "exec", spaces[0], "unshare", "-u", "sh", "-c", 'hostname node1; exec "$0" "$@"']
    words = [sys.executable, "-m", "distgpt", "doctor", "--hostfile", launcher[-1], "--ssh", "--json"]
    env = {**os.environ, "PATH": f"{tmp_path}:{BIN}:{os.environ['PATH']}"}
    done = subprocess.run([*start, *words], env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    here, there = json.loads(done.stdout)["hosts"]
    assert here["is_here"] and there["name"] == f"{NET}.2" and not there["is_here"]
    assert here["facts"]["versions"] == there["facts"]["versions"]


@pytest.mark.slow
def test_killed_remote_rank_ends_the_job(hosts, tmp_path):
    (launcher, spaces), out = hosts, tmp_path / "run"
    words = [*launcher, BIN / "distgpt", *TRAIN, "--steps", "1000000", "--out", out]
    job = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: (out / "metrics.jsonl").exists())
        victims = [p for p in inhabitants(spaces[1]) if b"distgpt" in Path(f"/proc/{p}/cmdline").read_bytes()]
        call("kill", "-9", victims[-1])
        begun = time.monotonic()
        assert job.wait(timeout=30) != 0 and time.monotonic() - begun < 25
    finally:
        job.kill()
