"""The part of a batch script of PBS Pro and OpenPBS.

As tried with OpenPBS 23.06.06: nothing comes before the limit. At it, at qdel, qrerun and a preemption TERM
goes to all processes of the job's session, the script's and mpiexec among them, and KILL after kill_delay
(10 s). A user may not queue a running job again (qrerun is the operators'): a job submits its successor.
"""

from __future__ import annotations

from distgpt.core.base.errors import UsageError
from distgpt.jobs.batch import array
from distgpt.jobs.batch.job import Job, clock
from distgpt.jobs.batch.script import END, System


class Pbs(System):
    name, sentinel = "PBS", "#PBS"
    waits = "-W *depend="
    submits, programs = ("qsub",), ("qsub", "pbsnodes")
    element, elements = "$ELEMENT", ("PBS_ARRAY_INDEX",)
    array_option, limit_option = "-J", r"-l\s*walltime"
    enters = 'cd "$PBS_O_WORKDIR" || exit\n'
    example = "-q workq"
    advice = """\
Submit it with qsub. A successor has
# the options of these lines, and none of qsub's own: change them here."""
    signals = """\
# Every rank saves and leaves on USR1. PBS sends none before its limit: the run knows that by DISTGPT_JOB_END.
# TERM comes before qdel kills: the job saves and ends, or PBS starts it again after a preemption."""

    def options(self, job: Job) -> list[str]:
        place = ["scatter"] * (job.nodes > 1) + ["excl"] * job.exclusive
        chunk = [
            f"{job.nodes}:ncpus={job.cpus_per_node}:mpiprocs={job.ranks_per_node}",
            f"ompthreads={job.cpus_per_task}",
            *([f"ngpus={job.gpus_per_node}"] if job.gpus_per_node else []),
            *([f"mem={job.memory.lower()}b"] if job.memory else []),
        ]
        return [
            f"-N {job.name}",
            "-S /bin/bash",
            f"-l select={':'.join(chunk)}",
            *([f"-l place={':'.join(place)}"] if place else []),
            f"-l walltime={clock(job.seconds)}",
            "-r y",
            "-j oe",
            *self._array(job),
        ]

    def _array(self, job: Job) -> list[str]:
        numbers, most = array.one_range(job.array, self.name)
        if numbers and "-" not in numbers:
            raise UsageError(f"--array {job.array}: an array of PBS is a range of at least two, as in 1-4")
        return [f"-J {numbers}{f'%{most}' if most else ''}"] if numbers else []

    def number(self, job: Job) -> str:
        return "$number"

    def deadline(self, job: Job) -> str:
        return END.format(int(job.seconds))

    def begin(self, job: Job) -> str:
        element = "ELEMENT=${ELEMENT:-$PBS_ARRAY_INDEX}  # the number of this run\n" if job.is_array else ""
        return f"{element}number=${{PBS_JOBID%%.*}}\n{super().begin(job)}"

    def launch(self, job: Job) -> str:
        # Open MPI without PBS's own library in it, as Debian's, finds the nodes in this file alone.
        return super().launch(job) + (' --hostfile "$PBS_NODEFILE"' if job.mpi == "openmpi" else "")

    def shown_number(self, is_array: bool) -> str:
        return "JOB[ELEMENT]" if is_array else "JOB"

    def log(self, name: str, number: str) -> str:
        return f"{name}.o{number.replace('[', '.').replace(']', '')}"  # PBS copies it when the job has ended

    def successor(self, job: Job) -> str:
        for line in job.lines:
            if line.startswith("-W") and "depend=" in line and "," in line:
                raise UsageError(
                    f"--directive {line}: give depend= in a --directive of its own, as a successor has none"
                )
        command = f"qsub{' -v ELEMENT=$ELEMENT' * job.is_array}"
        return self.shortened(job, command, "-J ") or f'{command} "$0"'


PBS = Pbs()
