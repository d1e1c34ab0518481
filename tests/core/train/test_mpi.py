"""Ranks match one process, and no rank waits for another forever."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from distgpt.cluster.launch import job as jobs
from distgpt.commands.cli import cli
from distgpt.core.base.errors import UsageError
from distgpt.core.saved.checkpoint import latest_valid_checkpoint, newest_step
from launching import SIZES
from stopping import of_job
from threadranks import on_all_ranks

from conftest import (
    OTHER_MPI,
    ROOT,
    SMALL,
    ci_ranks,
    clean_environment,
    command,
    distgpt,
    in_one_job,
    inside,
    losses,
    metrics,
    needs_mpi,
    refused,
    summary,
    wait_for,
)

mpi = pytest.importorskip("distgpt.core.comm.mpi")
pytestmark = needs_mpi

# Ranks, micro-batches, and how the gradients are summed.
WAYS = [
    *((2, 1, "allreduce"), (2, 1, "sharded"), (2, 2, "allreduce"), (2, 2, "overlapped")),
    *([(4, 2, "sharded")] * (not OTHER_MPI)),  # Open MPI's ranks never sleep and take minutes with few cores
]
TRAIN = ["train", *SMALL, "--stage", "mpi", "--out", "run"]
TWENTY = [*SMALL, "--steps", "20", "--dtype", "float64"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    found, parent = {}, tmp_path_factory.mktemp("alone")
    for micro_batches, threads in ((1, 1), (2, 1)):
        args = ["--grad-accum", str(micro_batches), "--threads", str(threads)]
        out = parent / f"{micro_batches}-{threads}"
        assert inside("train", *TWENTY, *args, "--out", out).returncode == 0
        found[micro_batches, threads] = losses(out)
    return found


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    parent = tmp_path_factory.mktemp("together")
    outs = {way: parent / "-".join(map(str, way)) for way in WAYS} | {name: parent / name for name in ("whole", "run")}
    # Save after every step.
    always = [*SMALL, "--schedule", "constant", "--save-every", "0.0000001s", "--out"]
    for ranks in sorted({ranks for ranks, *_ in WAYS}):
        runs = [
            [*TWENTY, "--grad-accum", str(way[1]), "--grad-sync", way[2], "--out", outs[way]]
            for way in WAYS
            if way[0] == ranks
        ]
        if ranks == 2:
            runs += [[*always, outs["whole"], "--steps", "12"], [*always, outs["run"], "--steps", "7"]]
            runs += [[*SMALL, "--out", outs["run"], "--steps", "12", "--resume", "auto"]]
        found = in_one_job([["train", *run, "--stage", "mpi"] for run in runs], ranks)
        assert all(ended == ("", {0}) for ended in found), found
    return outs


@ci_ranks
@pytest.mark.any_mpi
def test_ranks_match_losses_of_one_process(alone, together):
    found = {way: losses(together[way]) for way in WAYS}
    for way in WAYS:
        assert len(found[way]) == 20 and found[way] == pytest.approx(alone[way[1], 1], rel=1e-12), way
    assert found[2, 1, "allreduce"] == found[2, 1, "sharded"]  # exact on two ranks
    assert found[2, 2, "allreduce"] == found[2, 2, "overlapped"]
    about = summary(together[WAYS[0]])
    assert (about["ranks"], about["stage"], len(about["peak_memory"])) == (2, "mpi", 2)
    assert about["allreduce"] in ("allreduce", "shared memory")


@ci_ranks
@pytest.mark.any_mpi
def test_two_ranks_resume_identically(together):
    whole, run = together["whole"], together["run"]
    assert sorted(path.name[-2:] for path in (run / "checkpoints").iterdir()) == ["10", "11", "12"]
    assert losses(run) == losses(whole)
    for name in ("weights.safetensors", "config.toml"):
        assert (run / name).read_bytes() == (whole / name).read_bytes()


@ci_ranks
@pytest.mark.any_mpi
def test_two_ranks_generate_like_one_process(trained):
    args = ["infer", "--weights", trained / "weights.safetensors", "--prompt", "the", "--threads", "1"]
    args += ["--max-new-tokens", "30", "--temperature", "0.9", "--seed", "4"]
    alone, two = inside(*args), distgpt(*args, "--stage", "mpi", ranks=2)
    assert alone.returncode == two.returncode == 0, two.stderr
    assert alone.stdout == two.stdout and two.stderr.count("tokens/s") == 1


# Breaks the fourth step of one rank, then runs the command.
DRIVER = """
import json, os, signal
from distgpt.core.train import step
from distgpt.commands.cli import main
from distgpt.core.base.errors import StorageError

