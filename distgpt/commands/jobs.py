"""distgpt submit and supervise"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import click

from distgpt.cluster.jobs.batch import array
from distgpt.cluster.jobs.batch.job import Job
from distgpt.cluster.jobs.batch.script import script
from distgpt.cluster.jobs.batch.systems import SYSTEMS, System
from distgpt.cluster.jobs.processes import own_program
from distgpt.cluster.jobs.shape import shape
from distgpt.commands.complete import line_of
from distgpt.commands.help import command
from distgpt.commands.options import POSITIVE, TIME, set_by_user
from distgpt.commands.settings import OPTIONS
from distgpt.commands.train import as_train, resuming, train, tune, write_json
from distgpt.core.base.errors import DataError, UsageError, command_line, print_lines
from distgpt.core.base.formatting import typed_duration
from distgpt.core.config import ON_GPU, WITH_MPI, RunConfig
from distgpt.core.config.asked import asked_for

SECONDS_TO_ANSWER = 60  # of a batch system
OWN_DISKS = ("/tmp", "/var/tmp", "/dev/shm", "/run")  # folders that each machine has for itself
STALL_ABORT = "30m"  # without progress, then the run saves and the job begins again
CPUS_BESIDE_GPU = 4  # of a rank with a GPU: its own thread, a reader, a writer of checkpoints, NCCL's proxy


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
@click.option("--nodes", type=POSITIVE, default=1, help="Number of nodes.")
@click.option(
    "--node",
    "described",
    metavar="SHAPE",
    help="NUMA regions and cores of each, as in 8x16; here: as this machine. Each region gets a rank.",
)
@click.option(
    "--ranks-per-node", type=POSITIVE, help="Ranks on each node. [default: its GPUs, its NUMA regions, or 1]"
)
@click.option(
    "--cpus-per-task",
    type=POSITIVE,
    help="CPUs and threads of each rank. [default: its part of --node; 4 beside a GPU; or 1]",
)
@click.option("--gpus-per-node", type=POSITIVE, help="GPUs of each node to train on.")
@click.option("--memory", metavar="SIZE", help="Memory of each node, as in 64G. [default: the site's]")
@click.option(
    "--time",
    "seconds",
    required=True,
    type=TIME,
    help="Limit of one attempt, as in 4h; the run is saved before and queued again.",
)
@click.option(
    "--mpi",
    help="How ranks start: pmi2 or pmix under Slurm, simple or pmix under Flux, else mpich, openmpi,"
    " intel or pals. [default: by mpi4py's MPI]",
)
@click.option("--name", help="Name of the job and its logs. [default: the run directory's]")
@click.option(
    "--array",
    "numbers",
    metavar="NUMBERS",
    help="Train an array of runs, as in 1-4 or 1-40%8, each in a directory of its own.",
)
@click.option(
    "--prefix",
    metavar="WORDS",
    help='Words before distgpt, as in "numactl -l", or with it: "apptainer exec image.sif distgpt".',
)
@click.option(
    "--setup",
    multiple=True,
    metavar="LINE",
    help='A line of the script before the start, as in "module load gcc"; may be repeated.',
)
@click.option(
    "--directive",
    "lines",
    multiple=True,
    metavar="OPTION",
    help='Any option of the batch system, as in "--partition=gpu"; may be repeated.',
)
@click.option(
    "--successor",
    is_flag=True,
    help="Submit the next attempt as a new job, where the site forbids to queue a job again.",
)
@click.option(
    "--exclusive",
    is_flag=True,
    help="Share the nodes with no other job; with --node, also bind ranks to cores.",
)
@click.option("--submit", "is_submitted", is_flag=True, help="Submit the script instead of printing it.")
@click.argument(
    "words",
    nargs=-1,
    required=True,
    type=click.UNPROCESSED,
    metavar="-- train [OPTIONS]",
    shell_complete=line_of(train, tune),
)
def submit(
    named: str | None,
    nodes: int,
    described: str | None,
    ranks_per_node: int | None,
    cpus_per_task: int | None,
    gpus_per_node: int | None,
    memory: str | None,
    seconds: float,
    mpi: str | None,
    name: str | None,
    numbers: str | None,
    prefix: str | None,
    setup: tuple[str, ...],
    lines: tuple[str, ...],
    successor: bool,
    exclusive: bool,
    is_submitted: bool,
    words: tuple[str, ...],
) -> None:
    """Print a batch script that trains, or submit it: for Slurm, PBS, Grid Engine, LSF or Flux.

    Before its time limit the run is saved; then the job is queued again, or submits its successor, and
    resumes, until all steps are done.

    In a job array, as with --array 1-4, each element trains in a directory of its own, and '$ELEMENT' is its
    number in any option of train.
    """
    system = SYSTEMS[named] if named else _found_system()
    subcommand: click.Command | None = {"train": train, "tune": tune}.get(words[0])
    if subcommand is None:
        raise UsageError(f"distgpt submit is for distgpt train and tune, not for {words[0]}")
    elements = array.elements(numbers or "")
    if elements and min(elements) < system.least_element:
        raise UsageError(f"--array {numbers}: {system.name} counts elements from {system.least_element}")
    renamed, own_out = array.renamed(words, (*system.elements, array.ANY), system.element), ""
    if elements:
        renamed, own_out = array.with_own_directories(renamed, system.element)
    commands = array.commands(renamed, elements, system.element)
    parsed = [_parsed(subcommand, each, seconds) for each in commands]
    asked, stage_given = parsed[0]
    node = shape(described) if described else None
    usual = CPUS_BESIDE_GPU if gpus_per_node else 1
    here = ranks_per_node or gpus_per_node or (node.regions if node else 1)
    cpus = cpus_per_task or asked["threads"] or (node.cpus_per_rank(here) if node else usual)
    ranks = nodes * here
    stage = asked["stage"] if stage_given else _stage(ranks, gpus_per_node)
    _refuse_unsuited(stage, ranks, gpus_per_node)
    runs = [_run_of(each, ranks) for each, _ in parsed]
    out = Path(own_out) if own_out else runs[0][0] / (system.element if elements else "")
    command = [
        *_program(prefix),
        words[0],
        *([] if stage_given else ["--stage", stage]),
        *([] if asked["threads"] or stage in ON_GPU else ["--threads", str(cpus)]),
        *([] if asked["stall_abort"] or asked["stall_timeout"] else ["--stall-abort", STALL_ABORT]),
        *_without_auto(renamed[1:]),
        *([] if asked["out"] else ["--out", str(out)]),
        *resuming(asked, runs[0][0]),
    ]
    job = Job(
        name=_name_of(out, name, system),
        nodes=nodes,
        ranks_per_node=here,
        cpus_per_task=cpus,
        gpus_per_node=gpus_per_node or 0,
        seconds=seconds,
        mpi=mpi or _mpi_of(stage, system),
        lines=lines,
        out=out,
        command=command,
        made_by=command_line(*sys.argv[1:]),
        setup=setup,
        memory=memory or "",
        counts_cores=node is not None,
        array=numbers or "",
        resubmits=successor,
        exclusive=exclusive,
    )
    far = node.doubt(here, cpus) if node else ""
    notes = [*(refuse_unready(run) for _, run in runs), *_notes(system, job, asked), far]
    text = script(system, job).encode()
    if is_submitted:
        _submit(text, system, job)
    else:
        sys.stdout.buffer.write(text)
    for note in dict.fromkeys(filter(None, notes)):
        print_lines(note, err=True)


def _found_system() -> System:
    """Return the first system whose commands are all here, and say which."""
    here = [row for row in SYSTEMS.values() if all(map(shutil.which, row.programs))]
    if not here:
        raise UsageError(
            "no batch system was found here (sbatch, qsub, bsub or flux): name it, as in --system pbs"
        )
    others = " and ".join(word for word, row in SYSTEMS.items() if row in here[1:])
    also = f"; {others} would be here, too: --system" if others else ""
    print_lines(f"batch system: {here[0].name}{also}", err=True)
    return here[0]


def _without_auto(words: Sequence[str]) -> Iterator[str]:
    """Leave out --threads auto: the job knows its threads, and says so."""
    for before, word, after in zip(("", *words), words, (*words[1:], ""), strict=False):
        is_auto = (word, after) == ("--threads", "auto") or (before, word) == ("--threads", "auto")
        if not is_auto and word != "--threads=auto":
            yield word


def _program(prefix: str | None) -> list[str]:
    """Return the words that run distgpt: a prefix, and this installation's unless it ends with another."""
    try:
        before = shlex.split(prefix or "")
    except ValueError as error:
        raise UsageError(f"--prefix {prefix}: {str(error).lower()}") from error
    return before if before and Path(before[-1]).name == "distgpt" else [*before, *own_program()]


