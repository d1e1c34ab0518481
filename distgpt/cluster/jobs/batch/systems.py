"""The batch systems: their options for what a job asks for, and their own lines of a script (script.py)."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from distgpt.cluster.jobs.batch.job import Job, clock
from distgpt.cluster.jobs.launchers import mpirun, own_mpirun
from distgpt.cluster.launch.environment import MPIS
from distgpt.core.base.errors import UsageError

SECONDS_TO_SUBMIT = 20  # Flux: from when the run has left until its successor has been submitted


@dataclass(frozen=True, slots=True)
class RankLauncher:
    """An mpiexec: the vendors whose MPI it starts, its options, and those for bound and for free ranks."""

    vendors: tuple[str, ...]
    options: str
    bound: str
    free: str = ""


# By the value of --mpi. Open MPI by itself binds each rank to a core, which all of its threads would share.
LAUNCHERS = {
    "mpich": RankLauncher(
        ("MPICH", "MVAPICH", "MVAPICH2"), "-n {ranks} -ppn {each}", " -bind-to core:{cpus}"
    ),
    "openmpi": RankLauncher(
        ("Open MPI",), "-n {ranks} --map-by ppr:{each}:node", ":pe={cpus} --bind-to core", " --bind-to none"
    ),
    "intel": RankLauncher(("Intel MPI",), "-n {ranks} -ppn {each}", " -genv I_MPI_PIN_DOMAIN {cpus}:compact"),
    "pals": RankLauncher(("Cray MPICH",), "-n {ranks} --ppn {each} --depth={cpus}", " --cpu-bind=depth"),
}
_MPIEXEC = {vendor: name for name, row in LAUNCHERS.items() for vendor in row.vendors}


def mpiexec(job: Job) -> str:
    """Return an MPI's own launcher with its options; "" for a job of one rank, which needs none."""
    if job.mpi == "none":
        return ""
    row = LAUNCHERS.get(job.mpi)
    if row is None:
        raise UsageError(f"--mpi {job.mpi}: ranks are started here by one of {', '.join(LAUNCHERS)}")
    own = own_mpirun()
    # One that belongs to another MPI than the one asked for would refuse these options.
    program = shlex.quote(own) if own and mpirun(own)["vendor"] in row.vendors else "mpiexec"
    options = row.options + (row.bound if job.binds else row.free)
    values = {"ranks": job.ranks, "each": job.ranks_per_node, "cpus": job.cpus_per_task}
    return f"{program} {options.format(**values)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A batch system, in the words of the plain shell.

    `{number}` and `{name}` in the lines of the script are those of the job, `{seconds}` its time limit and
    `{submitting}` what a successor takes of that.
    """

    name: str
    sentinel: str  # what a line with a directive begins with
    submits: tuple[str, ...]  # the command that reads a script from its standard input
    programs: tuple[str, ...]  # commands that are there where it is
    options: Callable[[Job], list[str]]  # what a job asks for
    mpi: Mapping[str, str]  # the value of --mpi that suits the MPI of a vendor
    launch: Callable[[Job], str] = mpiexec  # the words before the command that start it as the job's ranks
    launches_by_mpi: bool = True  # by an mpiexec, which knows nothing of other jobs' cores
    refused_names: str = ""  # of jobs, as a regular expression
    # Its options, as regular expressions, that a script has by options of distgpt.
    array_option: str = ""  # for the numbers of an array
    limit_option: str = ""  # for the time limit, if the script says a second time when to save
    waits: str = ""  # for a job to wait for others
    # Arrays
    element: str  # the number of an element, as in "$SGE_TASK_ID"
    elements: tuple[str, ...] = ()  # variables with that number that commands may have
    least_element: int = 0  # systems refuse lower numbers
    one_job_each: bool = False  # it has no arrays: each element is submitted alone
    # Numbers of a job and of an array's element, for the shell and for people.
    numbers: tuple[str, str]
    shown_numbers: tuple[str, str] = ("JOB", "JOB.ELEMENT")
    log: str = "{name}-{number}.log"  # the file with what the script itself prints
    # The script
    advice: str  # how it is submitted, the header's sentences
    enters: str = ""  # the line that goes to where the script was submitted, if the system does not
    deadline: str = ""  # tells the run the time limit, where the system does not announce it
    begin: str = ""  # lines that set what follows
    begin_element: str = ""  # the same, before them, in an array
    attempt: str = (
        'attempt=0\nwhile [ -e "{name}-{number}.$attempt.log" ]; do attempt=$((attempt + 1)); done\n'
    )
    before: str = ""  # lines before the launch
    before_openmpi: str = ""
    signals: str  # the comment at the traps
    passed_on: str = "kill -USR1 $ranks"  # the command that asks the ranks to save
    announces: str = "USR1"  # signals before a limit, after which the job begins again
    ends: str = "TERM"  # signals of a job's end to which the script only saves
    rule: str = '75 is "saved, start me again".'  # the comment before the decision
    begins_again: str = "[ $code = 75 ]"  # the condition for another attempt, where a step was finished
    requeue: str = ""  # queues this job again; "" where the system has no way
    successor: str  # the command that submits the script as another job
    successor_element: str  # its option for one element of an array
    reads: str = '"$0"'  # how it takes the script
    left_out_of_element: str = (
        ""  # begins a directive, of all elements, that the successor of one must not have
    )


# Slurm. Which signals reach whom, as tried with Slurm 22.05 and read in its sources up to 25.11:
#
# | | ranks | the script's shell |
# |---|---|---|
# | `--signal=USR1@…`, `scancel --signal=USR1` | USR1 | |
# | the same with `--signal=B:…`, `--batch` | | USR1 |
# | `scancel`, `scontrol requeue`, preemption, the time limit itself | TERM, KILL after KillWait | the same |
# | preemption in a partition with GraceTime | TERM; then the job may end by itself | |
#
# On TERM srun kills all ranks, and `scancel --full` sends that to the shell's whole process group: srun has
# one of its own. A rank that leaves with 75 must not make srun kill the others, which are still on their way
# out; one that was killed ends all after 60 s.


def _slurm_options(job: Job) -> list[str]:
    return [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={job.ranks_per_node}",
        f"--cpus-per-task={job.cpus_per_task}",
        *(["--hint=nomultithread"] if job.counts_cores else []),
        *([f"--gpus-per-node={job.gpus_per_node}"] if job.gpus_per_node else []),
        *([f"--mem={job.memory}"] if job.memory else []),
        *(["--exclusive"] if job.exclusive else []),
        f"--time={_slurm_time(job.seconds)}",
        f"--signal=USR1@{job.seconds_to_save}",
        "--requeue",
        "--open-mode=append",
        f"--output={job.name}-{'%A_%a' if job.is_array else '%j'}.log",
        *([f"--array={job.array}"] if job.array else []),
    ]


def _slurm_time(seconds: float) -> str:
    """14400 → "04:00:00", 90000 → "1-01:00:00"."""
    hours, _, rest = clock(seconds).partition(":")
    days, hour = divmod(int(hours), 24)
    return (f"{days}-" if days else "") + f"{hour:02}:{rest}"


def _srun(job: Job) -> str:
    # --hint excludes --cpu-bind, which it sets itself. A step does not inherit --cpus-per-task.
    binding = "--hint=nomultithread --distribution=block:block" if job.counts_cores else "--cpu-bind=cores"
    return (
        f'srun --mpi={job.mpi} --cpus-per-task="$SLURM_CPUS_PER_TASK" {binding} \\\n'
        "  --kill-on-bad-exit=0 --wait=60"
    )


SLURM = System(
    name="Slurm",
    sentinel="#SBATCH",
    submits=("sbatch",),
    programs=("sbatch",),
    options=_slurm_options,
    mpi={vendor: mpi.srun[0] for vendor, mpi in MPIS.items()},
    launch=_srun,
    launches_by_mpi=False,
    array_option=r"--array\b|-a",
    element="$SLURM_ARRAY_TASK_ID",
    elements=("SLURM_ARRAY_TASK_ID",),
    # SLURM_JOB_ID of an array's element may stand for the whole array.
    numbers=("$SLURM_JOB_ID", "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"),
    shown_numbers=("JOB", "JOB_ELEMENT"),
    advice="""\
