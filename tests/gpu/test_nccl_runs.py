"""Whole runs of ranks with GPUs under a real mpirun, with a stand-in for NCCL."""

import json
import sys
from pathlib import Path

import pytest
from devices import SAME, needs_the_processor

from conftest import distgpt, losses, needs_mpi

pytestmark = [needs_the_processor, pytest.mark.ranks]

DRIVER = """
import runpy, sys
sys.path.insert(0, {folder!r})
import hostgpu
hostgpu.install(2)
runpy.run_path({ranks!r}, run_name="__main__")
"""


@pytest.mark.slow
@needs_mpi
def test_whole_runs_by_nccl_evaluate_save_and_move_between_modes(tmp_path, monkeypatch):
    monkeypatch.setenv("WHOLE_NCCL", "1")
    driver, folder = tmp_path / "driver.py", Path(__file__).parent
    driver.write_text(DRIVER.format(folder=str(folder), ranks=str(folder.parent / "helpers" / "ranks.py")))
    words = [
        "--schedule",
        "constant",
        "--n-layer",
        "1",
        "--seq-len",
        "8",
        "--val-fraction",
        "0.2",
        "--val-tokens",
        "64",
    ]
    words += ["--eval-every", "2", "--dtype", "bfloat16", "--recompute", "mlp"]
    parts = {"whole": [("allreduce", "4")], "moving": [("overlapped", "1"), ("sharded", "3"), ("overlapped", "4")]}
    commands = []
    for name, runs in parts.items():
        stage = ["train", *SAME, *words, "--stage", "mpi-cuda", "--deterministic", "--out", str(tmp_path / name)]
        for number, (mode, steps) in enumerate(runs):
            resumed = ["--resume", "auto"] if number else []
            commands.append([*stage, "--steps", steps, "--grad-sync", mode, *resumed])
    result = distgpt(ranks=2, program=[sys.executable, str(driver), json.dumps(commands)], cold=False)
    assert result.stderr.count("exit code 0") == len(commands), result.stderr
    assert "by way of nccl" in result.stdout
    whole, moving = (tmp_path / name for name in parts)
    assert losses(whole) == losses(moving)
    assert (whole / "weights.safetensors").read_bytes()[-2000:] == (moving / "weights.safetensors").read_bytes()[-2000:]


BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.ci
@needs_mpi
@pytest.mark.parametrize(("version", "ranks"), [("1", 2), ("23007", 2), ("1", 3)])
def test_ranks_that_share_a_gpu_get_the_sums_that_are_known(version, ranks):
    """The stand-in refuses what NCCL refuses: ranks of one host on one GPU, by 2.30 unless requested."""
    program = [sys.executable, str(Path(__file__).with_name("hostgpu.py"))]
    words = (BENCHMARKS / "nccl_on_one_gpu.py", "--quick")
    result = distgpt(*words, ranks=ranks, program=program, env={"WHOLE_GPU": "1", "WHOLE_NCCL": version})
    assert result.returncode == 0, result.stdout + result.stderr
    assert "all right" in result.stdout and "trouble: none" in result.stdout


# Each way, optimizer and type on the wire at least once; test_session.py has all of them.
MODES = ("overlapped", "sharded", "muon-sharded", "narrow-overlapped", "accumulating", "local")


@pytest.mark.ci
@needs_mpi
def test_each_way_to_exchange_gradients_has_the_bits_of_the_host_s(tmp_path):
    program = [sys.executable, str(Path(__file__).with_name("hostgpu.py"))]
    words = (BENCHMARKS / "nccl_modes.py", tmp_path, "--quick", "--only", *MODES)
    env = {"WHOLE_GPU": "1", "WHOLE_NCCL": "1"}
    result = distgpt(*words, ranks=2, program=program, env=env, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = {row["mode"]: row for row in json.loads((tmp_path / "modes.json").read_text())}
    by_nccl = {name: row for name, row in rows.items() if not name.startswith("host")}
    assert by_nccl.keys() == set(MODES) and {row["verdict"] for row in by_nccl.values()} == {"same bits"}
    assert len({row["losses"][-1] for row in by_nccl.values()}) > 3, "the modes are not one and the same"
    assert "by way of nccl" in result.stdout


@pytest.mark.ci
@needs_mpi
def test_what_is_refused_leaves_no_directory_behind(tmp_path):
    driver, folder = tmp_path / "driver.py", Path(__file__).parent
    driver.write_text(DRIVER.format(folder=str(folder), ranks=str(folder.parent / "helpers" / "ranks.py")))
    words = ["train", *SAME, "--stage", "mpi-cuda", "--n-layer", "1", "--seq-len", "8", "--steps", "1"]
    commands = [[*words, "--grad-sync", "overlapped", "--out", str(tmp_path / "run")]]
    result = distgpt(ranks=2, program=[sys.executable, str(driver), json.dumps(commands)], cold=False)
    assert "exit code 2" in result.stderr and "needs NCCL" in result.stderr, result.stderr
    assert not (tmp_path / "run").exists()


FAILING = """
import os, sys, time
sys.path.insert(0, {folder!r})
import hostgpu
hostgpu.install(2)
from distgpt.commands.cli import main
from distgpt.gpu import transport
from distgpt.core.train.step import Step
launch = Step.launch

def launched(self, step, batches, *flags):
    if step == 2:
        if self.comm.rank in {ranks}:
            transport.nccl_module().trouble = "remote process exited"
        time.sleep(60)  # as for a sum that never comes
    return launch(self, step, batches, *flags)

Step.launch = launched
main()
"""


@pytest.mark.slow
@needs_mpi
@pytest.mark.parametrize("ranks", [[1], [0, 1]])
def test_a_failure_of_nccls_ends_the_job_instead_of_a_wait(ranks, tmp_path, monkeypatch):
    """In one line, also where all ranks see it."""
    monkeypatch.setenv("WHOLE_NCCL", "1")
    driver = tmp_path / "driver.py"
    driver.write_text(FAILING.format(folder=str(Path(__file__).parent), ranks=ranks))
    words = ("train", *SAME, "--stage", "mpi-cuda", "--n-layer", "1", "--seq-len", "8", "--steps", "9")
    program = [sys.executable, str(driver)]
    result = distgpt(*words, "--out", tmp_path / "run", ranks=2, program=program, cold=False, timeout=50)
    assert result.returncode == 70, result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("distgpt: ")]
    known = [f"rank {rank}: NCCL has failed, as it does when another rank or host dies: " for rank in ranks]
    assert any(f"{start}remote process exited" in line for start in known), line
    assert "Traceback" not in result.stderr