def _parsed(command: click.Command, words: Sequence[str], seconds: float) -> tuple[dict[str, Any], bool]:
    """Return a command's options, which refuses what it cannot read, and whether --stage is among them."""
    with command.make_context(f"distgpt {words[0]}", list(words[1:])) as context:
        source = context.get_parameter_source("stage")
    asked = as_train(**context.params) if command is tune else context.params
    if (limit := asked["time_limit"] or 0) > seconds:
        raise UsageError(
            f"--time-limit {typed_duration(limit)} is longer than the job, --time"
            f" {typed_duration(seconds)}: leave it out, and the run saves before the job ends"
        )
    return asked, source != click.core.ParameterSource.DEFAULT


def _name_of(out: Path, given: str | None, system: System) -> str:
    """Return a job's name: the given one, or one by the run's directory that the system takes."""
    if given:
        if re.fullmatch(system.refused_names, given):
            raise UsageError(f"--name {given}: {system.name} takes no such name; run-{given} would do")
        return given
    parts = (re.sub(r"[^A-Za-z0-9_.]+", "-", part.replace(system.element, "")) for part in out.parts[::-1])
    name = next(filter(None, (part.strip("-.") for part in parts)), "distgpt")
    return f"run-{name}" if re.fullmatch(system.refused_names, name) else name


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