rank, how = json.loads(os.environ["BREAK"])

errors = {
    "value": ValueError("planted"),
    "interrupt": KeyboardInterrupt(),
    "refused": StorageError("cannot write planted: No space left on device"),
}
ways = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "poison": lambda: broken_step.model.params.flat.fill(float("nan")),
    "differ": lambda: broken_step.model.params.flat.__setitem__(0, 1.0),
}
launch = step.Step.launch

def broken(self, number, batches, *flags):
    global broken_step
    broken_step = self
    if number == 3 and rank == self.comm.rank:
        if how in errors:
            raise errors[how]
        ways[how]()
        ways[how] = int  # which does nothing
    return launch(self, number, batches, *flags)

step.Step.launch = broken
main()
"""


@pytest.fixture
def broken(tmp_path):
    (driver := tmp_path / "driver.py").write_text(DRIVER)

    def run(rank, how, *args):
        how = {"program": [sys.executable, str(driver)], "env": {"BREAK": json.dumps([rank, how])}}
        result = distgpt(*TRAIN, "--steps", "5000", *args, ranks=2, cwd=tmp_path, cold=False, **how)
        assert ("weights   " in result.stdout) == (result.returncode == 0)
        return result

    return run


THREAD = ["--grad-sync", "overlapped", "--gradient-dtype", "bfloat16"]  # the others wait in a thread
FAILURES = [
    pytest.param(1, "value", [], 70, "ValueError: planted", marks=pytest.mark.any_mpi),
    (1, "value", THREAD, 70, "ValueError: planted"),
    pytest.param(0, "refused", [], 74, "rank 0: cannot write planted", marks=pytest.mark.any_mpi),
    (1, "interrupt", [], 130, "rank 1: interrupted"),
    # All ranks agree on these errors without an abort.
    (1, "differ", [], 71, "ranks have different weights after step 100"),
    (1, "poison", ["--save-every", "1"], 76, "not finite at step 4"),
]


@ci_ranks
@pytest.mark.parametrize("rank, how, args, code, words", FAILURES)
def test_failure_of_one_rank_ends_the_job(broken, rank, how, args, code, words, tmp_path):
    result = broken(rank, how, *args)
    assert result.returncode == code and words in result.stderr, result.stderr
    assert result.stderr.count("distgpt: ") == 1
    assert (f"distgpt: rank {rank}" in result.stderr) == (how not in ("differ", "poison"))
    assert result.stderr.count("Traceback (most recent call last)") == (how == "value")
    if how == "poison":
        assert not (tmp_path / "run" / "weights.safetensors").exists()
        newest = tmp_path / "run" / "checkpoints" / "step-00000003"
        assert latest_valid_checkpoint(newest.parent) == (newest, [])


@ci_ranks
@pytest.mark.any_mpi
def test_killed_rank_ends_the_job(broken):
    assert broken(1, "kill").returncode in (9, 137, 255, -9)


@ci_ranks
def test_ranks_roll_back_together(broken, tmp_path):
    (tmp_path / "all.toml").write_text('verify_every = 1\non_bad_step = "rollback"')
    result = broken(1, "poison", "--save-every", "2", "--steps", "8", "--config", tmp_path / "all.toml")
    assert result.returncode == 0, result.stderr
    assert "not finite at step 4: rolled back to step 2" in result.stdout
    assert list(metrics(tmp_path / "run")) == list(range(1, 9))


@ci_ranks
@pytest.mark.parametrize("send, sent, code", [
    (os.killpg, signal.SIGINT, 130),  # mpirun and every rank, like a terminal
    (os.kill, signal.SIGTERM, 143),
    pytest.param(None, signal.SIGUSR1, 75, marks=pytest.mark.any_mpi),  # only the last rank
])  # fmt: skip
def test_signal_saves_and_ends_all_ranks(tmp_path, send, sent, code):
    run, how = tmp_path / "run", {"env": clean_environment(), "text": True, "process_group": 0}
    words = command(*TRAIN, "--steps", "100000", "--save-every", "10", "--out", run, ranks=2)
    with subprocess.Popen(words, cwd=tmp_path, stdout=-1, stderr=-1, **how) as job:
        wait_for((run / "checkpoints" / "step-00000010").exists, 60)
        (send or os.kill)(job.pid if send else of_job(run)[-1], sent)
        _, errors = job.communicate(timeout=60)
    assert job.returncode == code and errors.count("distgpt: ") == 1, errors
    step = max(metrics(run))
    assert f"step {step} is saved" in errors and newest_step(run / "checkpoints") == step


@ci_ranks
@pytest.mark.any_mpi
def test_signal_before_first_step_leaves_no_run(tmp_path):
    begins = """
