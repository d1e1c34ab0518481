"""distgpt submit and supervise"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from distgpt.cluster.jobs.batch import elements, renamed, script, shape, with_own_directories
from distgpt.cluster.jobs.processes import own_program
from distgpt.cluster.jobs.systems import SYSTEMS, Job, System
from distgpt.commands.help import OPTIONS, command
from distgpt.commands.options import POSITIVE, TIME, set_by_user
from distgpt.commands.train import as_train, resuming, train, tune, write_json
from distgpt.core.base.errors import DataError, UsageError, command_line, print_lines
from distgpt.core.base.formatting import count, typed_duration
from distgpt.core.config import ON_GPU, WITH_MPI, RunConfig
from distgpt.core.config.run_request import asked_for

SECONDS_TO_ANSWER = 60  # timeout for a batch system's answer
STALL_ABORT = "30m"  # after this time without progress, the run saves and the job restarts
CPUS_PER_GPU = 4  # a rank's main thread, a reader, a checkpoint writer, NCCL's proxy
MOST_CHECKED = 100  # array elements whose command is checked in advance
TRAINS = {"train": train, "tune": tune}


_line = partial(click.argument, "words", nargs=-1, required=True, type=click.UNPROCESSED)
_its = partial(click.option, default="", show_default=False)
_AS_TYPED = {"allow_interspersed_args": False}


@command(
    context_settings=_AS_TYPED,
    example="distgpt submit --nodes 2 --ranks-per-node 4 --time 4h -- train --preset gpt2 > job.sh",
)
@click.option(
    "--system", "named", type=click.Choice([*SYSTEMS]), help="Batch system. [default: the installed one]"
)
@click.option("--nodes", type=POSITIVE, default=1, help="Number of nodes.")
@click.option(
    "--node",
    "described",
    metavar="SHAPE",
    help="NUMA domains x cores per domain, such as 8x16. here: like this machine. One rank per domain.",
)
@click.option(
    "--ranks-per-node",
    type=POSITIVE,
    help="Ranks per node. [default: number of its GPUs or NUMA domains, or 1]",
)
@click.option(
    "--cpus-per-task",
    type=POSITIVE,
    help="CPUs and threads per rank. [default: equal share of --node; 4 with GPUs; otherwise 1]",
)
@click.option("--gpus-per-node", type=POSITIVE, help="GPUs per node.")
@_its("--memory", metavar="SIZE", help="Memory per node, such as 64G. [default: the site's]")
@click.option(
    "--time",
    "seconds",
    required=True,
    type=TIME,
    help="Time limit of each job, such as 4h. The run saves before it ends.",
)
@click.option(
    "--mpi",
    help="Slurm: pmi2 or pmix; Flux: simple or pmix; otherwise mpich, openmpi, intel or pals."
    " [default: chosen by mpi4py's MPI]",
)
@click.option("--name", help="Name of the job and its logs. [default: the run directory's name]")
@_its(
    "--array",
    metavar="NUMBERS",
    help="Submit a job array, such as 1-4 or 1-40%8; each run has its own directory.",
)
@click.option(
    "--prefix",
    metavar="WORDS",
    help='Command prefix, such as "numactl -l"; may include distgpt: "apptainer exec image.sif distgpt".',
)
@click.option(
    "--setup", multiple=True, metavar="LINE", help='Shell line to run first, such as "module load gcc".'
)
@click.option(
    "--directive", "lines", multiple=True, metavar="OPTION", help='Batch option, such as "--partition=gpu".'
)
@click.option("--successor", is_flag=True, help="Continue in a new job instead of requeueing this one.")
@click.option("--exclusive", is_flag=True, help="Request whole nodes; with --node, also bind ranks to cores.")
@click.option("--submit", "is_submitted", is_flag=True, help="Submit the script instead of printing it.")
@_line(metavar="-- train [OPTIONS]")
def submit(
    named: str | None,
    described: str | None,
    ranks_per_node: int | None,
    cpus_per_task: int | None,
    mpi: str | None,
    name: str | None,
    array: str,
    prefix: str | None,
    is_submitted: bool,
    words: tuple[str, ...],
    **options: Any,
) -> None:
    """Print or submit a batch script that trains, for Slurm, PBS, Grid Engine, LSF or Flux.

    Before the time limit, the job saves the run and requeues itself, or submits a successor, until all steps
    are done.

    In a job array (--array 1-4), each element has its own run directory, and '$ELEMENT' in options of train
    is its number.
    """
    system = SYSTEMS[named] if named else _found_system()
    if words[0] not in TRAINS:
        raise UsageError(f"distgpt submit supports train and tune, not {words[0]}")
    numbers, command, own_out = elements(array), renamed(words, system), ""
    if numbers:
        command, own_out = with_own_directories(command, system.element)
    commands = [command]
    if any(system.element in word for word in command):
        if not numbers:
            raise UsageError(f"{system.element} requires a job array, such as --array 1-4")
        commands = [
            [word.replace(system.element, str(number)) for word in command]
            for number in numbers[:MOST_CHECKED]
        ]
    parsed = [_parsed(each) for each in commands]
    request, stage_given = parsed[0]
    if (limit := request["time_limit"] or 0) > (whole := options["seconds"]):
        job_time = f"--time {typed_duration(whole)}; omit it, and the run saves before the job ends"
        raise UsageError(f"--time-limit {typed_duration(limit)} is longer than {job_time}")
    gpus = options["gpus_per_node"]
    regions, cores = shape(described) if described else (1, CPUS_PER_GPU if gpus else 1)
    here = ranks_per_node or gpus or regions
    usual = max(1, regions * cores // here) if described else cores
    cpus = cpus_per_task or request["threads"] or usual
    if described and here * cpus > regions * cores:
        need = f"{count(here, 'rank')} with {count(cpus, 'CPU')} each do not fit on a node with"
        raise UsageError(f"{need} {count(regions * cores, 'core')}; start fewer")
    ranks = options["nodes"] * here
    best = ("mpi-cuda" if gpus else "mpi") if ranks > 1 else ("cuda" if gpus else "serial")
    stage = request["stage"] if stage_given else best
    if (stage in ON_GPU) != bool(gpus) or (ranks > 1 and stage not in WITH_MPI):
        raise UsageError(
            f"--stage {stage} is not possible with {count(ranks, 'rank')} and --gpus-per-node {gpus or 0};"
            f" use --stage {best}, or omit it"
        )
    runs = [_run_of(each, ranks) for each, _ in parsed]
    out = Path(own_out) if own_out else runs[0][0] / (system.element if numbers else "")
    job = Job(
        name=name or _name_of(out, system),
        ranks_per_node=here,
        cpus_per_task=cpus,
        mpi=mpi or _mpi_of(stage, system),
        out=out,
        command=[
            *_program(prefix),
            words[0],
            *([] if stage_given else ["--stage", stage]),
            *([] if request["threads"] or stage in ON_GPU else ["--threads", str(cpus)]),
            *([] if request["stall_abort"] or request["stall_timeout"] else ["--stall-abort", STALL_ABORT]),
            *command[1:],
            *([] if request["out"] else ["--out", str(out)]),
            *resuming(request, runs[0][0]),
        ],
        made_by=command_line(*sys.argv[1:]),
        counts_cores=described is not None,
        array=array,
        **options,
    )
    _refuse_unready(run for _, run in runs)
    text = script(system, job).encode()
    if is_submitted:
        _submit(text, system, job, numbers)
    else:
        sys.stdout.buffer.write(text)


def _found_system() -> System:
    """Return the first system whose commands are all available, and print its name."""
    result = next((row for row in SYSTEMS.values() if all(map(shutil.which, row.programs))), None)
    if not result:
        raise UsageError("no batch system found (sbatch, qsub, bsub or flux); set it, such as --system pbs")
    print_lines(f"batch system: {result.name}", err=True)
    return result


def _program(prefix: str | None) -> list[str]:
    """Return the words that run distgpt: a prefix, and this installation unless the prefix has one."""
    try:
        before = shlex.split(prefix or "")
    except ValueError as error:
        raise UsageError(f"--prefix {prefix}: {str(error).lower()}") from error
    return before if before and Path(before[-1]).name == "distgpt" else [*before, *own_program()]


def _parsed(words: Sequence[str]) -> tuple[dict[str, Any], bool]:
    """Parse the options of train, and return them with whether --stage was set."""
    command = TRAINS[words[0]]
    with command.make_context(f"distgpt {words[0]}", list(words[1:])) as context:
        source = context.get_parameter_source("stage")
    request = as_train(**context.params) if command is tune else context.params
    return request, source != click.core.ParameterSource.DEFAULT


def _name_of(out: Path, system: System) -> str:
    """Name a job after the run's directory. Grid Engine rejects a leading digit and three reserved words."""
    parts = (re.sub(r"[^A-Za-z0-9_.]+", "-", part.replace(system.element, "")) for part in out.parts[::-1])
    name = next(filter(None, (part.strip("-.") for part in parts)), "distgpt")
    return f"run-{name}" if name[0].isdigit() or name.lower() in ("none", "all", "template") else name


