"""distgpt slurm"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from distgpt.commands.complete import line_of
from distgpt.commands.help import command
from distgpt.commands.options import OPTIONS, parsed_duration, set_by_user
from distgpt.commands.train import train
from distgpt.commands.tune import as_train, tune
from distgpt.core.base.errors import UsageError, command_line, print_lines
from distgpt.core.config import ON_GPU, WITH_MPI, RunConfig
from distgpt.core.config.asked import asked_for
from distgpt.jobs import array
from distgpt.jobs.array import ELEMENT
from distgpt.jobs.batchscript import PMI, Job, script
from distgpt.jobs.processes import own_program

SECONDS_FOR_SLURM = 60


@command(
    context_settings={"allow_interspersed_args": False},
    example="distgpt slurm --nodes 2 --ranks-per-node 4 --time 4h -- train --preset gpt2 > job.sh",
)
@click.option("--nodes", type=click.IntRange(1), default=1, show_default=True, help="Number of nodes.")
@click.option(
    "--ranks-per-node", type=click.IntRange(1), help="Ranks on each node. [default: its GPUs, or 1]"
)
@click.option("--cpus-per-task", type=click.IntRange(1), help="CPUs and threads of each rank. [default: 1]")
@click.option("--gpus-per-node", type=click.IntRange(1), help="GPUs of each node to train on.")
@click.option(
    "--time",
    "seconds",
    metavar="TIME",
    required=True,
    callback=parsed_duration,
    help="Limit of one attempt, as in 4h; the run is saved before and queued again.",
)
@click.option("--mpi", help="How srun starts MPI, as in pmi2 or pmix. [default: by mpi4py's MPI]")
@click.option("--name", help="Name of the job and its logs. [default: the run directory's]")
@click.option(
    "--sbatch",
    "lines",
    multiple=True,
    metavar="OPTION",
    help='Any option of sbatch, as "--partition=gpu"; may be repeated.',
)
@click.option("--submit", is_flag=True, help="Submit the script instead of printing it.")
@click.argument(
    "words",
    nargs=-1,
    required=True,
    type=click.UNPROCESSED,
    metavar="-- train [OPTIONS]",
    shell_complete=line_of(train, tune),
)
def slurm(
    nodes: int,
    ranks_per_node: int | None,
    cpus_per_task: int | None,
    gpus_per_node: int | None,
    seconds: float,
    mpi: str | None,
    name: str | None,
    lines: tuple[str, ...],
    submit: bool,
    words: tuple[str, ...],
) -> None:
    """Print a batch script for Slurm that trains, or submit it.

    Whatever ends an attempt early, the time limit, a preemption or a lost node, the job is queued again and
    resumes.

    In a job array, as with --sbatch --array=1-4, each element trains in a directory of its own, and
    '$SLURM_ARRAY_TASK_ID' is its number in any option of train.
    """
    command: click.Command | None = {"train": train, "tune": tune}.get(words[0])
    if command is None:
        raise UsageError(f"distgpt slurm is for distgpt train and tune, not for {words[0]}")
    numbers = array.elements(lines)
    words = tuple(word.replace("${SLURM_ARRAY_TASK_ID}", ELEMENT) for word in words)
    given, own_out = array.with_own_directories(words) if numbers else (list(words), "")
    parsed = [_parsed(command, each) for each in array.commands(given, numbers)]
    asked, stage_given = parsed[0]
    ranks_per_node = ranks_per_node or gpus_per_node or 1
    cpus = cpus_per_task or asked["threads"] or 1
    stage = asked["stage"] if stage_given else _stage(nodes * ranks_per_node, gpus_per_node)
    _refuse_unsuited(stage, nodes * ranks_per_node, gpus_per_node)
    runs = [_run_of(each, nodes * ranks_per_node) for each, _ in parsed]
    out = Path(own_out) if own_out else runs[0][0] / ELEMENT if numbers else runs[0][0]
    added = [
        *([] if stage_given else ["--stage", stage]),
        *([] if asked["threads"] or stage in ON_GPU else ["--threads", str(cpus)]),
    ]
    ending = [
        *([] if asked["out"] else ["--out", str(out)]),
        *([] if asked["resume"] else ["--resume", "auto"]),
    ]
    job = Job(
        name=name or _name_of(out),
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        cpus_per_task=cpus,
        gpus_per_node=gpus_per_node or 0,
        seconds=seconds,
        mpi=mpi or _mpi_of(stage),
        lines=lines,
        out=out,
        command=[*own_program(), words[0], *added, *given[1:], *ending],
        made_by=command_line(*sys.argv[1:]),
        is_array=bool(numbers),
    )
    text = script(job).encode()
    notes = dict.fromkeys([*_unready(run for _, run in runs), *_notes(job, asked)])
    if submit:
        _submit(text, job)
    else:
        sys.stdout.buffer.write(text)
    for note in notes:
        print_lines(note, err=True)


def _parsed(command: click.Command, words: Sequence[str]) -> tuple[dict[str, Any], bool]:
    """Return a command's options, which refuses what it cannot read, and whether --stage is among them."""
    with command.make_context(f"distgpt {words[0]}", list(words[1:])) as context:
        source = context.get_parameter_source("stage")
    asked = as_train(**context.params) if command is tune else context.params
    return asked, source != click.core.ParameterSource.DEFAULT