def _notes(system: System, job: Job, asked: dict[str, Any]) -> Iterator[str]:
    """Yield what is worth a look before the job waits."""
    from distgpt.core.data.textfile import BUNDLED_TEXTS

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
    places = {str(path): path.resolve() for path in (*read, job.out)}
    if hidden := [name for name, place in places.items() if any(map(place.is_relative_to, OWN_DISKS))]:
        yield f"{', '.join(hidden)}: /tmp and /var/tmp are each machine's own; use a disk that all nodes see"


def refuse_unready(run: RunConfig) -> str:
    """Refuse files that are not there; fetch the tokenizer, as nodes may have no network. Returns a note."""
    from distgpt.core.data.loading import refuse_missing
    from distgpt.core.data.textfile import resolve_data
    from distgpt.corpora.shards import is_shards
    from distgpt.corpora.tokenizers.foreign import PREFIX, cache, installed, repository_of

    t = run.train
    refuse_missing([t.data, *[t.val] * bool(t.val)], t.tokenizer)
    if t.hellaswag and not Path(t.hellaswag).is_file():
        raise DataError(f"--hellaswag {t.hellaswag}: there is no such file")
    # GPT-2's is known without its files where texts are tokenized already, or by the model's own tokenizer.
    is_known = t.tokenizer == "gpt2" and (bool(t.init) or is_shards(resolve_data(t.data)))
    if is_known or not (t.tokenizer == "gpt2" or t.tokenizer.startswith(PREFIX)):
        return ""
    _fetch(t.tokenizer)
    if installed(repository_of(t.tokenizer)).is_dir():  # nodes see it as they see this program
        return ""
    return (
        f"--tokenizer {t.tokenizer} lies in {cache()}, which nodes without internet have to see, too:"
        " DISTGPT_CACHE or HF_HOME says where it is"
    )


