"""The batch systems: directives for a job, and system-specific lines of the script (batch.py)."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distgpt.cluster.jobs.launchers import mpirun, own_mpirun
from distgpt.cluster.launch.environment import MPIS
from distgpt.core.base.errors import UsageError, escape

SECONDS_TO_SAVE = 120  # between the save signal and the time limit
SECONDS_TO_SUBMIT = 20  # Flux: between the end of the run and the submission of its successor
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Parameters of a script. `command` trains, `made_by` is the command that created the script."""

    name: str
    nodes: int
    ranks_per_node: int
    cpus_per_task: int
    gpus_per_node: int | None
    seconds: float
    mpi: str  # how ranks start and connect; "none": a single rank
    lines: Sequence[str]  # additional directives
    out: Path
    command: Sequence[str]
    made_by: str
    setup: Sequence[str]  # shell lines before the command
    memory: str  # per node, such as 64G
    counts_cores: bool  # CPUs are consecutive cores, not second hardware threads
    array: str  # numbers of its elements, such as 1-4%2
    exclusive: bool  # no other job runs on its nodes
    successor: bool  # submit a successor even if the system can requeue the job

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UsageError(f"--name {self.name} may contain only letters, digits, dots, - and _")
        for word in (*self.lines, *self.command, *self.setup, str(self.out), self.made_by):
            if escape(word) != word:
                raise UsageError(f"{word} contains characters that are not allowed in a script")

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def cpus_per_node(self) -> int:
        return self.ranks_per_node * self.cpus_per_task

    @property
    def seconds_to_save(self) -> int:
        """The time between the save signal and the time limit: at most 1/4 of the limit."""
        return max(1, min(SECONDS_TO_SAVE, int(self.seconds / 4)))


# Values of --mpi, with the vendors whose MPI this mpiexec starts, its options, and options for bound and for
# free ranks. By default Open MPI binds each rank to one core, which all its threads would share.
LAUNCHERS = {
    "mpich": (("MPICH", "MVAPICH", "MVAPICH2"), "-n {ranks} -ppn {each}", " -bind-to core:{cpus}", ""),
    "openmpi": (
        ("Open MPI",),
        "-n {ranks} --map-by ppr:{each}:node",
        ":pe={cpus} --bind-to core",
        " --bind-to none",
    ),
    "intel": (("Intel MPI",), "-n {ranks} -ppn {each}", " -genv I_MPI_PIN_DOMAIN {cpus}:compact", ""),
    "pals": (("Cray MPICH",), "-n {ranks} --ppn {each} --depth={cpus}", " --cpu-bind=depth", ""),
}


def mpiexec(job: Job) -> str:
    """Return an MPI's own launcher with its options; "" for a single rank, which needs none."""
    if job.mpi == "none":
        return ""
    if job.mpi not in LAUNCHERS:
        raise UsageError(f"--mpi {job.mpi} is not supported here; choose one of {', '.join(LAUNCHERS)}")
    vendors, options, bound, free = LAUNCHERS[job.mpi]
    own = own_mpirun()
    # An mpiexec of a different MPI would reject these options.
    program = shlex.quote(own) if own and mpirun(own)["vendor"] in vendors else "mpiexec"
    options += bound if job.counts_cores and job.exclusive else free  # if not, other jobs get the same cores
    return f"{program} " + options.format(ranks=job.ranks, each=job.ranks_per_node, cpus=job.cpus_per_task)


