"""`distgpt bench stages`: train one job in every stage that can run here, and let the models write."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distgpt.cluster.jobs.launchers import Launcher, find_launcher
from distgpt.core.base.checked import parse_object
from distgpt.core.base.errors import DataError, DistgptError, StorageError, UsageError
from distgpt.core.base.files import read_small, storage_errors
from distgpt.core.comm.api import SerialComm
from distgpt.core.config import ON_GPU, STAGES, WITH_MPI, RunConfig, nearest
from distgpt.core.config.asked import asked_for
from distgpt.core.data.loading import DataRequest, load_corpus
from distgpt.core.model.optim import learning_rate
from distgpt.core.saved.modelfile import read_description
from distgpt.core.saved.rundir import RunDirectory
from distgpt.core.train.plan import new_run
from distgpt.measure.doctor.facts import Facts, anonymised
from distgpt.measure.doctor.report import examine
from distgpt.measure.doctor.verdicts import sentence
from distgpt.measure.jobs import ask, read_losses, say, train
from distgpt.recipes.derived import derived

FORMAT = "distgpt-comparison"

# What is taken of a run's summary, and of what `distgpt infer` prints.
TRAINED = (
    *("train_s", "tokens_per_s", "step_s_median", "first_step_s", "peak_memory", "peak_gpu_memory"),
    *("allreduce", "parameters", "train_bits_per_byte"),
)
WRITTEN = ("text", "tokens", "seconds", "tokens_per_s", "peak_memory")

# -- the job

PRESET, SHORT = "gpt-mini", 21  # the course project's model, and how many of its 50 steps are taken
PROMPT_TOKENS, NEW_TOKENS = 256, 30


def find_workload(
    preset: str | None, toml: Path | None, flags: Mapping[str, Any], full: bool, deterministic: bool = False
) -> tuple[str, RunConfig]:
    """Return the name and settings of the job. The course project's is shortened unless `full`."""
    preset = preset or (PRESET if toml is None else None)
    is_projects = (
        preset == PRESET and toml is None and not flags.keys() & {"steps", "epochs", "train_minutes"}
    )
    if full and not is_projects:
        raise UsageError("--full is for the course project's workload; set the length of others with --steps")
    asked = asked_for({**flags, "deterministic": deterministic}, preset, toml)
    config = new_run(derived(asked, 1))
    if is_projects and not full:
        # Its first steps, at the learning rates that a linear schedule has there.
        config = config.with_values({"steps": SHORT, "min_lr": learning_rate(config.train, SHORT)})
    return asked.name, config


def find_prompt(config: RunConfig) -> str:
    """Return the beginning of the training text, which the models continue."""
    t = config.train
    existing = read_description(Path(t.init)).tokenizer if t.init else None
    request = DataRequest(t.data, t.tokenizer, config.model.seq_len, t.val_fraction, False, existing=existing)
    corpus = load_corpus(SerialComm(), request)
    text = corpus.tokenizer.decode(corpus.train.read(0, min(PROMPT_TOKENS, len(corpus.train))))
    return text.rstrip("\ufffd") or text  # without a character that the tokens hold in part only


# -- which stages can run


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """The command line. `tolerance` replaces our own."""

    name: str
    run: RunConfig
    stages: str | None = None
    ranks: int = 2
    launcher: str | None = None
    hostfile: Path | None = None
    threads: int | None = None
    gpu_dtype: str = "float32"
    tolerance: float | None = None

    def dtype_of(self, stage: str) -> str:
        return self.gpu_dtype if stage in ON_GPU else self.run.train.dtype


def find_runnable(
    options: CompareOptions,
) -> tuple[list[str], dict[str, list[Facts]], Launcher | None]:
    """Return the stages that can run here, what each of the others lacks, and the launcher.

    A stage that was named must be able to run.
    """
    names = STAGES if options.stages is None else [word.strip() for word in options.stages.split(",")]
    for name in names:
        if name not in STAGES:
            raise UsageError(f"--stages: unknown stage {name!r}{nearest(name, STAGES)}")
    report, _ = examine()
    missing: dict[str, list[Facts]] = {}
    for stage in (stage for stage in STAGES if stage in names):
        missing[stage] = report["stages"][stage]["missing"]
        if stage in ON_GPU and options.gpu_dtype == "bfloat16" and not missing[stage]:
            missing[stage] = report["ranks"][0]["gpu"]["missing"]["bfloat16"]
    launcher, is_named = None, options.launcher is not None or options.hostfile is not None
    if is_named or any(not missing[stage] for stage in missing.keys() & set(WITH_MPI)):
        try:
            launcher = find_launcher(options.launcher, options.hostfile)
        except UsageError as error:
            if is_named:
                raise
            what, _, remedy = str(error).partition(": ")
            missing |= {s: [{"what": what, "remedy": remedy}] for s in missing if s in WITH_MPI}
    stages = [stage for stage, troubles in missing.items() if not troubles]
    missing = {stage: troubles for stage, troubles in missing.items() if troubles}
    if options.stages is not None:
        for stage, troubles in missing.items():
            raise UsageError(f"--stages: {stage} cannot run here: {'; '.join(map(sentence, troubles))}")
    if not stages:
        raise UsageError("no stage can run here: distgpt doctor says why")
    return stages, missing, launcher


# -- the folder of a comparison, in which each stage has a run


def refuse_foreign(folder: Path) -> None:
    """Reject a folder that is neither empty nor one of an earlier comparison."""
    with storage_errors("use", folder):
        if not folder.exists() or not any(folder.iterdir()):
            return
    result = folder / "compare.json"
    try:
        is_ours = parse_object(read_small(result), result).get("format") == FORMAT
    except (DataError, StorageError):
        is_ours = False
    if not is_ours:
        raise UsageError(f"--out {folder} is not empty and holds no comparison; choose another")


# -- running one


@dataclass(slots=True)
class Measured:
    """The time, memory and results of one stage. A loss that is not finite is None."""

    stage: str
    ranks: int
    dtype: str
    threads: int | None = None
    losses: list[float | None] = field(default_factory=list)
    training: Facts | None = None
    inference: Facts | None = None
    failed: str = ""

    def measure(self, options: CompareOptions, launcher: Launcher | None, folder: Path) -> None:
        """Fill in results as they are found, so that an interruption keeps what there is by then."""
        out, phase = RunDirectory(folder / self.stage), "training"
        words: list[object] = ["--stage", self.stage, "--dtype", self.dtype]
        if options.threads is not None and self.stage not in ON_GPU:
            words += ["--threads", options.threads]
        with_mpi = launcher if self.stage in WITH_MPI else None
        shutil.rmtree(out.path, ignore_errors=True)
        say(f"{self.stage:<9} {phase} …")
        try:
            found = train(self.stage, options.run, out.path, words, with_mpi, self.ranks)
            self.training = {key: found[key] for key in TRAINED}
            self.threads = found["threads"] or None
            shutil.rmtree(out.checkpoints, ignore_errors=True)  # no one resumes from here
            phase = "inference"
            infer = ["infer", *words, "--weights", out.weights, "--prompt-file", folder / "prompt.txt"]
            infer += ["--max-new-tokens", NEW_TOKENS, "--temperature", 0, "--json"]
            found = ask(self.stage, infer, with_mpi, self.ranks)
            self.inference = {key: found[key] for key in WRITTEN}
        except DistgptError as error:
            self.failed = anonymised(f"died in {phase}: {error}")
            say(f"{self.stage:<9} {self.failed}")
        finally:
            self.losses = read_losses(out.path)  # of the steps that it took
