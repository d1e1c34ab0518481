"""distgpt submit"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from distgpt.commands.complete import line_of
from distgpt.commands.help import command
from distgpt.commands.options import parsed_duration, set_by_user
from distgpt.commands.settings import OPTIONS
from distgpt.commands.train import resuming, train
from distgpt.commands.tune import as_train, tune
from distgpt.core.base.errors import UsageError, command_line, print_lines
from distgpt.core.base.formatting import typed_duration
from distgpt.core.config import ON_GPU, WITH_MPI, RunConfig
from distgpt.core.config.asked import asked_for
from distgpt.jobs.batch import array
from distgpt.jobs.batch.job import Job
from distgpt.jobs.batch.script import SYSTEMS, System, found_systems, script
from distgpt.jobs.processes import own_program
from distgpt.jobs.shape import Shape, shape

SECONDS_TO_ANSWER = 60  # of a batch system
STALL_ABORT = "30m"  # without progress, then the run saves and the job begins again
CPUS_BESIDE_GPU = 4  # of a rank with a GPU: its own thread, a reader, a writer of checkpoints, NCCL's proxy
# What runs a command in an image: there, distgpt is the image's own.
CONTAINERS = ("apptainer", "singularity", "shifter", "ch-run", "enroot", "podman", "podman-hpc", "docker")


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of the job, before what is left out has been chosen."""

    nodes: int
    described: str | None
    ranks_per_node: int | None
    cpus_per_task: int | None
    gpus_per_node: int | None
    memory: str | None
    seconds: float
    mpi: str | None
    name: str | None
    numbers: str | None
    prefix: str | None
    setup: tuple[str, ...]
    lines: tuple[str, ...]
    successor: bool
    exclusive: bool
    submit: bool
    words: tuple[str, ...]


_DECORATORS = (
    click.option("--nodes", type=click.IntRange(1), default=1, show_default=True, help="Number of nodes."),
    click.option(
        "--node",
        "described",
        metavar="SHAPE",
        help="NUMA regions and cores of each, as in 8x16; here: as this machine. Each region gets a rank.",
    ),
    click.option(
        "--ranks-per-node",
        type=click.IntRange(1),
        help="Ranks on each node. [default: its GPUs, its NUMA regions, or 1]",
    ),
    click.option(
        "--cpus-per-task",
        type=click.IntRange(1),
        help="CPUs and threads of each rank. [default: its part of --node; 4 beside a GPU; or 1]",
    ),
    click.option("--gpus-per-node", type=click.IntRange(1), help="GPUs of each node to train on."),
    click.option("--memory", metavar="SIZE", help="Memory of each node, as in 64G. [default: the site's]"),
    click.option(
        "--time",
        "seconds",
        metavar="TIME",
        required=True,
        callback=parsed_duration,
        help="Limit of one attempt, as in 4h; the run is saved before and queued again.",
    ),
    click.option(
        "--mpi",
        help="How ranks start: pmi2 or pmix under Slurm, simple or pmix under Flux, else mpich, openmpi,"
        " intel or pals. [default: by mpi4py's MPI]",
    ),
    click.option("--name", help="Name of the job and its logs. [default: the run directory's]"),
    click.option(
        "--array",
        "numbers",
        metavar="NUMBERS",
        help="Train an array of runs, as in 1-4 or 1-40%8, each in a directory of its own.",
    ),
    click.option(
        "--prefix",
        metavar="WORDS",
        help='Words before distgpt in the started command, as in "apptainer exec image.sif".',
    ),
    click.option(
        "--setup",
        multiple=True,
        metavar="LINE",
        help='A line of the script before the start, as in "module load gcc"; may be repeated.',
    ),
    click.option(
        "--option",
        "--sbatch",
        "lines",
        multiple=True,
        metavar="OPTION",
        help='Any option of the batch system, as in "--partition=gpu"; may be repeated.',
    ),
    click.option(
        "--successor",
        is_flag=True,
        help="Submit the next attempt as a new job, where the site forbids to queue a job again.",
    ),
    click.option(
        "--exclusive",
        is_flag=True,
        help="Share the nodes with no other job; with --node, also bind ranks to cores.",
    ),
    click.option("--submit", is_flag=True, help="Submit the script instead of printing it."),
    click.argument(
        "words",
        nargs=-1,
        required=True,
        type=click.UNPROCESSED,
        metavar="-- train [OPTIONS]",
        shell_complete=line_of(train, tune),
    ),
)


