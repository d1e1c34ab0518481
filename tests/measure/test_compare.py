"""`distgpt bench stages` as a user runs it: real stages, in fresh processes; and as it fails."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from distgpt.commands.bench import compare_stages
from distgpt.core.base.errors import DisagreementError, DistgptError
from distgpt.measure import jobs

from conftest import clean_environment, command, distgpt, needs_mpi, refused, wait_for

pytestmark = [needs_mpi, pytest.mark.ranks]

_MODEL = "--preset tiny-adamw --n-layer 2 --n-head 2 --n-embd 16 --seq-len 16"
MODEL = f"{_MODEL} --batch-size 8 --threads 1".split()
SHORT = [*MODEL, "--steps", "12", "--stages", "serial,mpi"]


def result_in(folder):
    return json.loads((folder / "compare.json").read_text())


@pytest.mark.ci
def test_both_stages_are_measured_and_agree_and_what_it_leaves_can_be_shared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result, folder = compare(*SHORT, "--out", "both"), tmp_path / "both"
    assert result.exit_code == 0, result.output
    report = result_in(folder)
    assert report["state"] == "done" and report["passed"]
    serial, mpi = report["stages"]
    assert [serial["stage"], mpi["stage"], mpi["ranks"], mpi["threads"]] == ["serial", "mpi", 2, 1]
    (difference,) = report["differences"]
    for stage in (serial, mpi):
        lines = (folder / stage["stage"] / "metrics.jsonl").read_text().splitlines()
        assert stage["losses"] == [json.loads(line)["loss"] for line in lines] and len(lines) == 12
        summary = json.loads((folder / stage["stage"] / "summary.json").read_text())
        assert stage["training"]["train_s"] == summary["train_s"]
        assert len(stage["training"]["peak_memory"]) == stage["ranks"]
        shown = f"{summary['loss']:.4f} {summary['train_bits_per_byte']:.4f}"
        assert shown in " ".join(result.stdout.split())
        assert len(stage["inference"]["tokens"]) == 30
    relative = [abs(a - b) / abs(b) for a, b in zip(mpi["losses"], serial["losses"], strict=True)]
    assert difference["largest"] == max(relative) <= difference["tolerance"] < 1e-3
    assert difference["agrees"] and mpi["inference"]["tokens"] == serial["inference"]["tokens"]
    for word in ("tokens/s", "× serial", f"{difference['largest']:.2e}"):
        assert word in result.stdout
    text = (folder / "compare.json").read_text()
    assert str(tmp_path) not in text and os.uname().nodename not in text
    assert not list(folder.glob("*/checkpoints"))


def compare(*words):
    """The command in this process; its stages are processes all the same."""
    return CliRunner().invoke(compare_stages, list(map(str, words)))


@pytest.mark.slow
def test_what_computes_something_else_and_what_dies_are_named_and_the_others_finish(tmp_path, monkeypatch):
    """With another learning rate, the loss before the first step is still the same."""
    changes = {("serial", "infer"): ["--max-new-tokens", "-1"], ("mpi", "train"): ["--lr", "0.1"]}
    plain = jobs.start
    monkeypatch.setattr(
        jobs,
        "start",
        lambda words, *how: plain([*words, *changes.get((words[words.index("--stage") + 1], words[0]), [])], *how),
    )
    result = compare(*SHORT, "--steps", "3", "--ranks", "1", "--out", tmp_path / "out", "--json")
    assert isinstance(result.exception, DisagreementError) and result.exception.exit_code == 1
    words = str(result.exception)
    assert words.startswith("stage mpi: the loss of step 2 differs from serial's by 0.")
    assert "; stage serial died in inference: " in words
    report = json.loads(result.stdout)
    assert not report["passed"] and report["differences"][0]["first"] == 2
    serial, mpi = report["stages"]
    assert "inference" in serial["failed"] and serial["training"] and serial["inference"] is None
    assert not mpi["failed"] and len(mpi["losses"]) == 3 and len(mpi["inference"]["tokens"]) == 30


def processes_of(folder):
    """Those whose command line names it; what is gone but not yet waited for has none."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if any(str(folder) in word for word in words):
            found[int(process.name)] = " ".join(words)
    return found


def steps_of(run):
    metrics = Path(run) / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc, to look for processes")
def test_killed_and_interrupted_it_keeps_what_was_measured_and_leaves_nobody_behind(tmp_path):
    out = tmp_path / "out"
    args = [*SHORT, "--steps", "100000", "--out", out]
    job = subprocess.Popen(
        command("bench", "stages", *args),
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        start_new_session=True,
    )
    try:
        wait_for(lambda: steps_of(out / "serial") >= 3, seconds=60)
        (child,) = (pid for pid, args in processes_of(out).items() if "--stage serial" in args)
        os.kill(child, signal.SIGKILL)
        wait_for(lambda: steps_of(out / "mpi") >= 3, seconds=60)
        assert len(processes_of(out)) >= 4  # itself, the launcher, two ranks
        for _ in range(2):  # of impatient fingers
            job.send_signal(signal.SIGINT)
            time.sleep(0.05)
        stdout, stderr = job.communicate(timeout=60)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode == 130, stderr
    assert stderr.splitlines()[-1].startswith("distgpt: interrupted; what was measured is in ")
    report = result_in(out)
    serial, mpi = report["stages"]
    assert report["state"] == "interrupted" and not report["passed"]
    assert "killed by SIGKILL" in serial["failed"] and mpi["training"] is None
    assert len(serial["losses"]) >= 3 and len(mpi["losses"]) >= 3
    assert report["differences"][0]["agrees"]
    assert "killed by SIGKILL" in stdout and "Interrupted" in stdout
    wait_for(lambda: not processes_of(out), seconds=10)


@pytest.mark.ci
def test_what_cannot_be_compared_is_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # no GPU is found, whatever this machine has
    (tmp_path / "file").write_text("")
    for words, code, said in (
        ((*MODEL, "--stages", "serial,cuda"), 2, "cuda cannot run here"),
        ((*SHORT, "--out", tmp_path / "file" / "out"), 74, str(tmp_path / "file")),
    ):
        error = compare("--out", tmp_path / "out", *words).exception
        assert isinstance(error, DistgptError) and error.exit_code == code and said in str(error), words
    for wrong in ("inf", "nan"):
        result = compare("--out", tmp_path / "out", "--tolerance", wrong)
        assert result.exit_code == 2 and "'--tolerance'" in result.output, wrong
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    refused(distgpt("bench", "stages", cwd=tmp_path, env={"PMI_SIZE": "2", "PMI_RANK": "0"}), 2, "one process")


@pytest.mark.ci
def test_one_stage_alone_has_nothing_to_compare_with(tmp_path):
    result = compare(*MODEL, "--steps", "2", "--stages", "serial", "--out", tmp_path / "out")
    assert result.exit_code == 0 and "nothing to compare it with" in result.stdout
    assert result_in(tmp_path / "out")["passed"] is None
