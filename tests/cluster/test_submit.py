"""`distgpt submit`: scripts for each batch system, and successors. After an intended change of scripts:

PYTHONPATH=tests:tests/helpers python tests/cluster/test_submit.py >tests/cluster/scripts.txt
"""

import difflib
import os
import re
import shlex
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
from distgpt.cluster.affinity.machine import read_machine
from distgpt.cluster.jobs import batch, systems
from distgpt.cluster.jobs.systems import LAUNCHERS, SYSTEMS
from distgpt.cluster.launch.environment import MPIS, batch_job, job_end
from hosts import program
from trees import sys_of

from conftest import SMALL, inside, needs_mpi, refused, succeeded, wait_for

TRAIN = ["train", "--batch-size", "32", "--out", "runs/mine"]
TWO_NODES = ["--nodes", "2", "--mpi", "pmi2"]


def submit(system, *words, command=TRAIN, **how):
    return inside("submit", "--system", system, "--time", "4h", *words, "--", *command, **how)


def written(system, *words, command=TRAIN, cwd=None):
    result = submit(system, *words, command=command, cwd=cwd)
    assert result.returncode == 0, result.stderr
    return result.stdout


def directives(system, text):
    sentinel = SYSTEMS[system].sentinel + " "
    return [line.removeprefix(sentinel) for line in text.splitlines() if line.startswith(sentinel)]


def started(text):
    return shlex.split(re.search(r"^set -m.*?\n(.*?) \\\n  >>", text, re.S | re.M)[1].replace("\\\n", ""))


def test_prefix_may_end_with_another_distgpt(tmp_path):
    words = ["--prefix", "/opt/apptainer exec 'my image.sif' distgpt"]
    command = started(written("sge", *words, cwd=tmp_path))
    assert command[:5] == ["/opt/apptainer", "exec", "my image.sif", "distgpt", "train"]
    bare = started(written("sge", "--prefix", "numactl -l", cwd=tmp_path))
    assert bare[:2] == ["numactl", "-l"] and bare[2].endswith("/distgpt")  # this installation's


@pytest.mark.ci
@pytest.mark.smoke
def test_first_start_of_script_trains(tmp_path):
    small = ["--n-layer", "1", "--n-embd", "16", "--n-head", "1", "--seq-len", "16", "--batch-size", "2"]
    for out, words in (("mine", ["train", *small]), ("other", ["train", "--preset", "tiny-adamw", *small])):
        text = written("slurm", command=[*words, "--steps", "1", "--out", out], cwd=tmp_path)
        command = started(text)
        succeeded(*command[command.index("train") :], "--threads", "1", cwd=tmp_path)
        assert (tmp_path / out / "weights.safetensors").exists()


def test_documented_mpis_have_launchers():
    for vendor, known in MPIS.items():
        assert SYSTEMS["pbs"].mpi[vendor] in LAUNCHERS and SYSTEMS["slurm"].mpi[vendor] == known.srun


@pytest.mark.ci
@pytest.mark.ranks
def test_own_mpirun_starts_only_its_mpi(tmp_path, monkeypatch):
    own = tmp_path / "own bin" / "mpirun"
    own.parent.mkdir()
    program(own, "echo HYDRA build details")
    monkeypatch.setattr(systems, "own_mpirun", lambda: str(own))
    for mpi, starts in (("mpich", str(own)), ("openmpi", "mpiexec"), ("intel", "mpiexec"), ("pals", "mpiexec")):
        text = written("sge", "--ranks-per-node", "2", "--mpi", mpi, cwd=tmp_path)
        assert started(text)[0] == starts, mpi


def test_submit_adds_stall_abort_by_default(tmp_path):
    for words, expected in (([], "30m"), (["--stall-abort", "2h"], "2h"), (["--stall-timeout", "1h"], None)):
        command = started(written("sge", command=[*TRAIN, *words], cwd=tmp_path))
        found = [after for word, after in pairwise(command) if word == "--stall-abort"]
        assert found == ([expected] if expected else [])


