"""`distgpt bench stages`: run one job in every stage that this machine supports, and compare the losses.

Each stage trains and then generates text, in fresh processes.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from distgpt.cluster.jobs.launchers import Launcher, find_launcher
from distgpt.core.base.checked import parse_object
from distgpt.core.base.errors import (
    DataError,
    DisagreementError,
    DistgptError,
    StorageError,
    UsageError,
    print_lines,
)
from distgpt.core.base.files import atomic_file, read_small, storage_errors, write_json
from distgpt.core.base.interrupts import undisturbed
from distgpt.core.comm.api import SerialComm
from distgpt.core.config import ON_GPU, STAGES, WITH_MPI, RunConfig, did_you_mean
from distgpt.core.config.run_request import asked_for
from distgpt.core.data.batches import refuse_uneven
from distgpt.core.data.loading import DataRequest, load_corpus
from distgpt.core.model.optim import learning_rate
from distgpt.core.saved.modelfile import read_description
from distgpt.core.saved.rundir import RunDirectory
from distgpt.core.train.plan import new_run
from distgpt.measure.doctor.facts import Facts, anonymised, environment
from distgpt.measure.doctor.report import examine, sentence
from distgpt.measure.jobs import ask, read_losses, say, train
from distgpt.recipes.derived import derived
from distgpt.show.page import Block, Column, Table, fitting, tabulated, terminal

FORMAT = "distgpt-comparison"

# Fields taken from a run's summary, and from the output of `distgpt infer`.
TRAINED = (
    *("train_s", "tokens_per_s", "step_s_median", "first_step_s", "peak_memory", "peak_gpu_memory"),
    *("allreduce", "parameters", "train_bits_per_byte"),
)
WRITTEN = ("text", "tokens", "seconds", "tokens_per_s", "peak_memory")

# -- the job

PRESET, SHORT = "gpt-mini", 21  # the course project's model; 21 of its 50 steps
PROMPT_TOKENS, NEW_TOKENS = 256, 30


def find_workload(
    preset: str | None, toml: Path | None, flags: Mapping[str, Any], full: bool, deterministic: bool = False
) -> tuple[str, RunConfig]:
    """Return the job's name and settings. Without `full`, the course project's job is shortened."""
    preset = preset or (PRESET if toml is None else None)
    is_projects = (
        preset == PRESET and toml is None and not flags.keys() & {"steps", "epochs", "train_minutes"}
    )
    if full and not is_projects:
        raise UsageError("--full requires the course project's workload; for others, set --steps")
    request = asked_for({**flags, "deterministic": deterministic}, preset, toml)
    config = new_run(derived(request, 1))
    if is_projects and not full:
        # Take its first steps, with the learning rates that a linear schedule has there.
        config = config.with_values({"steps": SHORT, "min_lr": learning_rate(config.train, SHORT)})
    return request.name, config


def find_prompt(config: RunConfig) -> str:
    """Return the start of the training text, as the prompt."""
    t = config.train
    existing = read_description(Path(t.init)).tokenizer if t.init else None
    request = DataRequest(t.data, t.tokenizer, config.model.seq_len, t.val_fraction, False, existing=existing)
    corpus = load_corpus(SerialComm(), request)
    text = corpus.tokenizer.decode(corpus.train.read(0, min(PROMPT_TOKENS, len(corpus.train))))
    return text.rstrip("\ufffd") or text  # drop a character that the last token cuts


# -- which stages can run


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """Options of the command. If set, `tolerance` replaces the default tolerances."""

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
    """Return the stages that can run here, the missing requirements of the others, and the launcher.

    Raise a UsageError if a stage in `--stages` cannot run.
    """
    names = STAGES if options.stages is None else [word.strip() for word in options.stages.split(",")]
    for name in names:
        if name not in STAGES:
            raise UsageError(f"--stages: unknown stage {name!r}{did_you_mean(name, STAGES)}")
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
        raise UsageError("no stage can run here; run distgpt doctor for the reasons")
    return stages, missing, launcher


# -- the folder of a comparison, in which each stage has a run


def refuse_foreign(folder: Path) -> None:
    """Reject a directory that is neither empty nor from an earlier comparison."""
    with storage_errors("use", folder):
        if not folder.exists() or not any(folder.iterdir()):
            return
    result = folder / "compare.json"
    try:
        is_ours = parse_object(read_small(result), result).get("format") == FORMAT
    except (DataError, StorageError):
        is_ours = False
    if not is_ours:
        raise UsageError(f"--out {folder} is not empty and has no comparison; choose another --out")


# -- running one


@dataclass(slots=True)
class Measured:
    """Time, memory and results of one stage. A loss is None if it is not finite."""

    stage: str
    ranks: int
    dtype: str
    threads: int | None = None
    losses: list[float | None] = field(default_factory=list)
    training: Facts | None = None
    inference: Facts | None = None
    failed: str = ""

    def measure(self, options: CompareOptions, launcher: Launcher | None, folder: Path) -> None:
        """Store each result as soon as it is measured, to keep it if the command is interrupted."""
        out, phase = RunDirectory(folder / self.stage), "training"
        words: list[object] = ["--stage", self.stage, "--dtype", self.dtype]
        if options.threads is not None and self.stage not in ON_GPU:
            words += ["--threads", options.threads]
        with_mpi = launcher if self.stage in WITH_MPI else None
        shutil.rmtree(out.path, ignore_errors=True)
        say(f"{self.stage:<9} {phase} …")
        try:
            result = train(self.stage, options.run, out.path, words, with_mpi, self.ranks)
            self.training = {key: result[key] for key in TRAINED}
            self.threads = result["threads"] or None
            shutil.rmtree(out.checkpoints, ignore_errors=True)  # no run resumes from here
            phase = "inference"
            infer = ["infer", *words, "--weights", out.weights, "--prompt-file", folder / "prompt.txt"]
            infer += ["--max-new-tokens", NEW_TOKENS, "--temperature", 0, "--json"]
            result = ask(self.stage, infer, with_mpi, self.ranks)
            self.inference = {key: result[key] for key in WRITTEN}
        except DistgptError as error:
            self.failed = anonymised(f"died in {phase}: {error}")
            say(f"{self.stage:<9} {self.failed}")
        finally:
            self.losses = read_losses(out.path)  # losses of the steps taken


VERSION = 1
RUNNING, DONE, INTERRUPTED = "running", "done", "interrupted"
UNFINISHED = "Interrupted: only the measurements before the interruption are included."


# How far losses may differ

# The tolerances come from measurements: the largest relative difference between any step's loss and that of
# `serial` that rounding caused. The models were `gpt-mini` for 50 steps (1, 2 and 4 ranks), and 3 layers, 96
# wide, on 24 × 64 tokens (1 to 4 ranks), with 1 and 2 threads. The difference was 1.4e-15 in float64 and
# 5.9e-7 in float32 (Muon: 3.2e-14, and 1.6e-6 over 8 steps). The tolerances are at least 100 times larger,
# for other libraries and models. bfloat16 has 8 bits of precision; its tolerance is the one that the tests of
# the GPU kernels use for whole models.
#
# Training is chaotic: rounding differences grow like any other small change. `tiny` at its learning rate of
# 2e-3 differed by 3e-7 after 100 steps, 2e-3 after 150 and 4e-2 after 2,000. So only as many steps are judged
# as were measured. For later steps, the largest difference is reported; it is judged only if the user sets a
# tolerance. Muon scales all directions of an update equally, including directions in which a gradient is only
# rounding error. In float32 `tiny` differed by 2e-6 after 8 steps and 4e-4 after 16 (1, 2 and 4 ranks), so 8
# steps are judged. In float64 it differed by 3e-14 after 50.
JUDGED, JUDGED_OF_MUON = 50, 8  # steps; the second for Muon in float32
TOLERANCES = {"float64": 1e-12, "float32": 6e-5, "bfloat16": 3e-2}


def judged_steps(optimizer: str, dtype: str) -> int:
    """Return the number of steps within which a difference cannot be grown rounding."""
    return JUDGED_OF_MUON if (optimizer, dtype) == ("muon", "float32") else JUDGED


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference between one stage and the reference. Steps count from 1. None: an infinite difference."""

    stage: str
    reference: str
    tolerance: float
    steps: int  # steps that both stages took
    judged: int  # the number of these that are judged
    largest: float | None  # largest difference of the judged steps
    step: int  # step of the largest difference
    largest_later: float | None  # largest difference after the judged steps
    first: int | None  # first step whose difference exceeds the tolerance
    at_first: float | None
    agrees: bool

    def sentence(self) -> str:
        if self.at_first is None:
            return f"stage {self.stage}: the loss of step {self.first} is not finite"
        return (
            f"stage {self.stage}: the loss of step {self.first} differs from {self.reference}'s by"
            f" {self.at_first:.2g}, more than the tolerance of {self.tolerance:.2g}"
        )


