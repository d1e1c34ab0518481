"""Batch systems, by what they say of a job in environment variables: rows of a table of the core."""

from __future__ import annotations

from collections.abc import Iterator

from distgpt.core.comm.batch import BatchSystem, Environ, Launcher

MIB = 1 << 20
SLURM_MEMORY = {  # MiB, and what they are given for
    "SLURM_MEM_PER_NODE": "",
    "SLURM_MEM_PER_CPU": "SLURM_CPUS_ON_NODE",
    "SLURM_MEM_PER_GPU": "SLURM_GPUS_ON_NODE",
}
STEP = "SLURM_STEP_NUM_TASKS"  # SLURM_NTASKS is also set where srun has launched nothing


class Srun(Launcher):
    """Slurm's launcher. It lets ranks meet by PMI or by PMIx, and not every MPI can do both."""

    def refusal(self, vendor: str, library: str, environ: Environ) -> str:
        if vendor == "MPICH" and _protocols(environ) == {"PMIX"} and "pmix" not in library:
            return "launched by srun --mpi=pmix, which this MPICH is built without; use srun --mpi=pmi2"
        return ""

    def doubt(self, vendor: str, environ: Environ) -> str:
        if vendor == "Open MPI" and not _protocols(environ):  # one that is built with Slurm's own PMI starts
            return "launched by srun without PMIx, which Open MPI may need: if it fails, use srun --mpi=pmix"
        return ""


def _protocols(environ: Environ) -> set[str]:
    """Return the protocols, PMI or PMIX, by which srun lets ranks meet."""
    names = (name for name in environ if not name.startswith("PMIX_MCA_"))  # those are users' settings
    return {name.split("_")[0].rstrip("2") for name in names if name.startswith("PMI")}


class Slurm(BatchSystem):
    """Slurm, which also says when it ends a job, and what it grants one."""

    def end(self, environ: Environ) -> float | None:
        known = environ.get("SLURM_JOB_END_TIME", "")
        return int(known) if known.isdecimal() and len(known) < 16 else None

    def memory(self, environ: Environ) -> Iterator[tuple[int, str]]:
        """Yield what was asked for. Slurm may end a job that takes more, also without a control group."""
        for name, times in SLURM_MEMORY.items():
            given, many = environ.get(name, ""), environ.get(times, "") if times else "1"
            if given.isdigit() and many.isdigit() and int(given) and int(many):  # 0 is all of a node
                by = f"{name}={given}" + (f" × {times}={many}" if times else "")
                yield int(given) * int(many) * MIB, by

    def cores(self, environ: Environ) -> tuple[int, str] | None:
        # A batch script's own steps have it too, but are no task: what they may run on is their affinity.
        given = environ.get("SLURM_CPUS_PER_TASK", "") if STEP in environ else ""
        return (int(given), f"SLURM_CPUS_PER_TASK={given}") if given.isdigit() and int(given) else None


SRUN = Srun("srun", STEP, "SLURM_PROCID", "SLURM_LOCALID")
SLURM = Slurm("Slurm", "SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_ID", SRUN)
PBS = BatchSystem("PBS", "PBS_JOBID", "PBS_JOBNAME", "PBS_JOBID")
LSF = BatchSystem("LSF", "LSB_JOBID", "LSB_JOBNAME", "LSB_JOBID")
GRID_ENGINE = BatchSystem("Grid Engine", "JOB_ID", "JOB_NAME", "SGE_TASK_ID")