def describes_a_job(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options that describe a job, and the command that it runs."""
    for decorator in reversed(_DECORATORS):
        function = decorator(function)
    return function


@command(
    context_settings={"allow_interspersed_args": False},
    example="distgpt submit --nodes 2 --ranks-per-node 4 --time 4h -- train --preset gpt2 > job.sh",
)
@click.option(
    "--system",
    "named",
    type=click.Choice([*SYSTEMS]),
    help="Batch system. [default: the one whose commands are here]",
)
@describes_a_job
def submit(named: str | None, **options: Any) -> None:
    """Print a batch script that trains, or submit it: for Slurm, PBS, Grid Engine, LSF or Flux.

    Before its time limit the run is saved; then the job is queued again, or submits its successor, and
    resumes, until all steps are done.

    In a job array, as with --array 1-4, each element trains in a directory of its own, and '$ELEMENT' is its
    number in any option of train.
    """
    if named is None:
        named, *others = found_systems(shutil.which)
        also = f"; {' and '.join(others)} would be here, too: --system" if others else ""
        print_lines(f"batch system: {SYSTEMS[named].name}{also}", err=True)
    make_job(SYSTEMS[named], Asked(**options))


def make_job(system: System, given: Asked) -> None:
    """Print or submit the script of a job, with notes on what is worth a look before it waits."""
    job, notes = _described(system, given)
    text = script(system, job).encode()
    if given.submit:
        _submit(text, system, job)
    else:
        sys.stdout.buffer.write(text)
    for note in dict.fromkeys(notes):
        print_lines(note, err=True)


def _described(system: System, given: Asked) -> tuple[Job, list[str]]:
    """Return the job, with all that was left out, and notes; refuse what would fail when it starts."""
    subcommand: click.Command | None = {"train": train, "tune": tune}.get(given.words[0])
    if subcommand is None:
        program = click.get_current_context().command_path
        raise UsageError(f"{program} is for distgpt train and tune, not for {given.words[0]}")
    theirs = system.array_in(given.lines)
    if given.numbers and theirs:
        raise UsageError(f"--array {given.numbers}: an option of {system.name} gives other numbers, {theirs}")
    numbers = array.elements(given.numbers or theirs, "--array")
    if numbers and min(numbers) < system.least_element:
        raise UsageError(
            f"--array {given.numbers or theirs}: {system.name} counts elements from {system.least_element}"
        )
    element = system.element
    words = array.renamed(given.words, (*system.elements, array.ANY), element)
    words, own_out = array.with_own_directories(words, element) if numbers else (words, "")
    parsed = [_parsed(subcommand, each) for each in array.commands(words, numbers, element)]
    asked, stage_given = parsed[0]
    node = shape(given.described) if given.described else None
    ranks_per_node, cpus = _divided(given, node, asked)
    ranks = given.nodes * ranks_per_node
    stage = asked["stage"] if stage_given else _stage(ranks, given.gpus_per_node)
    _refuse_unsuited(stage, ranks, given.gpus_per_node)
    for each, _ in parsed:
        if (limit := each["time_limit"] or 0) > given.seconds:
            raise UsageError(
                f"--time-limit {typed_duration(limit)} is longer than the job, --time"
                f" {typed_duration(given.seconds)}: leave it out, and the run saves before the job ends"
            )
    runs = [_run_of(each, ranks) for each, _ in parsed]
    out = Path(own_out) if own_out else runs[0][0] / element if numbers else runs[0][0]
    added = [
        *([] if stage_given else ["--stage", stage]),
        *([] if asked["threads"] or stage in ON_GPU else ["--threads", str(cpus)]),
        *([] if asked["stall_abort"] or asked["stall_timeout"] else ["--stall-abort", STALL_ABORT]),
    ]
    ending = [
        *([] if asked["out"] else ["--out", str(out)]),
        *resuming(asked, runs[0][0]),
    ]
    job = Job(
        name=system.named(given.name, _name_of(out, element)),
        nodes=given.nodes,
        ranks_per_node=ranks_per_node,
        cpus_per_task=cpus,
        gpus_per_node=given.gpus_per_node or 0,
        seconds=given.seconds,
        mpi=given.mpi or _mpi_of(stage, system),
        lines=given.lines,
        out=out,
        command=[*_program(given.prefix), words[0], *added, *_without_auto(words[1:]), *ending],
        made_by=command_line(*sys.argv[1:]),
        setup=given.setup,
        memory=given.memory or "",
        counts_cores=node is not None,
        array=given.numbers or "",
        is_array=bool(numbers),
        resubmits=given.successor,
        exclusive=given.exclusive,
    )
    far = node.doubt(ranks_per_node, cpus) if node else ""
    return job, [*_unready(run for _, run in runs), *_notes(system, job, asked), *([far] if far else [])]


def _divided(given: Asked, node: Shape | None, asked: dict[str, Any]) -> tuple[int, int]:
    """Return the ranks of a node and the CPUs of each."""
    ranks = given.ranks_per_node or given.gpus_per_node or (node.regions if node else 1)
    usual = CPUS_BESIDE_GPU if given.gpus_per_node else 1
    return ranks, given.cpus_per_task or asked["threads"] or (node.cpus_per_rank(ranks) if node else usual)


def _without_auto(words: Sequence[str]) -> Iterator[str]:
    """Leave out --threads auto: the job knows its threads, and says so."""
    for before, word, after in zip(("", *words), words, (*words[1:], ""), strict=False):
        is_auto = (word, after) == ("--threads", "auto") or (before, word) == ("--threads", "auto")
        if not is_auto and word != "--threads=auto":
            yield word


def _program(prefix: str | None) -> list[str]:
    """Return the words that run distgpt behind a prefix: the image's own in a container."""
    try:
        before = shlex.split(prefix or "")
    except ValueError as error:
        raise UsageError(f"--prefix {prefix}: {str(error).lower()}") from error
    is_contained = any(Path(word).name in CONTAINERS for word in before)
    return [*before, *(["distgpt"] if is_contained else own_program())]


def _parsed(command: click.Command, words: Sequence[str]) -> tuple[dict[str, Any], bool]:
    """Return a command's options, which refuses what it cannot read, and whether --stage is among them."""
    with command.make_context(f"distgpt {words[0]}", list(words[1:])) as context:
        source = context.get_parameter_source("stage")
    asked = as_train(**context.params) if command is tune else context.params
    return asked, source != click.core.ParameterSource.DEFAULT


def _name_of(out: Path, element: str) -> str:
    """Return a job's name for a run's directory, or for one of an array's."""
    names = (re.sub(r"[^A-Za-z0-9_.]+", "-", part.replace(element, "")) for part in out.parts[::-1])
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


def _notes(system: System, job: Job, asked: dict[str, Any]) -> Iterator[str]:
    """Yield what is worth a look before the job waits."""
    from distgpt.core.data.textfile import BUNDLED_TEXTS
    from distgpt.jobs.nodes import OWN, own_disks

    for option in system.unknown(job.lines):
        yield f"{option} is none of the options that {system.submits[0]} documents: a typing error?"
    if job.counts_cores and not job.exclusive and system.launches_by_mpi and job.ranks > 1:
        yield "ranks are not bound to cores, as other jobs may run on these nodes: --exclusive"
    if job.is_array:
        yield f"every element of the array has a directory of its own: {job.out}"
    if (asked["threads"] or 0) > job.cpus_per_task:
        cpus = f"--threads {asked['threads']}, but --cpus-per-task {job.cpus_per_task}"
        yield f"{cpus}: threads without a core only make others wait"
    there = next(path for path in (job.out, *job.out.parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        yield f"{job.out} cannot be made on this machine: {there} is no folder that can be written to"
    paths = [asked.get(name) for name in ("data", "val", "hellaswag", "init", "config", "tokenizer")]
    read = [Path(path) for path in paths if path and path not in BUNDLED_TEXTS and Path(path).exists()]
    if hidden := [*own_disks([*read, job.out])]:
        names = ", ".join(hidden)
        yield f"{names}: {' and '.join(OWN[:2])} are each machine's own; use a disk that all nodes see"


def _run_of(asked: dict[str, Any], ranks: int) -> tuple[Path, RunConfig]:
    """Return the run's directory, the same in every attempt, and its configuration.

    Refuses settings that would fail when the job starts.
    """
    from distgpt.core.data.batches import refuse_uneven
    from distgpt.core.data.tokenizers import AUTO
    from distgpt.core.saved.rundir import RunDirectory, place_for
    from distgpt.core.train.plan import new_run
    from distgpt.recipes.derived import derived

    if asked["resume"] not in (None, "auto"):
        raise UsageError("--resume is auto in a job that is queued again: name the run with --out")
    out: Path | None = asked["out"]
    settings = (*OPTIONS, "assigned", "depth", "within", "epochs", "chats")
    flags = set_by_user({key: asked[key] for key in settings if key in asked})
    if out and (saved := RunDirectory(out).saved()):
        moved: dict[str, Any] = {key: flags[key] for key in ("data", "val", "hellaswag") if key in flags}
        return out, saved.with_values({**moved, "tokenizer": AUTO})  # a run with settings of its own
    given = asked_for(flags, asked["preset"], asked["config"], out, asked["resume"])
    given.refuse_mistyped()
    wanted = derived(replace(given, out=None, resume=None, fetches=False), ranks)
    run = new_run(wanted)
    refuse_uneven(run.train.batch_size, ranks, run.train.grad_accum or 1)
    return out or place_for(Path("runs"), wanted.name, resuming=False), run


def _mpi_of(stage: str, system: System) -> str:
    """Return the value of --mpi that suits the MPI which mpi4py belongs to."""
    if stage not in WITH_MPI:
        return "none"
    try:
        from distgpt.core.comm.mpi import vendor

        found = vendor()
    except (ImportError, RuntimeError) as error:
        raise UsageError(
            f"mpi4py does not say here which MPI it has ({error}): name its launcher with --mpi"
        ) from None
    chosen = system.mpi(found)
    how = "srun --mpi=" if system.word == "slurm" else "--mpi "
    if chosen is None:
        raise UsageError(f"{system.name}'s way to {found} is not known: choose one with --mpi")
    print_lines(f"mpi4py belongs to {found}: {how}{chosen}", err=True)
    if found == "Intel MPI" and system.word == "slurm":
        print_lines(
            "Intel MPI finds Slurm with I_MPI_PMI_LIBRARY=…/libpmi2.so: export it in the script", err=True
        )
    return chosen


def _submit(text: bytes, system: System, job: Job) -> None:
    for words in system.submissions(job):
        program = words[0]
        if shutil.which(program) is None:
            raise UsageError(
                f"there is no {program} here: leave out --submit, and submit the script where"
                f" {system.name} is"
            )
        try:
            answer = subprocess.run(words, input=text, capture_output=True, timeout=SECONDS_TO_ANSWER)
        except subprocess.TimeoutExpired:
            raise UsageError(
                f"{program} did not answer within {SECONDS_TO_ANSWER} s: see which jobs are queued"
            ) from None
        said = " ".join((answer.stdout + answer.stderr).decode(errors="replace").split())
        if answer.returncode:
            raise UsageError(f"{program} refused the job: {said}")
        print_lines(said)
    number = system.shown_number(job.is_array)
    attempts = f"those of its attempts are {job.name}-{number}.0.log and so on"
    print_lines(f"its log is {system.log(job.name, number)}, {attempts}")