def differences(
    stages: Sequence[Measured], allowed: float | None, optimizer: str = "adamw"
) -> list[Difference]:
    """Compare the losses of all stages with the first stage that has the most steps.

    `allowed` replaces the tolerances.
    """
    with_losses = [stage for stage in stages if stage.losses]
    reference = max(with_losses, key=lambda stage: len(stage.losses), default=None)
    if reference is None:
        return []
    others = (stage for stage in with_losses if stage is not reference)
    return [_difference(stage, reference, allowed, optimizer) for stage in others]


def _difference(stage: Measured, reference: Measured, allowed: float | None, optimizer: str) -> Difference:
    limit = max(TOLERANCES[stage.dtype], TOLERANCES[reference.dtype]) if allowed is None else allowed
    result = [relative(a, b) for a, b in zip(stage.losses, reference.losses, strict=False)]
    judged = result[: judged_steps(optimizer, reference.dtype)] if allowed is None else result
    largest = max(judged)
    wrong = (i for i, value in enumerate(result) if value == math.inf or (i < len(judged) and value > limit))
    first = next(wrong, None)
    return Difference(
        stage=stage.stage,
        reference=reference.stage,
        tolerance=limit,
        steps=len(result),
        judged=len(judged),
        largest=_known(largest),
        step=result.index(largest) + 1,
        largest_later=_known(max(result[len(judged) :], default=math.inf)),
        first=None if first is None else first + 1,
        at_first=None if first is None else _known(result[first]),
        agrees=first is None,
    )