def _refuse_unready(runs: Iterable[RunConfig]) -> None:
    """Reject missing files, and download tokenizers, since nodes may have no network."""
    from distgpt.core.data.loading import kind_of, refuse_missing
    from distgpt.core.data.tokenizers import load_tokenizer
    from distgpt.corpora.tokenizers.third_party import PREFIX

    fetched = set()
    for t in (run.train for run in runs):
        refuse_missing([t.data, *[t.val] * bool(t.val)], t.tokenizer)
        if t.hellaswag and not Path(t.hellaswag).is_file():
            raise DataError(f"--hellaswag {t.hellaswag} does not exist")
        # GPT-2's tokenizer is not needed for shards, or if the model has its own.
        is_gpt2 = t.tokenizer == "gpt2" and not (t.init or kind_of(t.data) == "shards")
        if is_gpt2 or t.tokenizer.startswith(PREFIX):
            fetched.add(t.tokenizer)
    for name in fetched:
        load_tokenizer(name)


def _run_of(request: dict[str, Any], ranks: int) -> tuple[Path, RunConfig]:
    """Return the run's directory, the same in every attempt, and its configuration.

    Reject settings that would fail when the job starts.
    """
    from distgpt.core.data.batches import refuse_uneven
    from distgpt.core.data.tokenizers import AUTO
    from distgpt.core.saved.rundir import RunDirectory, place_for
    from distgpt.core.train.plan import new_run
    from distgpt.recipes.derived import derived

    if request["resume"] not in (None, "auto"):
        raise UsageError("a job that can be requeued requires --resume auto; name the run with --out")
    out: Path | None = request["out"]
    settings = (*OPTIONS, "assigned", "depth", "within", "epochs", "chats")
    flags = set_by_user({key: request[key] for key in settings if key in request})
    if out and (saved := RunDirectory(out).saved()):
        moved: dict[str, Any] = {key: flags[key] for key in ("data", "val", "hellaswag") if key in flags}
        return out, saved.with_values({**moved, "tokenizer": AUTO})  # an existing run keeps its settings
    given = asked_for(flags, request["preset"], request["config"], out, request["resume"])
    given.refuse_mistyped()
    wanted = derived(replace(given, out=None, resume=None, fetches=False), ranks)
    run = new_run(wanted)
    refuse_uneven(run.train.batch_size, ranks, run.train.grad_accum or 1)
    return out or place_for(Path("runs"), wanted.name, resuming=False), run