Submit it with sbatch, whose options
# override the lines below: sbatch --nodes=1 --ntasks-per-node=… resumes the run on other nodes.""",
    attempt="attempt=${{SLURM_RESTART_COUNT:-0}}\n",
    before="preempted() {{ scontrol show job \"{number}\" | grep -q 'PreemptTime=[0-9]'; }}\n",
    signals="""\
# Every rank saves and leaves on USR1, which Slurm sends them before the time limit. What only this shell gets
# is passed on; after a TERM Slurm ends or requeues the job itself.""",
    rule='75 is "saved, start me again". A preempted job that ends within its grace time is not requeued by'
    " Slurm.",
    begins_again="[ $code = 75 ] || {{ [ $code != 0 ] && preempted; }}",
    requeue='scontrol requeue "{number}" && exit 0',
    successor="sbatch",
    successor_element="--array=$SLURM_ARRAY_TASK_ID",
)


# PBS Pro and OpenPBS. As tried with OpenPBS 23.06.06: nothing comes before the limit. At it, at qdel, qrerun
# and a preemption TERM goes to all processes of the job's session, the script's and mpiexec among them, and
# KILL after kill_delay (10 s). A user may not queue a running job again (qrerun is the operators'): a job
# submits its successor.


def _pbs_options(job: Job) -> list[str]:
    place = ["scatter"] * (job.nodes > 1) + ["excl"] * job.exclusive
    chunk = [
        f"{job.nodes}:ncpus={job.cpus_per_node}:mpiprocs={job.ranks_per_node}:ompthreads={job.cpus_per_task}",
        *([f"ngpus={job.gpus_per_node}"] if job.gpus_per_node else []),
        *([f"mem={job.memory.lower()}b"] if job.memory else []),
    ]
    numbers, most = _one_range(job.array, "PBS")
    if numbers and "-" not in numbers:
        raise UsageError(f"--array {job.array}: an array of PBS is a range of at least two, as in 1-4")
    for line in job.lines:
        if line.startswith("-W") and "depend=" in line and "," in line:
            raise UsageError(
                f"--directive {line}: give depend= in a --directive of its own, as a successor has none"
            )
    return [
        f"-N {job.name}",
        "-S /bin/bash",
        f"-l select={':'.join(chunk)}",
        *([f"-l place={':'.join(place)}"] if place else []),
        f"-l walltime={clock(job.seconds)}",
        "-r y",
        "-j oe",
        *([f"-J {numbers}{f'%{most}' if most else ''}"] if numbers else []),
    ]


