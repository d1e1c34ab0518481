"""A stalled run reports the state of each rank, and saves before it ends."""

import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from distgpt.callbacks import watchdog
from distgpt.callbacks.attach import Stragglers
from distgpt.callbacks.watchdog import Reports, Watchdog
from distgpt.core.comm.api import SerialComm
from distgpt.core.saved.checkpoint import newest_step
from distgpt.core.train.progress import COMPUTING, Activity
from distgpt.core.train.run import Limits
from distgpt.core.train.step import Step
from stopping import of_job
from threadranks import on_all_ranks

from conftest import SMALL, clean_environment, command, inside, losses, metrics, slow_ranks, summary, wait_for


def test_stragglers_report_slowest_rank():
    for seconds, found in (([], {}), ([0.0, 0.0], {}), ([1.0, 4.0, 2.0], {"slowest_rank": 1, "late_s": 2.5})):
        assert Stragglers().after_step(SimpleNamespace(rank_seconds=seconds)) == found


def test_reports_reach_rank_0_only_from_ranks():
    def act(comm):
        reports, found = Reports(comm), []
        try:
            if comm.rank:
                reports.to_root({"step": comm.rank})
            else:
                stranger = Reports(type(comm)(0, 1, threading.Barrier(1), {}))
                port = reports.socket.getsockname()[1]
                for message in ({}, {"x": 1}):
                    stranger.send(message, ("127.0.0.1", port))
                for text in (b"", b"[1]", b"{", b"\xff" * 9000):
                    stranger.socket.sendto(text[:8000], ("127.0.0.1", port))
                stranger.close()
            comm.barrier()
            until = time.monotonic() + 20
            while not comm.rank and len({message["step"] for message in found}) < 2 and time.monotonic() < until:
                found += [message for message, _ in reports.received()]
                time.sleep(0.01)
            time.sleep(0.1)
            return {message["step"] for message in [*found, *(m for m, _ in reports.received())]}
        finally:
            reports.close()

    assert on_all_ranks(3, act)[0] == {1, 2}


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(watchdog, "SECONDS_BETWEEN", 0.05)


def test_stall_report_lists_every_rank(quick, capsys):
    """Two of three ranks report; the third is silent, because its thread has ended."""
    said, left, done = [], [], threading.Event()

    def act(comm):
        place = Activity()
        place.step = 6
        place.enter(COMPUTING)
        with Watchdog(comm, place, Limits(stall_timeout=0.8), float, said.append, left.append):
            if comm.rank == 2:
                time.sleep(0.3)
            elif comm.rank == 1:
                assert done.wait(20)
            else:
                wait_for(lambda: said)
                place.enter(COMPUTING)
                wait_for(lambda: len(said) > 1)
                done.set()

    assert on_all_ranks(3, act) == [None] * 3
    lines = said[0].splitlines()
    assert lines[0].startswith("no progress for ") and lines[0].endswith(" seconds, at step 7:")
    for rank, what in enumerate(("computing for", "computing for", "silent for")):
        assert lines[rank + 1].startswith(f"  rank {rank} on {os.uname().nodename} (process {os.getpid()}): {what}")
    assert lines[3].endswith("last computing at step 7") and len(lines) == 4
    stacks = capsys.readouterr().err  # only two ranks are notified
    assert stacks.count(" is at\n") == 2 and "done.wait(20)" in stacks
    assert said[1].startswith("continuing after ") and not left


def test_stall_is_reported_once_and_ends_nothing(quick, monkeypatch):
    begun, later, said, left = time.monotonic(), [0.0], [], []
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: begun + later[0]))

    def act(comm):
        place = Activity()
        with Watchdog(comm, place, Limits(stall_timeout=0.01), float, said.append, left.append):
            for moment, reports in ((0.0, 0), (0.19, 0), (0.21, 1), (60.0, 1)):  # 4 missing reports
                later[0] = moment
                time.sleep(0.2)
                comm.barrier()
                assert len(said) == reports and not left
                comm.barrier()
            place.enter(COMPUTING)
            wait_for(lambda: len(said) == 2)  # it continues
            comm.barrier()

    assert on_all_ranks(2, act) == [None] * 2