def clock(seconds: float) -> str:
    """Format a duration: 14400 → "04:00:00", 90000 → "25:00:00"."""
    minutes, second = divmod(math.ceil(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours:02}:{minute:02}:{second:02}"


def _one_range(text: str, system: str) -> tuple[str, str]:
    """Return an array's range and its maximum of concurrent elements. Reject lists of numbers."""
    numbers, _, most = text.partition("%")
    if "," in numbers:
        raise UsageError(f"--array {text}: {system} takes one range, such as 1-4 or 0-8:2")
    return numbers, most


class System:
    """A batch system, with defaults for a plain shell. Each subclass has one instance (SYSTEMS).

    In script lines, `{number}` and `{name}` are the job's, `{seconds}` is its time limit and `{submitting}`
    the time reserved to submit a successor.
    """

    name: str
    sentinel: str  # prefix of a directive
    submits: tuple[str, ...]  # command that reads a script from its standard input
    programs: tuple[str, ...]  # commands installed with it
    # The value of --mpi for each vendor's MPI.
    mpi: Mapping[str, str] = {vendor: name for name, row in LAUNCHERS.items() for vendor in row[0]}
    # Regular expressions: directives that options of distgpt set, and directives that wait for other jobs.
    reserved: str
    waits: str = ""
    # Arrays
    element: str  # number of an element, such as "$SGE_TASK_ID"
    elements: tuple[str, ...] = ()  # variables with it that commands may use; if empty, no arrays
    left_out_of_element: str = ""  # prefix of a directive that an element's successor must omit
    numbers: tuple[str, str]  # shell variables of a job's number and of an element's
    # The script
    advice: str  # how to submit it, for the header
    # Changes to the directory of submission, and sets the run's time limit if the system does not.
    first: str = ""
    begin: str = ""  # lines that set variables
    begin_element: str = ""  # lines before `begin` in an array
    attempt: str = (
        'attempt=0\nwhile [ -e "{name}-{number}.$attempt.log" ]; do attempt=$((attempt + 1)); done\n'
    )
    before: str = ""  # lines before the launch
    before_openmpi: str = ""
    signals: str  # comment above the traps
    passed_on: str = "kill -USR1 $ranks"  # command that makes the ranks save
    announces: str = "USR1"  # signals before a limit; the job then restarts
    ends: str = "TERM"  # signals of a job's end; the script only saves
    rule: str = '75 means "saved, restart".'  # comment above the decision
    begins_again: str = "[ $code = 75 ]"  # condition for another attempt, if a step was finished
    requeue: str = ""  # requeues this job; "" if not possible
    successor: str  # command that submits the script as another job
    successor_element: str  # its option for one element of an array
    reads: str = '"$0"'  # how it reads the script

    def options(self, job: Job) -> list[str]:
        """Return the directives of a job; empty ones are omitted."""
        raise NotImplementedError

    def launch(self, job: Job) -> str:
        """Return the words before the command that start the job's ranks."""
        return mpiexec(job)


class Slurm(System):
    """Slurm. Recipients of its signals, tested with Slurm 22.05 and checked in its sources up to 25.11:

    | | ranks | the script's shell |
    |---|---|---|
    | `--signal=USR1@…`, `scancel --signal=USR1` | USR1 | |
    | the same with `--signal=B:…`, `--batch` | | USR1 |
    | `scancel`, `scontrol requeue`, preemption, the time limit | TERM, KILL after KillWait | the same |
    | preemption in a partition with GraceTime | TERM; then the job may end on its own | |

    On TERM srun kills all ranks. `scancel --full` sends TERM to the shell's whole process group, so srun has
    its own group. A rank that exits with 75 must not make srun kill the others, which are still saving. If a
    rank is killed, all end after 60 s.
    """

    name = "Slurm"
    sentinel = "#SBATCH"
    submits = programs = ("sbatch",)
    mpi = {vendor: mpi.srun for vendor, mpi in MPIS.items()}  # noqa: RUF012
    reserved = r"--array\b|-a"
    element = "$SLURM_ARRAY_TASK_ID"
    elements = ("SLURM_ARRAY_TASK_ID",)
    # SLURM_JOB_ID of an array's element can be the ID of the whole array.
    numbers = ("$SLURM_JOB_ID", "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID")
    advice = """\
Submit it with sbatch, whose options
# override the lines below: sbatch --nodes=1 --ntasks-per-node=… resumes the run on other nodes."""
    attempt = "attempt=${{SLURM_RESTART_COUNT:-0}}\n"
    before = "preempted() {{ scontrol show job \"{number}\" | grep -q 'PreemptTime=[0-9]'; }}\n"
    signals = """\
# On USR1, which Slurm sends before the time limit, every rank saves and exits. This shell passes on signals
# that only it receives. After a TERM, Slurm ends or requeues the job itself."""
    rule = (
        '75 means "saved, restart". Slurm does not requeue a preempted job that ends within its grace time.'
    )
    begins_again = "[ $code = 75 ] || { [ $code != 0 ] && preempted; }"
    requeue = 'scontrol requeue "{number}" && exit 0'
    successor = "sbatch"
    successor_element = "--array=$SLURM_ARRAY_TASK_ID"

    def options(self, job: Job) -> list[str]:
        hours, _, rest = clock(job.seconds).partition(":")
        days, hour = divmod(int(hours), 24)
        return [
            f"--job-name={job.name}",
            f"--nodes={job.nodes}",
            f"--ntasks-per-node={job.ranks_per_node}",
            f"--cpus-per-task={job.cpus_per_task}",
            "--hint=nomultithread" * job.counts_cores,
            f"--gpus-per-node={job.gpus_per_node}" * bool(job.gpus_per_node),
            f"--mem={job.memory}" * bool(job.memory),
            "--exclusive" * job.exclusive,
            f"--time={f'{days}-' * bool(days)}{hour:02}:{rest}",  # 90000 s are 1-01:00:00
            f"--signal=USR1@{job.seconds_to_save}",
            "--requeue",
            "--open-mode=append",
            f"--output={job.name}-{'%A_%a' if job.array else '%j'}.log",
            f"--array={job.array}" * bool(job.array),
        ]

    def launch(self, job: Job) -> str:
        # --hint excludes --cpu-bind, which it sets itself. A step does not inherit --cpus-per-task.
        binding = (
            "--hint=nomultithread --distribution=block:block" if job.counts_cores else "--cpu-bind=cores"
        )
        return (
            f'srun --mpi={job.mpi} --cpus-per-task="$SLURM_CPUS_PER_TASK" {binding} \\\n'
            "  --kill-on-bad-exit=0 --wait=60"
        )


class Pbs(System):
    """PBS Pro and OpenPBS. Tested with OpenPBS 23.06.06, which sends no signal before the limit.

    At the limit, qdel, qrerun and a preemption, all processes of the job's session (including the script and
    mpiexec) get TERM, and KILL after kill_delay (10 s). Users cannot requeue a running job (qrerun is for
    operators), so a job submits its successor.
    """

    name = "PBS"
    sentinel = "#PBS"
    submits = ("qsub",)
    programs = ("qsub", "pbsnodes")
    reserved = r"-J|-l\s*walltime"
    waits = "-W *depend="
    element = "$ELEMENT"
    elements = ("PBS_ARRAY_INDEX",)
    left_out_of_element = "-J "
    numbers = ("$number", "$number")
    advice = """\
Submit it with qsub. A successor
# has only the options of these lines, not those given to qsub: change them here."""
    first = """\
cd "$PBS_O_WORKDIR" || exit
export DISTGPT_JOB_END=$(($(date +%s) + {seconds}))  # the limit above, in seconds since 1970
"""
    begin = "number=${{PBS_JOBID%%.*}}\n"
    begin_element = "ELEMENT=${{ELEMENT:-$PBS_ARRAY_INDEX}}  # the number of this run\n"
    signals = """\
# On USR1 every rank saves and exits. PBS sends no signal before its limit, which the run reads from
# DISTGPT_JOB_END. TERM comes before qdel kills: the job saves and ends, or restarts after a preemption."""
    successor = "qsub"
    successor_element = "-v ELEMENT=$ELEMENT"

    def options(self, job: Job) -> list[str]:
        place = ":".join(["scatter"] * (job.nodes > 1) + ["excl"] * job.exclusive)
        per_rank = f"mpiprocs={job.ranks_per_node}:ompthreads={job.cpus_per_task}"
        chunk = f"{job.nodes}:ncpus={job.cpus_per_node}:{per_rank}"
        chunk += f":ngpus={job.gpus_per_node}" * bool(job.gpus_per_node)
        chunk += f":mem={job.memory.lower()}b" * bool(job.memory)
        numbers, most = _one_range(job.array, "PBS")
        if numbers and "-" not in numbers:
            raise UsageError(f"--array {job.array}: PBS requires a range of two or more numbers, such as 1-4")
        return [
            f"-N {job.name}",
            "-S /bin/bash",
            f"-l select={chunk}",
            f"-l place={place}" * bool(place),
            f"-l walltime={clock(job.seconds)}",
            "-r y",
            "-j oe",
            f"-J {numbers}{f'%{most}' * bool(most)}" * bool(numbers),
        ]

    def launch(self, job: Job) -> str:
        # An Open MPI built without PBS support, such as Debian's, finds the nodes only in this file.
        return mpiexec(job) + ' --hostfile "$PBS_NODEFILE"' * (job.mpi == "openmpi")


class GridEngine(System):
    """Grid Engine. Tested with Son of Grid Engine 8.1.9: at s_rt the shell's process group gets USR1.

    `-notify` sends USR2 before `qdel` kills. A script that exits with 99 is requeued with the same number.
    """

    name = "Grid Engine"
    sentinel = "#$"
    submits = ("qsub",)
    programs = ("qsub", "qconf")
    reserved = r"-t\s|-l\s*h_rt"
    element = "$SGE_TASK_ID"
    elements = ("SGE_TASK_ID",)
    numbers = ("$JOB_ID", "$JOB_ID.$SGE_TASK_ID")
    advice = """\
Submit it with qsub, whose options
# override the lines below. `qconf -spl` lists the parallel environments that -pe may name."""
    signals = """\
# On USR1, which this shell gets at s_rt, before the limit h_rt, every rank saves and exits. USR2 comes before
# qdel kills (-notify): the job saves and ends."""
    ends = "USR2 TERM"
    rule = '75 means "saved, restart"; Grid Engine requeues a job that exits with 99.'
    requeue = "exit 99"
    successor = "qsub"
    successor_element = "-t $SGE_TASK_ID"

    def options(self, job: Job) -> list[str]:
        slots = job.nodes * job.cpus_per_node
        if job.memory:
            raise UsageError(
                "--memory: the name of this resource depends on the site; request memory per slot with"
                ' --directive, such as "-l h_vmem=4G"'
            )
        numbers, most = _one_range(job.array, "Grid Engine")
        return [
            f"-N {job.name}",
            "-S /bin/bash",
            "-cwd",
            f"-pe mpi {slots}" * (slots > 1),
            f"-l gpu={job.gpus_per_node}" * bool(job.gpus_per_node),
            "-l exclusive=true" * job.exclusive,
            f"-l h_rt={clock(job.seconds)}",
            f"-l s_rt={clock(job.seconds - job.seconds_to_save)}",
            "-notify",
            "-r y",
            "-j y",
            f"-o {job.name}-$JOB_ID{'.$TASK_ID' * bool(job.array)}.log",
            f"-t {numbers}" * bool(numbers),
            f"-tc {most}" * bool(most),
        ]


class Lsf(System):
    """LSF, written from IBM's reference of LSF 10.1 and tested with volclava 2.2, an open clone.

    volclava lacks -wa, -wt, -Q and -gpu. Signals reach every process group of the job, including mpiexec's
    and the ranks'. At the limit (-W) all get USR2 and have ten minutes. `bkill` sends INT, TERM and KILL. A
    script that exits with 99 is requeued with the same number.
    """

    name = "LSF"
    sentinel = "#BSUB"
    submits = programs = ("bsub",)
    reserved = "-J(?!d)"  # the name's option; without numbers it would replace the array's
    waits = "-w( |[^at])"  # not -wa and -wt, which are different options
    element = "$LSB_JOBINDEX"
    elements = ("LSB_JOBINDEX",)
    numbers = ("$LSB_JOBID", "$LSB_JOBID.$LSB_JOBINDEX")
    advice = """\
Submit it with bsub < SCRIPT, whose options
# override the lines below."""
    # LSF's signals also reach mpiexec and its children. By default every program ignores URG. USR2 ends
    # MPICH's mpiexec, and an ssh to another node. On INT, Open MPI's mpiexec kills the ranks.
    before = """\
asked=
trap '' USR2  # also sent to mpiexec, and might end it
"""
    before_openmpi = """\
# Seconds for the ranks to save after bkill, in the spelling of Open MPI 4 and of Open MPI 5.
export OMPI_MCA_odls_base_sigkill_timeout=10 PRTE_MCA_odls_base_sigkill_timeout=10
"""
    signals = """\
# On USR1 every rank saves and exits. LSF sends URG before the limit (-wa, -wt), which only this shell
# handles, and USR2 at the limit. INT and TERM come before bkill kills: the job saves and ends. A second USR1
# would end the save."""
    passed_on = '[ "$asked" ] || kill -USR1 $ranks; asked=yes'
    announces = "URG USR1 USR2"
    ends = "INT TERM"
    rule = '75 means "saved, restart"; LSF requeues a job that exits with 99 (-Q).'
    requeue = "exit 99"
    successor = "bsub"
    successor_element = '-J "{name}[$LSB_JOBINDEX]"'
    reads = '< "$0"'

    def options(self, job: Job) -> list[str]:
        numbers, percent, most = job.array.partition("%")
        return [
            f'-J "{job.name}{f"[{numbers}]{percent}{most}" * bool(numbers)}"',
            # Slots are cores, since not every site configures task affinity.
            f"-n {job.nodes * job.cpus_per_node}",
            f'-R "span[ptile={job.cpus_per_node}]"',
            f'-R "rusage[mem={job.memory}/host]"' * bool(job.memory),
            f'-gpu "num={job.gpus_per_node}/host:j_exclusive=yes"' * bool(job.gpus_per_node),
            "-x" * job.exclusive,
            f"-W {clock(60 * math.ceil(job.seconds / 60))[:-3]}",  # minutes, rounded up
            "-wa URG",
            f"-wt {clock(max(60, job.seconds_to_save))[:-3]}",
            '-Q "99"',
            "-r",
            f"-o {job.name}-{'%J.%I' if job.array else '%J'}.log",
        ]

    def launch(self, job: Job) -> str:
        # MPICH reads LSB_MCPU_HOSTS. Open MPI without LSF support finds the nodes only in this file.
        named = ' ${LSB_DJOB_HOSTFILE:+--hostfile "$LSB_DJOB_HOSTFILE"}'
        return mpiexec(job) + named * (job.mpi == "openmpi" and job.nodes > 1)


class Flux(System):
    """Flux. A batch job is a separate Flux instance, whose brokers get the job's signals.

    Tested with flux-core 0.88:

    | | ranks | the script's shell |
    |---|---|---|
    | `flux job kill -s USR1 JOB` on one node | USR1 | USR1 |
    | the same on multiple nodes, or `flux batch --signal` | USR1, but all brokers but the first end | |
    | `flux cancel` | nothing until the shell has ended, then TERM | TERM and HUP; KILL 5 s later |
    | the time limit itself | ALRM, which kills them | ALRM and HUP; KILL 5 s later |

    There are no arrays of batch jobs. The script is submitted once per element.
    """

    name = "Flux"
    sentinel = "# flux:"
    submits = ("flux", "batch")
    programs = ("flux",)
    mpi = dict.fromkeys(MPIS, "simple") | {"Open MPI": "openmpi", "Cray MPICH": "cray-pals"}
    reserved = "--time-limit|-t"
    element = "$ELEMENT"
    numbers = ("$number", "$number")
    advice = """\
Submit it with flux batch. Submit
# each element of an array separately: flux batch --env=ELEMENT=1 SCRIPT."""
    # Flux reports the remaining time. `--signal` would end brokers (above).
    begin = """\
# In seconds since 1970: the limit above, minus the time to submit a successor.
export DISTGPT_JOB_END=$(($(date +%s) + $(flux job timeleft) - {submitting}))
number=$(flux job id --to=f58plain "$(flux getattr jobid)")
"""
    signals = """\
# On USR1 every rank saves and exits. The run reads the time limit from DISTGPT_JOB_END. TERM and HUP come
# 5 seconds before `flux cancel` kills: the job saves and ends."""
    passed_on = "flux job kill -s USR1 $(flux job last)"  # a signal would kill flux run itself
    ends = "TERM HUP"
    successor = "flux --parent batch"
    successor_element = "--env=ELEMENT=$ELEMENT"

    def options(self, job: Job) -> list[str]:
        if job.memory:
            raise UsageError("Flux allocates cores, not memory; omit --memory")
        if "%" in job.array:
            raise UsageError(f"--array {job.array}: Flux starts all elements that fit; omit % and its number")
        return [
            f"--job-name={job.name}",
            f"--nodes={job.nodes}",
            f"--nslots={job.nodes}",  # one slot per node, since more ranks than GPUs may run
            f"--cores-per-slot={job.cpus_per_node}",
            f"--gpus-per-slot={job.gpus_per_node}" * bool(job.gpus_per_node),
            "--exclusive" * job.exclusive,
            f"--time-limit={int(job.seconds)}s",
            f"--output={job.name}-{{{{id.f58plain}}}}.log",  # only letters and digits, without the prefix ƒ
        ]

    def launch(self, job: Job) -> str:
        gpus = " --exclusive" * bool(job.gpus_per_node)  # all GPUs of the job; ranks choose one
        # Accept the words for other systems as well. A site's default may be one that MPICH does not support.
        others = {"mpich": "simple", "intel": "simple", "openmpi": MPIS["Open MPI"].flux, "pals": "cray-pals"}
        pmi = f" -o pmi={others.get(job.mpi, job.mpi)}" * (job.mpi != "none")
        return (
            f"flux run --nodes={job.nodes} --ntasks={job.ranks} --cores-per-task={job.cpus_per_task}"
            f"{gpus} \\\n  -o cpu-affinity=per-task{pmi}"
        )


# Systems by the value of --system.
SYSTEMS = {"slurm": Slurm(), "pbs": Pbs(), "sge": GridEngine(), "lsf": Lsf(), "flux": Flux()}
