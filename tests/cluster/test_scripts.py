"""Scripts that `distgpt submit` prints, compared with scripts.txt. To update it after an intended change:

PYTHONPATH=tests:tests/helpers python tests/cluster/test_scripts.py >tests/cluster/scripts.txt
"""

import difflib
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from conftest import succeeded

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