@cache
def _fetch(tokenizer: str) -> None:
    """Load a tokenizer, once for all elements of an array."""
    from distgpt.core.data.tokenizers import load_tokenizer

    load_tokenizer(tokenizer)


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
    chosen = system.mpi.get(found)
    how = "srun --mpi=" if system.name == "Slurm" else "--mpi "
    if chosen is None:
        raise UsageError(f"{system.name}'s way to {found} is not known: choose one with --mpi")
    print_lines(f"mpi4py belongs to {found}: {how}{chosen}", err=True)
    if found == "Intel MPI" and system.name == "Slurm":
        print_lines(
            "Intel MPI finds Slurm with I_MPI_PMI_LIBRARY=…/libpmi2.so: export it in the script", err=True
        )
    return chosen


def _submit(text: bytes, system: System, job: Job) -> None:
    submissions = [list(system.submits)]
    if job.is_array and system.one_job_each:
        option = system.successor_element.replace
        submissions = [[*system.submits, option("$ELEMENT", str(i))] for i in array.elements(job.array)]
    for words in submissions:
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
    number = system.shown_numbers[job.is_array]
    log = system.log.format(name=job.name, number=number.replace("[", ".").replace("]", ""))
    print_lines(f"its log is {log}, those of its attempts are {job.name}-{number}.0.log and so on")


@command(
    context_settings={"allow_interspersed_args": False},
    example="distgpt supervise -- mpirun -n 8 -f hosts distgpt train --stage mpi --out runs/mine",
)
@click.option(
    "--min-ranks", type=POSITIVE, default=1, help="Wait for hosts rather than train on fewer ranks."
)
@click.option(
    "--restarts", type=click.IntRange(0), help="Start again this often at most. [default: any number]"
)
@click.option(
    "--stall", type=TIME, help="Also start again after this long (as 30m) without a step. [default: never]"
)
@click.argument(
    "words",
    nargs=-1,
    required=True,
    type=click.UNPROCESSED,
    metavar="-- LAUNCH LINE",
    shell_complete=line_of(train, tune),
)
def supervise(min_ranks: int, restarts: int | None, stall: float | None, words: tuple[str, ...]) -> None:
    """Train, and start again after a lost rank or host.

    The job resumes from its last checkpoint, on those hosts of the hostfile that still answer over ssh. Hosts
    beyond the ranks of -n are spare. If there are too few, it runs on fewer ranks. After three ends without a
    step more it stops, and says why.
    """
    from distgpt.cluster.supervise.launch_line import parse
    from distgpt.cluster.supervise.supervisor import Limits, Supervisor

    line = parse(words)
    trains = {"train": train, "tune": tune}[line.command[0]]
    with trains.make_context(f"distgpt {line.command[0]}", list(line.command[1:])) as context:
        asked = context.params  # which refuses what it cannot read
    out: Path | None = asked["out"]
    if out is None:
        raise UsageError("name the run's directory, as in --out runs/mine: each start has to find it")
    if asked["resume"] not in (None, "auto") or asked.get("decay_from"):
        raise UsageError(
            f"a run that is supervised resumes from {out} alone: leave out --resume and --decay-from, and"
            " begin a branch without supervision"
        )
    if asked["log_format"] == "json":
        write_json(click.get_current_context(), "supervisor")
    limits = Limits(min_ranks, restarts, stall)
    code = Supervisor(line.with_options(resuming(asked, out)), out, asked["stage"] in ON_GPU, limits).run()
    raise click.exceptions.Exit(code)
