"""The stages of a comparison: which can run here, and one of them run: training, then greedy inference."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distgpt.cluster.jobs.launchers import Launcher, find_launcher
from distgpt.cluster.jobs.processes import Ended, distgpt_command, run, unlaunched
from distgpt.core.base.checked import parse_object
from distgpt.core.base.errors import DataError, StorageError, UsageError
from distgpt.core.base.files import atomic_file, read_small, storage_errors
from distgpt.core.config import ON_GPU, STAGES, WITH_MPI, nearest
from distgpt.core.saved.rundir import RunDirectory
from distgpt.measure.compare.workload import NEW_TOKENS, Workload
from distgpt.measure.doctor.facts import Facts, anonymised
from distgpt.measure.doctor.report import examine
from distgpt.measure.doctor.verdicts import sentence
from distgpt.measure.jobs import answer, read_losses, read_summary

FORMAT, VERSION = "distgpt-comparison", 1
TRAINING, INFERENCE = "training", "inference"
INTERRUPTED = "interrupted"

# What is taken of a run's summary, and of what `distgpt infer` prints.
TRAINED = (
    *("train_s", "tokens_per_s", "step_s_median", "first_step_s", "peak_memory", "peak_gpu_memory"),
    *("allreduce", "parameters", "train_bits_per_byte"),
)
WRITTEN = ("text", "tokens", "seconds", "tokens_per_s", "peak_memory")


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """The command line. `tolerance` replaces our own."""

    workload: Workload
    stages: str | None = None
    ranks: int = 2
    launcher: str | None = None
    hostfile: Path | None = None
    threads: int | None = None
    gpu_dtype: str = "float32"
    tolerance: float | None = None

    def dtype_of(self, stage: str) -> str:
        return self.gpu_dtype if stage in ON_GPU else self.workload.run.train.dtype

    def ranks_of(self, stage: str) -> int:
        return self.ranks if stage in WITH_MPI else 1


# -- which can run


@dataclass(frozen=True, slots=True)
class Runnable:
    """The stages to run, in order, and for each of the others what is missing."""

    stages: tuple[str, ...]
    missing: dict[str, list[Facts]]
    launcher: Launcher | None


def find_runnable(options: CompareOptions) -> Runnable:
    """Find the stages that can run here. Refuse one that was named and cannot."""
    names = STAGES if options.stages is None else [word.strip() for word in options.stages.split(",")]
    for name in names:
        if name not in STAGES:
            raise UsageError(f"--stages: unknown stage {name!r}{nearest(name, STAGES)}")
    wanted = tuple(stage for stage in STAGES if stage in names)
    missing = _missing(wanted, options)
    launcher = None
    if options.launcher is not None or options.hostfile is not None:
        launcher = find_launcher(options.launcher, options.hostfile)
    elif any(stage in WITH_MPI and stage not in missing for stage in wanted):
        try:
            launcher = find_launcher(None, None)
        except UsageError as error:
            what, _, remedy = str(error).partition(": ")
            missing |= {s: [{"what": what, "remedy": remedy}] for s in wanted if s in WITH_MPI}
    if options.stages is not None:
        for stage, troubles in missing.items():
            reasons = "; ".join(map(sentence, troubles))
            raise UsageError(f"--stages: {stage} cannot run here: {reasons}")
    stages = tuple(stage for stage in wanted if stage not in missing)
    if not stages:
        raise UsageError("no stage can run here: distgpt doctor says why")
    return Runnable(stages, missing, launcher)


def _missing(wanted: Sequence[str], options: CompareOptions) -> dict[str, list[Facts]]:
    report, _ = examine()
    missing = {stage: report["stages"][stage]["missing"] for stage in wanted}
    for stage in wanted:
        if stage in ON_GPU and options.dtype_of(stage) == "bfloat16" and not missing[stage]:
            missing[stage] = report["ranks"][0]["gpu"]["missing"]["bfloat16"]
    return {stage: troubles for stage, troubles in missing.items() if troubles}


# -- where results lie


class Folder:
    """The files of one comparison; a run directory for each stage lies beside them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.result = path / "compare.json"
        self.report = path / "report.html"
        self.prompt = path / "prompt.txt"
        self.config = path / "config.toml"

    def refuse_foreign(self) -> None:
        """Refuse a folder that is neither empty nor one of an earlier comparison."""
        with storage_errors("use", self.path):
            if self.path.exists() and not self.path.is_dir():
                raise UsageError(f"--out {self.path} is no folder; choose another")
            if not self.path.is_dir() or not any(self.path.iterdir()):
                return
        try:
            is_ours = parse_object(read_small(self.result), self.result).get("format") == FORMAT
        except (DataError, StorageError):
            is_ours = False
        if not is_ours:
            raise UsageError(f"--out {self.path} is not empty and holds no comparison; choose another")

    def begin(self, config: str, prompt: str) -> None:
        """Make it, and delete what an earlier comparison left."""
        with storage_errors("use", self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            for stage in STAGES:
                shutil.rmtree(self.path / stage, ignore_errors=True)
            self.report.unlink(missing_ok=True)
        self.write(self.config, config)
        self.write(self.prompt, prompt)

    def save(self, found: dict[str, Any]) -> None:
        text = json.dumps({"format": FORMAT, "version": VERSION, **found}, indent=1, allow_nan=False)
        self.write(self.result, text + "\n")

    def write(self, path: Path, text: str) -> None:
        with atomic_file(path) as file:
            file.write(text.encode())


# -- running one


@dataclass(slots=True)
class Measured:
    """The time, memory and results of one stage. A loss that is not finite is None."""

    stage: str
    ranks: int
    dtype: str
    threads: int | None = None
    commands: list[str] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    training: Facts | None = None
    inference: Facts | None = None
    failed: Facts | None = None  # phase, code and last words

    def read(self, phase: str, ended: Ended, directory: RunDirectory) -> None:
        """Take what a phase has left."""
        if phase == TRAINING:
            found = read_summary(directory.path)
            self.training = {key: found[key] for key in TRAINED} | {"process_s": ended.seconds}
            self.threads = found["threads"] or None
            shutil.rmtree(directory.checkpoints, ignore_errors=True)  # nobody will resume from here
        else:
            found = answer(ended, INFERENCE)
            if lacking := [key for key in WRITTEN if key not in found]:
                raise DataError(f"{INFERENCE} printed no {lacking[0]}")
            self.inference = {key: found[key] for key in WRITTEN} | {"process_s": ended.seconds}


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs stages. Calls `phase` when a part of a stage begins, `on_line` with each line of its output."""

    options: CompareOptions
    launcher: Launcher | None
    folder: Folder
    phase: Callable[[str, str], None]
    on_line: Callable[[str], None]

    def measure(self, into: Measured) -> None:
        """Fill in results as they are found, so that an interruption keeps what there is by then."""
        directory = RunDirectory(self.folder.path / into.stage)
        train = ["train", "--config", self.folder.config, "--progress", "plain", "--out", directory.path]
        infer = ["infer", "--weights", directory.weights, "--prompt-file", self.folder.prompt]
        infer += ["--max-new-tokens", NEW_TOKENS, "--temperature", 0, "--json"]
        try:
            for phase, words in ((TRAINING, train), (INFERENCE, infer)):
                into.failed = {"phase": phase, "code": None, "last_words": INTERRUPTED}
                self.phase(into.stage, phase)
                command, typed = self.command(into.stage, words)
                into.commands.append(typed)
                ended = run(command, env=unlaunched(), on_line=self.on_line)
                try:
                    if ended.code:
                        raise DataError(ended.complaint())
                    into.read(phase, ended, directory)
                except (DataError, ValueError) as error:
                    into.failed |= {"code": ended.code, "last_words": anonymised(str(error))}
                    return
            into.failed = None
        finally:
            into.losses = read_losses(directory.path)  # of the steps that it got to

    def command(self, stage: str, words: Sequence[object]) -> tuple[list[str], str]:
        """Return a distgpt command in a stage, and how a user would type it."""
        how: list[object] = ["--stage", stage, "--dtype", self.options.dtype_of(stage)]
        if self.options.threads is not None and stage not in ON_GPU:
            how += ["--threads", self.options.threads]
        own = [*words[:1], *how, *words[1:]]
        command, typed = distgpt_command(*own), ["distgpt", *map(str, own)]
        if stage not in WITH_MPI:
            return command, anonymised(shlex.join(typed))
        assert self.launcher is not None
        ranks = self.options.ranks
        return self.launcher.command(ranks, command), anonymised(self.launcher.shown(ranks, typed))