def test_addresses_of_this_host_include_its_default_route():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("no route to other hosts")
        assert probe.getsockname()[0] in watchdog._own_addresses()


def test_nccl_error_ends_job_while_main_thread_waits():
    left, trouble, waited = [], [], threading.Event()

    def leave(error):
        left.append(error)
        waited.set()

    comm = SerialComm()
    comm.queued = SimpleNamespace(trouble=lambda: "".join(trouble))
    with Watchdog(comm, Activity(), Limits(), float, lambda text: None, leave):
        time.sleep(0.6)
        assert not left
        trouble.append("NCCL_ERROR_REMOTE_ERROR: remote process exited")
        assert waited.wait(20)
    assert left[0].exit_code == 70
    assert str(left[0]).startswith("rank 0: NCCL failed, possibly because another rank or host died: ")
    assert "NCCL_ERROR_REMOTE_ERROR: remote process exited" in str(left[0])


def test_single_process_reports_stall(quick, tmp_path, monkeypatch):
    launch = Step.launch

    def launched(self, step, batches, *flags):
        if step == 3:
            time.sleep(1.5)
        time.sleep(0.1)
        return launch(self, step, batches, *flags)

    monkeypatch.setattr(Step, "launch", launched)
    result = inside("train", *SMALL, "--steps", "6", "--stall-timeout", "0.5s", "--out", tmp_path / "run")
    assert result.returncode == 0 and "no progress for" in result.stdout and "time.sleep(1.5)" in result.stderr
    assert "continuing after" in result.stdout and signal.set_wakeup_fd(-1) == -1


def stuck(tmp_path, *words):
    out = tmp_path / "run"
    args = ["train", *SMALL, "--stage", "mpi", "--steps", "100000", "--save-every", "10m", "--out", out, *words]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    job = subprocess.Popen(command(*args, "--out", out, ranks=2), env=clean_environment(), **how)
    wait_for(lambda: (out / "metrics.jsonl").exists() and len((out / "metrics.jsonl").read_bytes()) > 2000)
    time.sleep(1.5)  # the ranks have reported
    ranks = of_job(out)
    os.kill(ranks[1], signal.SIGSTOP)
    return job, ranks, out


def gone(ranks):
    return not any(Path(f"/proc/{rank}").exists() for rank in ranks)


@slow_ranks
def test_stopped_rank_is_named_and_run_saved(tmp_path):
    job, ranks, out = stuck(tmp_path, "--stall-timeout", "2s", "--stall-abort", "6s")
    begun = time.monotonic()
    named = next(line for line in job.stdout if line.startswith("  rank 1 on "))
    assert time.monotonic() - begun < 2 + 5 and f"(process {ranks[1]}): silent for " in named
    _, errors = job.communicate(timeout=60)
    step = newest_step(out / "checkpoints")
    assert job.returncode == 75 and "distgpt: no progress for " in errors
    assert f"step {step} is saved; resume with --out {out} --resume auto" in errors
    wait_for(lambda: gone(ranks))
    logged = metrics(out)
    assert max(logged) == step and {line["slowest_rank"] for line in logged.values()} == {0, 1}
    assert summary(out)["stop"] == "interrupted" and not (out / "running.json").exists()
    more = ["--resume", out, "--stage", "mpi", "--steps", str(step + 3)]
    resumed = subprocess.run(command("train", *more, ranks=2), env=clean_environment(), capture_output=True)
    assert resumed.returncode == 0 and len(losses(out)) == step + 3


@slow_ranks
def test_signal_ends_stuck_job(tmp_path):
    job, ranks, out = stuck(tmp_path)
    job.terminate()
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 143 and "distgpt: ended by SIGTERM" in errors
    wait_for(lambda: gone(ranks))
    assert newest_step(out / "checkpoints") == max(metrics(out))