import signal
from distgpt.commands.cli import main
from distgpt.core.train import setup
compiles = setup.compile_once_per_node
def interrupted(*args):
    signal.raise_signal(signal.SIGINT)
    compiles(*args)
setup.compile_once_per_node = interrupted
main()
"""
    job = distgpt(*TRAIN, ranks=2, cwd=tmp_path, program=[sys.executable, "-c", begins], cold=True)
    assert job.returncode == 130 and not (tmp_path / "run").exists(), job.stderr
    assert job.stderr.count("distgpt: ") == 1 and "Abort" not in job.stderr, job.stderr


MISTAKES = [
    ([*TRAIN, "--batch-size", "5"], 2, ["batch_size 5", "4 or 6"]),
    ([*TRAIN, "--batch-size", "6", "--grad-accum", "2"], 2, ["4 or 8"]),
    ([*TRAIN, "--vocab-size", "7"], 2, ["vocab_size (7)"]),
    ([*TRAIN, "--data", "nowhere.txt"], 65, ["nowhere.txt"]),
    ([*TRAIN, "--resume", "nowhere"], 65, ["nowhere"]),
    (["infer", "--weights", "noise", "--stage", "mpi", "--prompt", "a"], 65, ["noise"]),
]


@ci_ranks
@pytest.mark.any_mpi
def test_mistakes_are_reported_once(tmp_path):
    (tmp_path / "noise").write_bytes(os.urandom(100))
    found = in_one_job([args for args, _, _ in MISTAKES], 2, cwd=tmp_path)
    for (errors, codes), (args, code, words) in zip(found, MISTAKES, strict=True):
        assert codes == {code}, (args, codes, errors)
        assert errors.startswith("distgpt: ") and errors.count("\n") == 1, (args, errors)
        assert all(word in errors for word in words), (args, errors)
    assert [path.name for path in tmp_path.iterdir()] == ["noise"]


# The command of each rank is an argument of this program.
EACH_ITS_OWN = """
import json, os, sys
from distgpt.commands.cli import main
from distgpt.cluster.launch.environment import launched_rank
sys.argv[1:] = json.loads(sys.argv[1 + launched_rank()])
"""
EACH = {"program": [sys.executable, "-c", f"{EACH_ITS_OWN}main()"], "cold": False}
SERIAL, ANOTHER = ["train", *SMALL, "--out", "run"], ["infer", "--stage", "mpi", "--prompt", "a"]


@ci_ranks
@pytest.mark.parametrize(("ours", "other", "said"), [
    (TRAIN, [*TRAIN, "--stepz", "3"], ["rank 1: No such option", "--stepz"]),
    (TRAIN, SERIAL, ["rank 1: --stage serial was launched as 2"]),
    (SERIAL, TRAIN, ["--stage serial was launched as 2"]),
    (SERIAL, SERIAL, ["launched as 2 processes", "--stage mpi"]),
    (TRAIN, ANOTHER, ["distgpt infer on rank 1, but distgpt train on rank 0"]),
])  # fmt: skip
def test_mismatched_rank_ends_the_job(ours, other, said, tmp_path):
    """Also before MPI starts; otherwise the other ranks would wait forever."""
    result = distgpt(*map(json.dumps, (ours, other)), ranks=2, cwd=tmp_path, **EACH, timeout=60)
    refused(result, 2, *said)
    assert not list(tmp_path.iterdir()) and ("rank 1" in result.stderr) == ("rank 1" in said[0])


def met(*commands):
    def meet(comm):
        words = list(commands[comm.rank])
        with cli.make_context("distgpt", words) as context:
            name, command, rest = cli.resolve_command(context, words)
            with command.make_context(name, rest, parent=context):
                return jobs.LAUNCHED.meet(comm)

    return on_all_ranks(len(commands), meet)


def test_ranks_with_different_options_end_the_job():
    for more, said in (
        (["--lr", "0.5"], "--lr is 0.5 on rank 1, but 0.01 on rank 0"),
        (["--tensorboard"], "--tensorboard is True on rank 1, but not given on rank 0"),
    ):
        for error in met(TRAIN, [*TRAIN, *more], TRAIN):
            assert isinstance(error, UsageError) and error.shared and said in str(error)
    assert met(TRAIN, [*TRAIN, "--threads", "2", "--progress", "plain"]) == [None, None]


@pytest.mark.ci
def test_single_process_command_waits_for_no_rank(tmp_path):
    """A shell started by srun may run it without other ranks."""
    env = {"MPI_LOCALNRANKS": "2", "PMI_SIZE": "2", "PMI_RANK": "0", "PMI_FD": "9"}
    refused(distgpt("runs", env=env, cwd=tmp_path, cold=True, timeout=30), 2, "runs runs as one process")


@ci_ranks
def test_errors_of_all_ranks_are_named(tmp_path):
    words = (json.dumps(["train", option]) for option in ("--one", "--two", "--one", "--two"))
    result = distgpt(*words, ranks=4, cwd=tmp_path, **EACH)
    lines = result.stderr.splitlines()
    assert result.returncode == 2 and lines[-2].startswith("Error: No such option"), result.stderr
    assert lines[-1].startswith("distgpt: ranks 1, 3: No such option") and "--one" not in lines[-1]


@ci_ranks
def test_signal_ends_a_job_stuck_in_mpi_init(tmp_path):
    """Python's handlers cannot run within MPI_Init."""
    if mpi.vendor() == "Open MPI":
        pytest.skip("its mpirun ends a job of which a rank has left")
    comes = """
from distgpt.core.comm import mpi
launched_rank() and sys.exit(3)
init = mpi.MPI.Init_thread
mpi.MPI.Init_thread = lambda level: print("begins", os.getpid(), flush=True) or init(level)
main()
"""
    words = command(json.dumps(TRAIN), "[]", ranks=2, program=[sys.executable, "-c", EACH_ITS_OWN + comes])
    with subprocess.Popen(words, cwd=tmp_path, env=clean_environment(), stdout=subprocess.PIPE, text=True) as job:
        rank_0 = int(job.stdout.readline().split()[1])
        try:
            time.sleep(0.3)  # until it is in C
            job.terminate()
            assert job.wait(20) == signal.SIGTERM
        finally:
            job.poll() is None and os.kill(rank_0, signal.SIGKILL)