# Options of submit, then a command (default: TRAIN). Files are in the working directory.
REFUSED = (
    ("sge", 2, ["--array", "1,3"], "--array 1,3"),
    ("pbs", 2, ["--array", "3"], "--array 3"),
    ("slurm", 2, ["--array", "4-1"], "4-1"),
    ("lsf", 2, ["--array", "1-4%0"], "--array=1-4%0"),
    ("slurm", 2, ["--array", "1-4%x"], "--array=1-4%x"),
    ("slurm", 2, ["--array", "1,x"], "--array=1,x"),
    ("slurm", 2, ["--directive", "--array=1-4"], "--directive --array=1-4"),
    ("pbs", 2, ["--directive", "-J 1-3"], "--directive -J 1-3"),
    ("lsf", 2, ["--array", "1-3", "--directive", "-J other"], "--directive -J other"),
    ("lsf", 2, ["--directive", '-J "other[1-3]"'], "--directive -J"),
    ("slurm", 2, ["--array", "1-3", "--directive", "-a1-2"], "--directive -a1-2"),
    ("pbs", 2, ["--directive", "-l walltime=1:00:00"], "--directive -l walltime"),
    ("sge", 2, ["--directive", "-l h_rt=60"], "--directive -l h_rt"),
    ("flux", 2, ["--directive", "-t60"], "--directive -t60"),
    ("sge", 2, ["--memory", "4G"], "--memory"),
    ("flux", 2, ["--memory", "4G"], "--memory"),
    ("flux", 2, ["--array", "1-4%2"], "--array 1-4%2"),
    ("lsf", 2, ["--setup", "a\nb"], "characters"),
    ("sge", 2, ["--prefix", "a 'b"], "--prefix a 'b"),
    ("lsf", 2, TWO_NODES, "--mpi pmi2"),
    ("slurm", 2, ["infer"], "infer"),
    ("slurm", 2, [*TWO_NODES, "train", "--batch-size", "3"], "batch_size 3"),
    ("slurm", 2, [*TWO_NODES, "train", "--stage", "serial"], "use --stage mpi"),
    ("slurm", 2, ["train", "--stage", "cuda"], "--gpus-per-node 0"),
    ("slurm", 2, [*TWO_NODES, "--gpus-per-node", "1", "train", "--stage", "mpi"], "not possible with 2 ranks"),
    ("slurm", 2, [*TWO_NODES, "train", "--resume", "runs/x"], "--resume"),
    ("slurm", 2, ["train", "--out", "svaed", "--resume", "auto"], "did you mean 'saved'"),
    ("slurm", 2, [*TWO_NODES, "train", "--out", "a\nscancel 1"], "characters"),
    ("slurm", 2, ["--name", "../x"], "--name"),
    ("slurm", 2, ["--time", "soon"], "'soon'"),
    ("slurm", 2, ["--node", "8 by 16"], "--node 8 by 16"),
    ("slurm", 2, ["--node", "0x16"], "--node 0x16"),
    ("slurm", 2, ["--node", "8x16", "--cpus-per-task", "17"], "17 CPUs"),
    ("slurm", 2, ["--node", "1x2", "--ranks-per-node", "4"], "4 ranks with 1 CPU each do not fit"),
    ("slurm", 2, ["train", "--set", "rope_base=0"], "rope_base"),
    ("slurm", 2, ["train", "--time-limit", "5h"], "--time-limit 5h"),
    ("slurm", 2, ["--submit"], "sbatch"),
    # Files that the job, or an element of an array, would miss.
    ("slurm", 65, ["train", "--data", "empty"], "empty"),
    ("slurm", 65, ["train", "--val", "gone.jsonl"], "gone.jsonl"),
    ("slurm", 65, ["train", "--preset", "gpt2", "--data", "shards"], "shards"),
    ("slurm", 2, ["train", "--tokenizer", "nowhere.json"], "nowhere.json"),
    ("slurm", 65, ["train", "--hellaswag", "nowhere.jsonl"], "nowhere.jsonl"),
    ("slurm", 74, ["train", "--init", "nowhere.safetensors"], "nowhere.safetensors"),
    ("slurm", 65, ["train", "--out", "saved", "--data", "gone.txt"], "gone.txt"),
    ("slurm", 2, ["--array=1-3", "train", "--config", "$SLURM_ARRAY_TASK_ID.toml"], "3.toml"),
    ("slurm", 2, ["train", "--config", "$SLURM_ARRAY_TASK_ID.toml"], "--array"),
)
READY = (
    ["--data", "text.txt", "--tokenizer", "char"],
    ["--data", "shards"],
    ["--out", "saved"],
    ["--set", "rope_base=500", "--set", "data=story"],
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    (folder / "empty").mkdir()
    (folder / "text.txt").write_text("some text")
    for number in (1, 2):
        (folder / f"{number}.toml").write_text(f"steps = {number}\n")
    for words in (
        ["data", "prepare", "text.txt", "--tokenizer", "byte", "--out", "shards"],
        ["train", *SMALL, "--data", "text.txt", "--steps", "1", "--out", "saved"],
    ):
        assert inside(*words, cwd=folder).returncode == 0
    return folder


@pytest.mark.parametrize(("system", "code", "words", "said"), REFUSED)
def test_submit_rejects_commands_that_would_fail(system, code, words, said, files):
    command = [] if {"train", "infer"} & {*words} else TRAIN
    env = {"PATH": str(files)} if "--submit" in words else None
    result = inside("submit", "--system", system, "--time", "4h", *words, *command, cwd=files, env=env)
    refused(result, code, said)
    assert result.stdout == ""


def test_submit_accepts_commands_that_work(files):
    for words in READY:
        command = started(written("slurm", *TWO_NODES, command=["train", *words], cwd=files))
        assert shlex.join(words) in shlex.join(command)
    written("slurm", "--array=1,2", command=["train", "--config", "$SLURM_ARRAY_TASK_ID.toml"], cwd=files)


@pytest.mark.parametrize("words", [["--nodes", "0", "--", *TRAIN], ["--", "train", "--stepz", "3"]])
def test_submit_rejects_wrong_options(words, tmp_path):
    result = inside("submit", "--system", "slurm", "--time", "1h", *words, cwd=tmp_path)
    assert result.returncode == 2 and {"--nodes", "--stepz"} & {*re.findall(r"--\w+", result.stderr)}
    assert result.stdout == ""


def test_job_name_comes_from_out(tmp_path):
    for out, name in (("2024-11-28", "run-2024-11-28"), ("all", "run-all"), ("a1", "a1")):
        found = directives("sge", written("sge", command=["train", "--out", out], cwd=tmp_path))
        assert [line for line in found if line.startswith("-N")] == [f"-N {name}"]


def test_batch_system_is_found_by_commands(tmp_path):
    def found(*programs):
        folder = tmp_path / "-".join(("bin", *programs))
        folder.mkdir()
        for name in programs:
            program(folder / name, "")
        return inside("submit", "--time", "1h", *TRAIN, cwd=tmp_path, env={"PATH": str(folder)})

    for programs, name, sentinel in (
        (("sbatch", "flux"), "Slurm", "#SBATCH"),
        (("qsub", "pbsnodes"), "PBS", "#PBS"),
        (("qsub", "qconf"), "Grid Engine", "#$ -N"),
        (("bsub",), "LSF", "#BSUB"),
        (("flux",), "Flux", "# flux:"),
    ):
        result = found(*programs)
        assert f"batch system: {name}" in result.stderr and f"\n{sentinel}" in result.stdout
    refused(found("qsub"), 2, "no batch system found", "--system pbs")


def test_log_format_applies_to_the_job(tmp_path):
    text = written("pbs", command=[*TRAIN, "--log-format", "json"], cwd=tmp_path)
    assert text.startswith("#!/bin/bash\n") and text.endswith("exit $code\n")


def test_job_end_is_read_from_script_variable():
    end = {"DISTGPT_JOB_END": str(int(time.time()) + 100)}
    assert 90 < job_end(None, end) - time.monotonic() <= 100
    assert job_end(None, {"DISTGPT_JOB_END": "soon"}) is job_end(None, {"DISTGPT_JOB_END": "12"}) is None
    assert batch_job({"FLUX_JOB_ID": "f1"}) == {"system": "Flux", "id": "f1"}
    assert batch_job({"FLUX_JOB_ID": "f1", "FLUX_ENCLOSING_ID": "f2"}) == {"system": "Flux", "id": "f2"}


@pytest.mark.parametrize(("words", "ranks", "cpus"), [
    ("--node 8x16", 8, 16),
    ("--node 8x16 --ranks-per-node 1", 1, 128),
    ("--node 8x16 --ranks-per-node 3", 3, 42),
    ("--node 2x24 --cpus-per-task 12", 2, 12),
])  # fmt: skip
def test_described_node_gets_rank_per_region(words, ranks, cpus, tmp_path):
    text = written("slurm", *TWO_NODES, *words.split(), command=["train", "--batch-size", "192"], cwd=tmp_path)
    assert {f"--ntasks-per-node={ranks}", f"--cpus-per-task={cpus}"} <= {*directives("slurm", text)}
    command = started(text)
    assert command[command.index("--threads") + 1] == str(cpus)


def test_node_here_describes_this_machine(tmp_path, monkeypatch):
    for name, ranks, cpus in (("cascade lake", 2, 24), ("archer2", 8, 16), ("alder lake", 1, 6)):
        monkeypatch.setattr(batch, "read_machine", lambda name=name: read_machine(sys_of(name)))
        assert batch.shape("here") == (ranks, cpus)
    monkeypatch.setattr(batch, "read_machine", lambda: read_machine(tmp_path))
    refused(submit("slurm", "--node", "here", cwd=tmp_path), 2, "--node here", str(tmp_path), "--node 8x16")


@pytest.mark.ci
@pytest.mark.parametrize(("given", "out"), [
    (["--out=my runs"], "my runs/6"),
    (["--out", "lr-$SLURM_ARRAY_TASK_ID's"], "lr-6's"),
    (["--out", "lr-${SLURM_ARRAY_TASK_ID}"], "lr-6"),
    ([], "runs/tiny/6"),
])  # fmt: skip
def test_array_element_has_its_directory_and_number(given, out, tmp_path):
    """The job's number would be that of the whole array."""
    command = ["train", *given, "--seed", "$SLURM_ARRAY_TASK_ID"]
    script = written("slurm", "--name", "seeds", "--array", "3-9:3%2", command=command, cwd=tmp_path)
    assert directives("slurm", script)[-2:] == ["--output=seeds-%A_%a.log", "--array=3-9:3%2"]
    assert "$SLURM_JOB_ID" not in script
    # Fake srun and scontrol print their arguments.
    program(tmp_path / "srun", 'printf "%s\\0" "$@"; exit 75')
    program(tmp_path / "scontrol", 'echo "$@" >>scontrol.txt')
    numbers = {"SLURM_JOB_ID": "41", "SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "6"}
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_CPUS_PER_TASK": "1", **numbers}
    (tmp_path / out / "checkpoints" / "step-00000001").mkdir(parents=True)
    words = ["bash", "-c", script.replace("before=$(newest)", "before=")]
    ended = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert ended.returncode == 0 and "newest checkpoint: step-00000001" in ended.stdout, ended
    command = (tmp_path / "seeds-40_6.0.log").read_text().split("\0")
    assert command[command.index("--seed") + 1] == "6"
    assert [word.removeprefix("--out=") for word in command if word.endswith(out)]
    assert (tmp_path / "scontrol.txt").read_text() == "requeue 40_6\n"


@needs_mpi
@pytest.mark.parametrize(("text", "numbers"), [
    ("", []), ("7", [7]), ("1-4", [1, 2, 3, 4]), ("0-8:2%3", [0, 2, 4, 6, 8]), ("0,3,2-3,7", [0, 3, 2, 7]),
])  # fmt: skip
def test_array_elements_are_numbers(text, numbers):
    assert batch.elements(text) == numbers


def test_srun_uses_pmi_of_mpi4py(tmp_path):
    result = submit("slurm", "--nodes", "2", cwd=tmp_path)
    from mpi4py import MPI

    way = {"MPICH": "pmi2", "Open MPI": "pmix"}[MPI.get_vendor()[0]]
    assert f"--mpi {way}" in result.stderr and started(result.stdout)[1] == f"--mpi={way}"


class PlayedJob:
    """A PBS script with a fake qsub, and an mpiexec that by default saves a checkpoint and exits with 75."""

    def __init__(self, folder, *words, ranks="2"):
        self.folder = folder
        words = ["--mpi", "pals", "--ranks-per-node", ranks, *words]
        (folder / "job.sh").write_text(written("pbs", *words, cwd=folder))
        self.program("qsub", 'sleep 0.1; echo "$*" >>submitted.txt; cat "$1" >>scripts.txt 2>&-')
        self.program("mpiexec", self.trains())

    @staticmethod
    def trains(code=75, out="runs/mine"):
        return f"mkdir -p {out}/checkpoints/step-$$; exit {code}"

    def program(self, name, text):
        program(self.folder / name, text)

    def begun(self, number="7.server", **environ):
        environ |= {"PATH": f"{self.folder}:{os.environ['PATH']}", "PBS_JOBID": number}
        environ["PBS_O_WORKDIR"] = str(self.folder)
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(["bash", self.folder / "job.sh"], env=environ, **how)

    def ended(self, number="7.server", **environ):
        with self.begun(number, **environ) as process:
            said, _ = process.communicate()
        return process.returncode, said

    @property
    def submitted(self):
        path = self.folder / "submitted.txt"
        return path.read_text().splitlines() if path.exists() else []


@pytest.mark.ci
@pytest.mark.ranks
def test_job_submits_successor_once(tmp_path):
    job = PlayedJob(tmp_path)
    job.program("mpiexec", "exit 75")  # no step was finished
    assert job.ended()[0] == 75 and not job.submitted
    job.program("mpiexec", job.trains(0))  # all were
    assert job.ended()[0] == 0 and not job.submitted
    job.program("mpiexec", job.trains(65))  # an error
    assert job.ended()[0] == 65 and not job.submitted
    job.program("mpiexec", job.trains())
    assert job.ended()[0] == 0 and job.submitted == [str(tmp_path / "job.sh")]
    code, said = job.ended()  # PBS restarted it
    assert code == 75 and "has already submitted its successor" in said and len(job.submitted) == 1
    assert job.ended("8.server")[0] == 0 and len(job.submitted) == 2  # the successor's own
    job.program("mpiexec", "exit 75")  # again no step, now with a checkpoint of before
    code, said = job.ended("9.server")
    assert code == 75 and "no step finished" in said and len(job.submitted) == 2
    assert [*tmp_path.glob("mine-7.*.log")] and (tmp_path / "mine-7.4.log").exists()


@pytest.mark.ci
@pytest.mark.ranks
def test_setup_runs_in_submit_directory_and_marker_may_fail(tmp_path):
    (tmp_path / "env").write_text("touch seen\n")
    job = PlayedJob(tmp_path, "--setup", ". ./env")
    job.program("mkdir", '[ "$1" = -p ] && exec /bin/mkdir "$@"; exit 1')
    code, said = job.ended()
    assert (tmp_path / "seen").exists() and code == 75 and not job.submitted
    assert "cannot create runs/mine/followed-7" in said and "already" not in said


@pytest.mark.ci
@pytest.mark.ranks
def test_concurrent_ends_submit_one_successor(tmp_path):
    job = PlayedJob(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        ends = [*pool.map(lambda _: job.ended()[0], range(4))]
    assert sorted(ends) == [0, 75, 75, 75] and len(job.submitted) == 1


@pytest.mark.ci
@pytest.mark.ranks
def test_deleted_job_saves_and_submits_nothing(tmp_path):
    job = PlayedJob(tmp_path)
    job.program("mpiexec", f"trap '{job.trains()}' USR1; touch here; while :; do sleep 0.05; done")
    with job.begun() as process:
        wait_for((tmp_path / "here").exists)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=30)
    assert process.returncode == 75 and "newest checkpoint: step-" in said and not job.submitted


@pytest.mark.ci
@pytest.mark.ranks
def test_script_waits_for_suspended_ranks(tmp_path):
    """LSF sends TSTP to a job of many slots, which would end a wait of bash."""
    job = PlayedJob(tmp_path)
    job.program("mpiexec", f"echo $$ >here; sleep 0.5; {job.trains()}")
    with job.begun() as process:
        launcher = int(wait_for(lambda: (tmp_path / "here").exists() and (tmp_path / "here").read_text()))
        os.kill(launcher, signal.SIGTSTP)
        time.sleep(0.6)
        assert process.poll() is None
        os.kill(launcher, signal.SIGCONT)
        said, _ = process.communicate(timeout=30)
    assert process.returncode == 0 and "exited with 75" in said, said


@pytest.mark.ci
@pytest.mark.ranks
def test_element_successor_keeps_its_number(tmp_path):
    job = PlayedJob(tmp_path, "--array", "1-3")
    job.program("qsub", 'echo "$*" >>submitted.txt; cat >scripts.txt')
    job.program("mpiexec", job.trains(out="runs/mine/3") + "; env >environ.txt")
    assert job.ended("7[3].server", PBS_ARRAY_INDEX="3")[0] == 0
    assert job.submitted == ["-v ELEMENT=3"] and (tmp_path / "runs/mine/3/followed-7[3]").is_dir()
    successor = (tmp_path / "scripts.txt").read_text()
    assert successor == (tmp_path / "job.sh").read_text().replace("#PBS -J 1-3\n", "")
    (tmp_path / "job.sh").write_text(successor)
    assert job.ended("8.server", ELEMENT="3")[0] == 0 and len(job.submitted) == 2


@pytest.mark.ci
@pytest.mark.ranks
def test_pbs_successor_has_no_dependencies(tmp_path):
    job = PlayedJob(tmp_path, "--directive", "-Wdepend=afterok:5", "--directive", "-W group_list=a")
    job.program("qsub", 'echo "qsub $*" >>submitted.txt; cat >scripts.txt')
    assert job.ended()[0] == 0 and job.submitted == ["qsub "]
    first = (tmp_path / "job.sh").read_text()
    assert (tmp_path / "scripts.txt").read_text() == first.replace("#PBS -Wdepend=afterok:5\n", "")


@pytest.mark.ci
def test_flux_submits_each_array_element(tmp_path):
    program(tmp_path / "flux", 'echo "$*" >>calls.txt; cat >/dev/null')
    words = ["submit", "--system", "flux", "--time", "1h", "--array", "1-3:2,3", "--submit", *TRAIN]
    succeeded(*words, cwd=tmp_path, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    calls = (tmp_path / "calls.txt").read_text().splitlines()
    assert calls == ["batch --env=ELEMENT=1", "batch --env=ELEMENT=3"]


KEPT = Path(__file__).with_name("scripts.txt")
MPI = {"slurm": "pmi2", "pbs": "mpich", "sge": "intel", "lsf": "pals", "flux": "mpich"}
OTHER = {"slurm": "pmix", "flux": "openmpi"}
MEMORY = {"slurm": "--memory 64G", "pbs": "--memory 64G", "lsf": "--memory 64G"}
OWN = {
    "slurm": "--directive --partition=gpu --directive --signal=USR1@600 --directive --gres=gpu:a100:2",
    "pbs": "--directive '-q long' --directive '-W depend=afterok:5' --directive '-l place=pack'",
    "sge": "--directive '-q long' --directive '-l s_rt=1:00:00' --directive '-pe orte 8'",
    "lsf": "--directive '-q long' --directive '-w done(5)' --directive '-o mine.txt'",
    "flux": "--directive --queue=long --directive --exclusive",
}
SITE = "--setup 'export A=\"b c\"' --prefix 'numactl -l' -- "
OUT = "train --batch-size 32 --out 'runs/my run'"
CASES = {
    "two nodes": "--nodes 2 --ranks-per-node 4 --cpus-per-task 8 --mpi {mpi} -- " + OUT,
    "whole nodes with GPUs": "--nodes 2 --node 4x4 --exclusive --gpus-per-node 4 {memory} --mpi {mpi} -- " + OUT,
    "an array of single ranks": "--time 2m --array 1-4{most} --successor -- train --threads 3 --seed $ELEMENT",
    "another MPI": "--nodes 2 --node 2x4 --exclusive --mpi {other} --successor -- " + OUT,
    "the user's own": "--nodes 2 --node 2x4 --gpus-per-node 2 --mpi {other} {own} " + SITE + OUT,
}


def script(system, case, folder):
    chosen = {"mpi": MPI[system], "other": OTHER.get(system, "openmpi"), "most": "%2" * (system != "flux")}
    words = CASES[case].format(**chosen, memory=MEMORY.get(system, ""), own=OWN[system])
    result = succeeded("submit", "--system", system, "--time", "26h", *shlex.split(words), cwd=folder)
    return re.sub(r"^# \S*distgpt submit .*\n", "", result.stdout, flags=re.M).splitlines()


def changes(base, changed):
    """Return the lines that replace lines of `base`, with the line numbers of `base`."""
    for _, begin, end, first, last in difflib.SequenceMatcher(None, base, changed, autojunk=False).get_opcodes():
        if base[begin:end] != changed[first:last]:
            head, *rest = changed[first:last] or [""]
            yield f"{begin}:{end} {head}".rstrip()
            yield from (f"+ {line}".rstrip() for line in rest)


def all_scripts(folder):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("distgpt.cluster.jobs.systems.own_mpirun", lambda: None)
        patched.setattr("distgpt.commands.jobs.own_program", lambda: ["distgpt"])
        return {(system, case): script(system, case, folder) for system in MPI for case in CASES}


def told(scripts):
    for (system, case), text in scripts.items():
        # A system's first script is compared with Slurm's, its others with its first.
        base = scripts["slurm" if case == "two nodes" else system, "two nodes"]
        yield f"=== {system}: {case}"
        yield from text if text is base else changes(base, text)


def test_scripts_match_saved_ones(tmp_path):
    assert [*told(all_scripts(tmp_path))] == KEPT.read_text().splitlines()


@pytest.mark.ci
def test_bash_parses_all_scripts(tmp_path):
    lines = [line for text in all_scripts(tmp_path).values() for line in text]
    subprocess.run(["bash", "-n"], input="\n".join(lines), text=True, check=True)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as empty:
        print("\n".join(told(all_scripts(empty))))