def _one_range(text: str, system: str) -> tuple[str, str]:
    """Return an array's range and how many of its elements may run at once; refuse lists of numbers."""
    numbers, _, most = text.partition("%")
    if "," in numbers:
        raise UsageError(f"--array {text}: {system} takes one range, as in 1-4 or 0-8:2")
    return numbers, most


def _pbs_launch(job: Job) -> str:
    # Open MPI without PBS's own library in it, as Debian's, finds the nodes in this file alone.
    return mpiexec(job) + (' --hostfile "$PBS_NODEFILE"' if job.mpi == "openmpi" else "")


PBS = System(
    name="PBS",
    sentinel="#PBS",
    submits=("qsub",),
    programs=("qsub", "pbsnodes"),
    options=_pbs_options,
    mpi=_MPIEXEC,
    launch=_pbs_launch,
    array_option="-J",
    limit_option=r"-l\s*walltime",
    waits="-W *depend=",
    element="$ELEMENT",
    elements=("PBS_ARRAY_INDEX",),
    numbers=("$number", "$number"),
    shown_numbers=("JOB", "JOB[ELEMENT]"),
    log="{name}.o{number}",  # PBS copies it when the job has ended
    advice="""\
Submit it with qsub. A successor has
# the options of these lines, and none of qsub's own: change them here.""",
    enters='cd "$PBS_O_WORKDIR" || exit\n',
    deadline="export DISTGPT_JOB_END=$(($(date +%s) + {seconds}))"
    "  # the limit above, in seconds since 1970\n",
    begin="number=${{PBS_JOBID%%.*}}\n",
    begin_element="ELEMENT=${{ELEMENT:-$PBS_ARRAY_INDEX}}  # the number of this run\n",
    signals="""\
# Every rank saves and leaves on USR1. PBS sends none before its limit: the run knows that by DISTGPT_JOB_END.
# TERM comes before qdel kills: the job saves and ends, or PBS starts it again after a preemption.""",
    successor="qsub",
    successor_element="-v ELEMENT=$ELEMENT",
    left_out_of_element="-J ",
)


# Grid Engine. As tried with Son of Grid Engine 8.1.9: at s_rt the shell's process group gets USR1; `-notify`
# sends USR2 before `qdel` kills; a script that leaves with 99 is queued again, with the same number.


def _sge_options(job: Job) -> list[str]:
    slots = job.nodes * job.cpus_per_node
    if job.memory:
        raise UsageError(
            '--memory: sites of Grid Engine name it differently, as in --directive "-l h_vmem=4G" for a slot'
        )
    numbers, most = _one_range(job.array, "Grid Engine")
    return [
        f"-N {job.name}",
        "-S /bin/bash",
        "-cwd",
        *([f"-pe mpi {slots}"] if slots > 1 else []),
        *([f"-l gpu={job.gpus_per_node}"] if job.gpus_per_node else []),
        *(["-l exclusive=true"] if job.exclusive else []),
        f"-l h_rt={clock(job.seconds)}",
        f"-l s_rt={clock(job.seconds - job.seconds_to_save)}",
        "-notify",
        "-r y",
        "-j y",
        f"-o {job.name}-$JOB_ID{'.$TASK_ID' if job.is_array else ''}.log",
        *([f"-t {numbers}"] if numbers else []),
        *([f"-tc {most}"] if most else []),
    ]