HYDRA = {"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
SRUN, PMIX = {"SLURM_STEP_NUM_TASKS": "2"}, {"PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.1.0"}
FLUX = {"FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "0", "FLUX_PMI_LIBRARY_PATH": "/lib/libpmi.so"}
# The MPI of mpi4py, whether it has PMIx, the launcher's variables, and the error.
LAUNCHED = (
    ("Open MPI", False, HYDRA, "mpirun of MPICH or a derivative, but mpi4py belongs to Open MPI"),
    ("MPICH", False, {"OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI's mpirun, but mpi4py belongs to MPICH"),
    ("Open MPI", False, {"PMI_SIZE": "1", "MPI_LOCALNRANKS": "1"}, ""),  # one process
    ("Open MPI", False, {"OMPI_COMM_WORLD_SIZE": "2", **HYDRA}, ""),
    ("MPICH", False, HYDRA, ""),
    ("Intel MPI", False, HYDRA, ""),
    ("MPICH", False, {}, ""),
    ("MPICH", False, {**SRUN, **PMIX}, "--mpi=pmi2"),
    ("MPICH", True, {**SRUN, **PMIX}, ""),
    ("MPICH", False, {**SRUN, "PMI_RANK": "0", "PMIX_MCA_gds": "hash"}, ""),
    ("MPICH", False, SRUN, ""),  # a single process, or built with Slurm's PMI
    ("Cray MPICH", False, {**SRUN, **PMIX}, ""),
    ("Open MPI", False, {**SRUN, **PMIX}, ""),
    ("Open MPI", False, {**SRUN, "OMPI_COMM_WORLD_SIZE": "2"}, ""),  # mpirun, which used srun
    ("MPICH", False, {**FLUX, "PMI_SIZE": "2", "PMIX_ROOT": "/opt/pmix"}, ""),  # set by a module
    ("MPICH", False, {**FLUX, **PMIX}, "pmi=simple"),
    ("MPICH", True, {**FLUX, **PMIX}, ""),
    ("MPICH", True, {**FLUX, **PMIX, "PMI_SIZE": "2"}, "pmi=simple"),
    ("Open MPI", False, {**FLUX, **PMIX, "PMI_SIZE": "2"}, ""),
)


@pytest.mark.parametrize(("vendor", "has_pmix", "launched", "wrong"), LAUNCHED)
def test_unsuited_launcher_is_reported_before_mpi_starts(vendor, has_pmix, launched, wrong, monkeypatch):
    """MPI itself would print pages and end the process."""
    for name in [name for name in os.environ if name in SIZES or name.startswith("PMI")]:
        monkeypatch.delenv(name)
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(mpi, "vendor", lambda: vendor)
    built = f"MPICH Configure: --prefix=/usr{' --with-pmix' * has_pmix}" if vendor == "MPICH" else vendor
    monkeypatch.setattr(mpi.MPI, "Get_library_version", built.__str__)
    said = jobs.foreign_launcher()
    assert bool(said) == bool(wrong) and wrong in said


OPEN_MPI = shutil.which("mpirun.openmpi") or shutil.which(ROOT / ".openmpi/bin/mpirun")


@pytest.mark.skipif(OPEN_MPI is None, reason="needs Open MPI's mpirun: apt install openmpi-bin")
@pytest.mark.skipif(mpi.vendor() == "Open MPI", reason="mpi4py is Open MPI's")
@pytest.mark.parametrize(("env", "words"), [
    ({}, ["launched by Open MPI's mpirun", "use the mpirun of"]),
    ({"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}, ["MPI4PY_LIBMPI=/nowhere/libmpi.so", "module load"]),
    ({"PYTHONPATH": "without"}, ["require mpi4py", "pip install"]),
])  # fmt: skip
def test_open_mpi_launch_errors_are_one_line(env, words, tmp_path):
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "mpi4py.py").write_text("raise ModuleNotFoundError(name='mpi4py')")
    launch = [OPEN_MPI, "-n", "4", "--oversubscribe", *command(*TRAIN)]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    env = clean_environment(**root, **env)
    job = subprocess.run(launch, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    ours = [line for line in job.stderr.splitlines() if line.startswith("distgpt: ")]
    assert job.returncode == 2 and len(ours) == 1, job.stderr
    assert all(word in ours[0] for word in words) and "Traceback" not in job.stderr
    assert not (tmp_path / "run").exists()