def relative(loss: float | None, reference: float | None) -> float:
    """Return the relative difference, or infinity if a loss is not finite."""
    if loss is None or reference is None or not (math.isfinite(loss) and math.isfinite(reference)):
        return math.inf
    return abs(loss - reference) / abs(reference) if reference else (math.inf if loss else 0.0)


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


# The whole command


def compare(options: CompareOptions, out: Path, as_json: bool) -> None:
    """Run the whole command. Raise a DisagreementError if stages disagree."""
    run = options.run
    refuse_foreign(out)
    stages, missing, launcher = find_runnable(options)
    for stage, troubles in missing.items():
        say(f"{stage:<9} cannot run here: {'; '.join(map(sentence, troubles))}")
    if set(stages) & set(WITH_MPI):
        refuse_uneven(run.train.batch_size, options.ranks, run.train.grad_accum or 1)
    comparison = Comparison(options, missing, find_prompt(run), environment())
    with storage_errors("use", out):
        out.mkdir(parents=True, exist_ok=True)
    with atomic_file(out / "prompt.txt") as file:
        file.write(comparison.prompt.encode())
    comparison.save(out)
    try:
        for stage in stages:
            ranks = options.ranks if stage in WITH_MPI else 1
            comparison.measured.append(Measured(stage, ranks, options.dtype_of(stage)))
            comparison.measured[-1].measure(options, launcher, out)
            comparison.save(out)
        comparison.state = DONE
    except BaseException as error:
        comparison.state = INTERRUPTED
        if isinstance(error, KeyboardInterrupt):
            error.add_note(f"the measurements are in {out}")
        raise
    finally:
        with undisturbed():
            comparison.save(out)
        blocks: list[Block] = [comparison.workload(), _table(comparison), comparison.verdict()]
        print_lines(json.dumps(comparison.as_json(), indent=1) if as_json else terminal(blocks))
        print_lines(f"\nresult  {out / 'compare.json'}", err=as_json)
    if comparison.problems:
        raise DisagreementError("; ".join(comparison.problems))