GRID_ENGINE = System(
    name="Grid Engine",
    sentinel="#$",
    submits=("qsub",),
    programs=("qsub", "qconf"),
    options=_sge_options,
    mpi=_MPIEXEC,
    refused_names=r"\d.*|(?i:none|all|template)",
    array_option=r"-t\s",
    limit_option=r"-l\s*h_rt",
    element="$SGE_TASK_ID",
    elements=("SGE_TASK_ID",),
    least_element=1,
    numbers=("$JOB_ID", "$JOB_ID.$SGE_TASK_ID"),
    advice="""\
Submit it with qsub, whose options
# override the lines below. `qconf -spl` lists the parallel environments that -pe may name.""",
    signals="""\
# Every rank saves and leaves on USR1, which this shell gets at s_rt, before the limit h_rt. USR2 comes before
# qdel kills (-notify): the job saves and ends.""",
    ends="USR2 TERM",
    rule='75 is "saved, start me again"; Grid Engine queues a job again that leaves with 99.',
    requeue="exit 99",
    successor="qsub",
    successor_element="-t $SGE_TASK_ID",
)


# LSF, written from IBM's reference of LSF 10.1. As tried with volclava 2.2, an open clone of LSF, which lacks
# -wa, -wt, -Q and -gpu: a signal comes to every process group of the job, that of mpiexec and those of the
# ranks among them; at the limit (-W) all get USR2 and have ten minutes; `bkill` sends INT, TERM and KILL; a
# script that leaves with 99 is queued again, with the same number.


def _lsf_options(job: Job) -> list[str]:
    numbers, percent, most = job.array.partition("%")
    array = f"[{numbers}]{percent}{most}" if numbers else ""
    return [
        f'-J "{job.name}{array}"',
        # Slots are cores: the affinity of tasks is not configured at every site.
        f"-n {job.nodes * job.cpus_per_node}",
        f'-R "span[ptile={job.cpus_per_node}]"',
        *([f'-R "rusage[mem={job.memory}/host]"'] if job.memory else []),
        *([f'-gpu "num={job.gpus_per_node}/host:j_exclusive=yes"'] if job.gpus_per_node else []),
        *(["-x"] if job.exclusive else []),
        f"-W {clock(60 * math.ceil(job.seconds / 60))[:-3]}",  # in minutes, rounded up
        "-wa URG",
        f"-wt {clock(max(60, job.seconds_to_save))[:-3]}",
        '-Q "99"',
        "-r",
        f"-o {job.name}-{'%J.%I' if job.is_array else '%J'}.log",
    ]


def _lsf_launch(job: Job) -> str:
    # MPICH reads LSB_MCPU_HOSTS; Open MPI knows the nodes by this file, unless it has LSF's own library.
    named = ' ${LSB_DJOB_HOSTFILE:+--hostfile "$LSB_DJOB_HOSTFILE"}'
    return mpiexec(job) + named * (job.mpi == "openmpi" and job.nodes > 1)


LSF = System(
    name="LSF",
    sentinel="#BSUB",
    submits=("bsub",),
    programs=("bsub",),
    options=_lsf_options,
    mpi=_MPIEXEC,
    launch=_lsf_launch,
    array_option="-J(?!d)",  # the name's: one without numbers would take the array's place
    waits="-w( |[^at])",  # not -wa and -wt, which are others
    element="$LSB_JOBINDEX",
    elements=("LSB_JOBINDEX",),
    least_element=1,
    numbers=("$LSB_JOBID", "$LSB_JOBID.$LSB_JOBINDEX"),
    advice="""\
Submit it with bsub < SCRIPT, whose options
# override the lines below.""",
    # A signal of LSF comes to mpiexec and to all that it has started, too. By itself every program ignores
    # URG. USR2 ends MPICH's mpiexec, and an ssh to another node; of an INT, Open MPI's mpiexec kills the
    # ranks.
    before="""\
asked=
trap '' USR2  # which comes to mpiexec, too, and might end it
""",
    before_openmpi="""\
# Seconds that mpiexec leaves the ranks for a save after bkill: as Open MPI 4 calls them, and 5.
export OMPI_MCA_odls_base_sigkill_timeout=10 PRTE_MCA_odls_base_sigkill_timeout=10
""",
    signals="""\
# Every rank saves and leaves on USR1. LSF sends URG before the limit (-wa, -wt), which only this shell heeds,
# and USR2 at the limit. INT and TERM come before bkill kills: the job saves and ends. A second USR1 would end
# the save.""",
    passed_on='[ "$asked" ] || kill -USR1 $ranks; asked=yes',
    announces="URG USR1 USR2",
    ends="INT TERM",
    rule='75 is "saved, start me again"; LSF queues a job again that leaves with 99 (-Q).',
    requeue="exit 99",
    successor="bsub",
    successor_element='-J "{name}[$LSB_JOBINDEX]"',
    reads='< "$0"',
)