def _mpi_of(stage: str, system: System) -> str:
    """Return the value of --mpi for the MPI library of mpi4py."""
    if stage not in WITH_MPI:
        return "none"
    try:
        from distgpt.core.comm.mpi import vendor

        result = vendor()
    except (ImportError, RuntimeError) as error:
        raise UsageError(
            f"cannot find out which MPI mpi4py uses ({error}); set its launcher with --mpi"
        ) from None
    chosen = system.mpi.get(result)
    if chosen is None:
        raise UsageError(f"no launcher of {system.name} is known for {result}; choose one with --mpi")
    print_lines(f"mpi4py uses {result}: --mpi {chosen}", err=True)
    return chosen


def _submit(text: bytes, system: System, job: Job, numbers: list[int]) -> None:
    submissions = [list(system.submits)]
    if numbers and not system.elements:
        option = system.successor_element.replace
        submissions = [[*system.submits, option("$ELEMENT", str(number))] for number in numbers]
    for words in submissions:
        program = words[0]
        if shutil.which(program) is None:
            raise UsageError(
                f"{program} not found in PATH; omit --submit, and submit the script on a host with"
                f" {system.name}"
            )
        try:
            answer = subprocess.run(words, input=text, capture_output=True, timeout=SECONDS_TO_ANSWER)
        except subprocess.TimeoutExpired:
            raise UsageError(
                f"{program} did not answer within {SECONDS_TO_ANSWER} s; check the queue"
            ) from None
        said = " ".join((answer.stdout + answer.stderr).decode(errors="replace").split())
        if answer.returncode:
            raise UsageError(f"{program} rejected the job: {said}")
        print_lines(said)
    print_lines(f"logs of its attempts: {job.name}-*.0.log, {job.name}-*.1.log, …")


@command(
    context_settings=_AS_TYPED,
    example="distgpt supervise -- mpirun -n 8 -f hosts distgpt train --stage mpi --out runs/mine",
)
@click.option("--min-ranks", type=POSITIVE, default=1, help="Wait until the hosts have at least N slots.")
@click.option("--restarts", type=click.IntRange(0), help="Maximum number of restarts. [default: no limit]")
@click.option(
    "--stall", type=TIME, help="Also restart if no step ends within this time, such as 15m. [default: never]"
)
@_line(metavar="-- LAUNCH LINE")
def supervise(min_ranks: int, restarts: int | None, stall: float | None, words: tuple[str, ...]) -> None:
    """Train, and restart after losing a rank or host.

    Resumes from the last checkpoint on the hosts in the hostfile that answer over ssh. Hosts beyond the ranks
    of -n are spares; with too few hosts, it uses fewer ranks. Stops with a message after three attempts that
    complete no step.
    """
    from distgpt.cluster.supervise import Supervisor, parse

    line = parse(words)
    request, _ = _parsed(line.command)
    out: Path | None = request["out"]
    if out is None:
        raise UsageError("set the run's directory, such as --out runs/mine; every restart resumes from it")
    if request["resume"] not in (None, "auto") or request.get("decay_from"):
        raise UsageError(
            f"a supervised run resumes only from {out}; omit --resume and --decay-from, or run without"
            " distgpt supervise"
        )
    if request["log_format"] == "json":
        write_json(click.get_current_context(), "supervisor")
    line = replace(line, command=(*line.command, *resuming(request, out)))
    code = Supervisor(line, out, request["stage"] in ON_GPU, min_ranks, restarts, stall).run()
    raise click.exceptions.Exit(code)