@dataclass(slots=True)
class Comparison:
    """Results of a comparison, complete or not."""

    options: CompareOptions
    missing: dict[str, list[Facts]]  # missing requirements, by stage
    prompt: str
    environment: dict[str, Any]
    measured: list[Measured] = field(default_factory=list)
    state: str = RUNNING

    @property
    def differences(self) -> list[Difference]:
        return differences(self.measured, self.options.tolerance, self.options.run.train.optimizer)

    @property
    def problems(self) -> list[str]:
        died = [f"stage {stage.stage} {stage.failed}" for stage in self.measured if stage.failed]
        return [difference.sentence() for difference in self.differences if not difference.agrees] + died

    @property
    def passed(self) -> bool | None:
        """Whether all stages agree, or None if only one ran."""
        if self.problems or self.state != DONE:
            return False
        return True if self.differences else None

    def verdict(self) -> str:
        unfinished = UNFINISHED if self.state == INTERRUPTED else ""
        if self.problems or unfinished:
            return ". ".join(filter(None, ["; ".join(self.problems), unfinished]))
        result = self.differences
        if not result:
            only = self.measured[0].stage if self.measured else "no stage"
            return f"Only {only} ran, so there is nothing to compare it with."
        farthest = max(result, key=lambda difference: difference.largest or 0.0)
        largest = farthest.largest or 0.0
        every = "Both" if len(self.measured) == 2 else f"All {len(self.measured)}"
        differs = f"by more than {largest:.1e} (tolerance {farthest.tolerance:.0e})"
        same = (
            f"{every} stages compute the same: no loss of the first {farthest.judged} steps differs from"
            f" {farthest.reference}'s {differs if largest else 'in a single bit'}."
        )
        later = max(each.largest_later or 0.0 for each in result)
        return f"{same} Later ones differ by up to {later:.1e}." if later else same

    def workload(self) -> str:
        t, tokens = self.options.run.train, self.options.run.model.seq_len
        return f"{self.options.name}: {t.steps} steps of {t.batch_size} × {tokens} tokens"

    def as_json(self) -> dict[str, Any]:
        """Return everything, for compare.json and --json, without directories and host names."""
        run = self.options.run
        return {
            "format": FORMAT,
            "version": VERSION,
            "state": self.state,
            "passed": self.passed,
            "verdict": self.verdict(),
            "environment": self.environment,
            "workload": {
                "name": self.options.name,
                "sentence": self.workload(),
                "prompt": self.prompt,
                "settings": {
                    name: anonymised(value) if isinstance(value, str) else value
                    for name, value in (asdict(run.model) | asdict(run.train)).items()
                },
            },
            "cannot_run": self.missing,
            "stages": [asdict(stage) for stage in self.measured],
            "differences": [asdict(each) for each in self.differences],
        }

    def save(self, out: Path) -> None:
        write_json(out / "compare.json", self.as_json())


COLUMNS: tuple[Column, ...] = (
    *((key, key, str) for key in ("stage", "ranks", "threads")),
    ("train s", "train_s", "{:,.2f}".format),
    ("first s", "first_step_s", "{:,.2f}".format),
    ("× serial", "training_up", "{:.2f}".format),
    ("infer s", "infer_s", "{:,.2f}".format),
    ("tokens/s", "tokens_per_s", "{:,.0f}".format),
    ("MB", "peak_memory", lambda ranks: f"{sum(ranks) / 1e6:,.0f}"),
    ("loss", "loss", str),
    ("bits", "train_bits_per_byte", "{:.4f}".format),
    ("differs", "differs", str),
)
SPARE = ("threads", "infer_s", "peak_memory", "train_bits_per_byte")  # omitted on a narrow terminal
NOTE = (
    "Train s is the time of all steps, first s of the first one, which may compile. Tokens/s is the speed of"
    " the median step; × serial is its ratio to serial, which uses all its threads too. Differs is the"
    " largest relative difference of a judged loss."
)
WIDE_NOTE = " MB is the peak memory of all ranks in training; bits are per byte."


def _table(comparison: Comparison) -> Table:
    result = {each.stage: each for each in comparison.differences}
    serial = [each.training["tokens_per_s"] for each in comparison.measured[:1] if each.training]
    rows: list[dict[str, Any]] = []
    for stage in comparison.measured:
        row: dict[str, Any] = {"stage": stage.stage, "ranks": stage.ranks, "threads": stage.threads or None}
        row |= stage.training or {}
        row |= {"infer_s": stage.inference["seconds"]} if stage.inference else {}
        if stage.training and serial and comparison.measured[0].stage == "serial":
            row["training_up"] = stage.training["tokens_per_s"] / serial[0]
        row["loss"] = _number(stage.losses[-1], ".4f") if stage.losses else None
        row["differs"] = _number(result[stage.stage].largest, ".2e") if stage.stage in result else None
        rows.append(row)
    columns = fitting(COLUMNS, SPARE)
    note = NOTE + WIDE_NOTE * (len(columns) == len(COLUMNS))
    return tabulated(columns, rows, "Measured here", note, "–")


def _number(value: float | None, digits: str) -> str:
    return "not finite" if value is None else format(value, digits)