# Flux. A batch job is a Flux instance of its own, whose brokers get the job's signals. As tried with
# flux-core 0.88:
#
# | | ranks | the script's shell |
# |---|---|---|
# | `flux job kill -s USR1 JOB` on one node | USR1 | USR1 |
# | the same on several nodes, or `flux batch --signal` | USR1, but all brokers but the first end | |
# | `flux cancel` | nothing until the shell has ended, then TERM | TERM and HUP; KILL 5 s later |
# | the time limit itself | ALRM, of which they die | ALRM and HUP; KILL 5 s later |
#
# There are no arrays of batch jobs: the script is submitted once for each element.

# Of --mpi, also by the words for other systems. A site may have another default, which MPICH could not speak.
_PMI = {"mpich": "simple", "intel": "simple", "openmpi": MPIS["Open MPI"].flux, "pals": "cray-pals"}


def _flux_options(job: Job) -> list[str]:
    if job.memory:
        raise UsageError("--memory: Flux gives cores, and no part of a node's memory: leave it out")
    if "%" in job.array:
        raise UsageError(f"--array {job.array}: Flux starts all that fit at once: leave out % and its number")
    return [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        f"--nslots={job.nodes}",  # a node's part each: ranks may be more than GPUs, which are given whole
        f"--cores-per-slot={job.cpus_per_node}",
        *([f"--gpus-per-slot={job.gpus_per_node}"] if job.gpus_per_node else []),
        *(["--exclusive"] if job.exclusive else []),
        f"--time-limit={int(job.seconds)}s",
        f"--output={job.name}-{{{{id.f58plain}}}}.log",  # letters and digits: without its sign, ƒ
    ]


def _flux_run(job: Job) -> str:
    gpus = " --exclusive" if job.gpus_per_node else ""  # all that the job has: ranks choose among them
    pmi = "" if job.mpi == "none" else f" -o pmi={_PMI.get(job.mpi, job.mpi)}"
    return (
        f"flux run --nodes={job.nodes} --ntasks={job.ranks} --cores-per-task={job.cpus_per_task}"
        f"{gpus} \\\n  -o cpu-affinity=per-task{pmi}"
    )


FLUX = System(
    name="Flux",
    sentinel="# flux:",
    submits=("flux", "batch"),
    programs=("flux",),
    options=_flux_options,
    mpi={vendor: {"Open MPI": "openmpi", "Cray MPICH": "cray-pals"}.get(vendor, "simple") for vendor in MPIS},
    launch=_flux_run,
    launches_by_mpi=False,
    limit_option="--time-limit|-t",
    element="$ELEMENT",
    one_job_each=True,
    numbers=("$number", "$number"),
    shown_numbers=("JOB", "JOB"),
    advice="""\
Submit it with flux batch. Of an array
# each element is submitted alone: flux batch --env=ELEMENT=1 SCRIPT.""",
    # The limit as Flux knows it: the job began before its script. `--signal` would end brokers (above).
    begin="""\
# In seconds since 1970: the limit above, less what it takes to submit a successor.
export DISTGPT_JOB_END=$(($(date +%s) + $(flux job timeleft) - {submitting}))
number=$(flux job id --to=f58plain "$(flux getattr jobid)")
""",
    signals="""\
# Every rank saves and leaves on USR1. The run knows the time limit by DISTGPT_JOB_END. TERM and HUP come
# 5 seconds before `flux cancel` kills: the job saves and ends.""",
    passed_on="flux job kill -s USR1 $(flux job last)",  # flux run itself would be killed by it
    ends="TERM HUP",
    successor="flux --parent batch",
    successor_element="--env=ELEMENT=$ELEMENT",
)

# By the value of --system.
SYSTEMS = {"slurm": SLURM, "pbs": PBS, "sge": GRID_ENGINE, "lsf": LSF, "flux": FLUX}