def _name_of(out: Path) -> str:
    """Return a job's name for a run's directory, or for one of an array's."""
    names = (re.sub(r"[^A-Za-z0-9_.]+", "-", part.replace(ELEMENT, "")) for part in out.parts[::-1])
    return next(filter(None, (name.strip("-.") for name in names)), "distgpt")


def _stage(ranks: int, gpus: int | None) -> str:
    return ("mpi-cuda" if gpus else "mpi") if ranks > 1 else ("cuda" if gpus else "serial")


def _refuse_unsuited(stage: str, ranks: int, gpus: int | None) -> None:
    if ranks > 1 and stage not in WITH_MPI:
        raise UsageError(
            f"--stage {stage} is for one rank, not for {ranks}: use --stage {_stage(ranks, gpus)}"
        )
    if stage in ON_GPU and not gpus:
        raise UsageError(f"--stage {stage} needs GPUs: ask for them with --gpus-per-node")
    if gpus and stage not in ON_GPU:
        raise UsageError(f"--stage {stage} uses no GPU: leave out --gpus-per-node, or --stage")


def _unready(runs: Iterable[RunConfig]) -> Iterator[str]:
    """Refuse files that a job would only miss after it has waited in the queue; yield notes."""
    from distgpt.jobs.nodes import refuse_unready

    yield from filter(None, map(refuse_unready, runs))


def _notes(job: Job, asked: dict[str, Any]) -> Iterator[str]:
    """Yield what is worth a look before the job waits."""
    from distgpt.core.data.named import BUNDLED_TEXTS
    from distgpt.jobs.nodes import OWN, own_disks

    if job.is_array:
        yield f"every element of the array has a directory of its own: {job.out}"
    if (asked["threads"] or 0) > job.cpus_per_task:
        cpus = f"--threads {asked['threads']}, but --cpus-per-task {job.cpus_per_task}"
        yield f"{cpus}: threads without a core only make others wait"
    paths = [asked.get(name) for name in ("data", "val", "hellaswag", "init", "config", "tokenizer")]
    there = [Path(path) for path in paths if path and path not in BUNDLED_TEXTS and Path(path).exists()]
    if hidden := [*own_disks([*there, job.out])]:
        names = ", ".join(hidden)
        yield f"{names}: {' and '.join(OWN[:2])} are each machine's own; use a disk that all nodes see"


def _run_of(asked: dict[str, Any], ranks: int) -> tuple[Path, RunConfig]:
    """Return the run's directory, the same in every attempt, and its configuration.

    Refuses settings that would fail when the job starts.
    """
    from distgpt.core.data.batches import refuse_uneven
    from distgpt.core.data.loading import AUTO
    from distgpt.core.saved.rundir import RunDirectory, place_for
    from distgpt.core.train.plan import new_run
    from distgpt.recipes.derived import derived

    if asked["resume"] not in (None, "auto"):
        raise UsageError("--resume is auto in a job that is queued again: name the run with --out")
    out: Path | None = asked["out"]
    flags = set_by_user(
        {key: asked[key] for key in (*OPTIONS, "depth", "within", "epochs", "chats") if key in asked}
    )
    if out and (saved := RunDirectory(out).saved()):
        moved: dict[str, Any] = {key: flags[key] for key in ("data", "val", "hellaswag") if key in flags}
        return out, saved.with_values({**moved, "tokenizer": AUTO})  # a run with settings of its own
    wanted = derived(replace(asked_for(flags, asked["preset"], asked["config"]), fetches=False), ranks)
    run = new_run(wanted)
    refuse_uneven(run.train.batch_size, ranks, run.train.grad_accum or 1)
    return out or place_for(Path("runs"), wanted.name, resuming=False), run


def _mpi_of(stage: str) -> str:
    """Return the value of srun's --mpi that suits the MPI which mpi4py belongs to."""
    if stage not in WITH_MPI:
        return "none"
    try:
        from distgpt.core.comm.mpi import vendor

        found = vendor()
    except (ImportError, RuntimeError) as error:
        raise UsageError(
            f"mpi4py does not say here which MPI it has ({error}): give --mpi pmi2 or pmix"
        ) from None
    chosen = PMI.get(found)
    if chosen is None:
        raise UsageError(f"srun's way to {found} is not known: choose one of srun --mpi=list with --mpi")
    print_lines(f"mpi4py belongs to {found}: srun --mpi={chosen}", err=True)
    if found == "Intel MPI":
        print_lines(
            "Intel MPI finds Slurm with I_MPI_PMI_LIBRARY=…/libpmi2.so: export it in the script", err=True
        )
    return chosen


def _submit(text: bytes, job: Job) -> None:
    if shutil.which("sbatch") is None:
        raise UsageError("there is no sbatch here: leave out --submit, and submit the script where Slurm is")
    try:
        answer = subprocess.run(["sbatch"], input=text, capture_output=True, timeout=SECONDS_FOR_SLURM)
    except subprocess.TimeoutExpired:
        raise UsageError(f"sbatch did not answer within {SECONDS_FOR_SLURM} s: see squeue") from None
    said = " ".join((answer.stdout + answer.stderr).decode(errors="replace").split())
    if answer.returncode:
        raise UsageError(f"sbatch refused the job: {said}")
    print_lines(said)
    number = "JOB_ELEMENT" if job.is_array else "JOB"
    logs = (
        f"its log is {job.name}-{number}.log, those of its attempts are {job.name}-{number}.0.log and so on"
    )
    print_lines(logs)
