"""Which stages this machine can run, as `distgpt doctor` knows it, and what the others lack."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from distgpt.config import nearest
from distgpt.errors import UsageError
from distgpt.machine.doctor import examine, sentence
from distgpt.machine.facts import Facts
from distgpt.machine.launchers import Launcher, find_launcher
from distgpt.machine.stages import ON_GPU, STAGES, WITH_MPI


@dataclass(frozen=True, slots=True)
class Jobs:
    """How stages are started: the numbers of processes and threads, and the number formats."""

    ranks: int
    launcher: str | None
    hostfile: Path | None
    threads: int | None
    dtype: str
    gpu_dtype: str

    def dtype_of(self, stage: str) -> str:
        return self.gpu_dtype if stage in ON_GPU else self.dtype


@dataclass(frozen=True, slots=True)
class Runnable:
    """The stages to run, in their order, and for each of the others what is missing."""

    stages: tuple[str, ...]
    missing: dict[str, list[Facts]]
    launcher: Launcher | None


def chosen_stages(words: str | None) -> tuple[str, ...]:
    """Of `--stages serial,mpi`; all of them if left out."""
    names = [word.strip() for word in words.split(",")] if words is not None else list(STAGES)
    for name in names:
        if name not in STAGES:
            raise UsageError(f"--stages: unknown stage {name!r}{nearest(name, STAGES)}")
    return tuple(stage for stage in STAGES if stage in names)


def find_runnable(words: str | None, jobs: Jobs) -> Runnable:
    """A stage that was asked for by name and cannot run is an error."""
    wanted = chosen_stages(words)
    missing = _missing(wanted, jobs)
    launcher = None
    if jobs.launcher is not None or jobs.hostfile is not None:
        launcher = find_launcher(jobs.launcher, jobs.hostfile)
    elif any(stage in WITH_MPI and stage not in missing for stage in wanted):
        try:
            launcher = find_launcher(None, None)
        except UsageError as error:
            what, _, remedy = str(error).partition(": ")
            missing |= {s: [{"what": what, "remedy": remedy}] for s in wanted if s in WITH_MPI}
    if words is not None:
        for stage, troubles in missing.items():
            reasons = "; ".join(map(sentence, troubles))
            raise UsageError(f"--stages: {stage} cannot run here: {reasons}")
    stages = tuple(stage for stage in wanted if stage not in missing)
    if not stages:
        raise UsageError("no stage can run here: distgpt doctor says why")
    return Runnable(stages, missing, launcher)


def idle(stages: Sequence[str], given: Iterable[str]) -> list[str]:
    """Which of the given options none of these stages takes notice of, for people."""
    without_mpi, on_gpu = not set(stages) & set(WITH_MPI), set(stages) <= set(ON_GPU)
    notes = [
        (without_mpi, "--ranks", "no stage with MPI"),
        (without_mpi, "--hostfile", "no stage with MPI"),
        (without_mpi, "--launcher", "no stage with MPI"),
        (on_gpu, "--threads", "no stage on the CPU"),
    ]
    return [f"{flag} has no effect: {why} runs here" for is_so, flag, why in notes if is_so and flag in given]


def _missing(wanted: Sequence[str], jobs: Jobs) -> dict[str, list[Facts]]:
    report, _ = examine()
    missing = {stage: report["stages"][stage]["missing"] for stage in wanted}
    for stage in wanted:
        if jobs.dtype_of(stage) == "bfloat16" and not missing[stage]:
            missing[stage] = _without_bfloat16(stage, report)
    return {stage: troubles for stage, troubles in missing.items() if troubles}


def _without_bfloat16(stage: str, report: Facts) -> list[Facts]:
    if stage in ON_GPU:
        found: list[Facts] = report["ranks"][0]["gpu"]["missing"]["bfloat16"]
        return found
    remedy = "--dtype float32 --gpu-dtype bfloat16"
    return [{"what": "bfloat16 needs a GPU", "remedy": remedy}]
