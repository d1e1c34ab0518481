"""The replaceable parts of the program and their defaults.

`distgpt/assembly.py` overrides `Components` with the optional features, and an extension overrides both. Each
method imports its part when it is called, so a run loads only what it uses.

`core/train/interfaces.py` and `core/train/parallel_strategy.py` define the interfaces of a run's parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distgpt.core.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from _typeshed import DataclassInstance

    from distgpt.core.base.errors import Say
    from distgpt.core.comm.affinity import Affinity
    from distgpt.core.comm.api import Comm
    from distgpt.core.comm.job import Job
    from distgpt.core.comm.resources import Grants
    from distgpt.core.config import Setting, TrainConfig
    from distgpt.core.cpu.stages import MakeKernels, StageKind
    from distgpt.core.data.batches import Batches
    from distgpt.core.data.loading import TextKind
    from distgpt.core.data.tokenizers import TokenizerKind
    from distgpt.core.generate.slots import SlotKind
    from distgpt.core.model.model import Model
    from distgpt.core.model.optim import AdamW
    from distgpt.core.ops.activations import Activation
    from distgpt.core.saved.checkpoint import RetentionPolicy
    from distgpt.core.saved.modelfile import Description
    from distgpt.core.saved.rundir import RunDirectory
    from distgpt.core.saved.weights import PartKind, QuantizedFormat
    from distgpt.core.train.assessment import MetricKind, Validation
    from distgpt.core.train.interfaces import Budget, Callback, Disk, ModelKind, StepPolicy, Times
    from distgpt.core.train.parallel_strategy import GradientSync, OptimizerState, Strategy
    from distgpt.core.train.progress import Pace, Progress
    from distgpt.core.train.run import Limits, Run
    from distgpt.core.train.setup import FirstWeights


EXTENDED = "DISTGPT_COMPONENTS=MODULE:CLASS loads an extension that has it"


def unknown(what: str, name: str) -> UsageError:
    return UsageError(f"unknown {what} {name!r}")


class Components:
    """Factories of all parts; these defaults need nothing outside the core."""

    # Parts of the process: threads call these methods, possibly without a run.

    def job(self) -> Job:
        """Return this process's job, with its launcher and batch system."""
        from distgpt.core.comm.job import PLAIN

        return PLAIN

    def affinity(self) -> Affinity:
        """Return the placement of a node's ranks and threads on cores."""
        from distgpt.core.comm.affinity import PLAIN

        return PLAIN

    def grants(self) -> Grants:
        """Return the cores and memory that the batch system grants to this job."""
        from distgpt.core.comm.resources import UNKNOWN

        return UNKNOWN

    def stage(self, name: str) -> StageKind:
        """Return the kind of stage: how to open it and how to resolve --dtype auto."""
        from distgpt.core.cpu.stages import ON_CPU

        if name not in ("serial", "mpi"):
            raise unknown("stage", name)
        return ON_CPU

    def kernels(self, dtype: str) -> MakeKernels:
        """Return a factory of CPU kernels for this dtype."""
        from distgpt.core.cpu.stages import cpu_kernels

        if dtype not in ("float32", "float64", "bfloat16"):
            raise unknown("dtype", dtype)
        return cpu_kernels

    def slots(self, model: Model) -> SlotKind:
        """Return how to decode with this model in its current form."""
        from distgpt.core.generate.plain_slots import PLAIN

        return PLAIN

    # Text and files

    def batches(self, t: TrainConfig) -> type[Batches]:
        """Return the class of a run's batches, which a kind of text may override."""
        from distgpt.core.data.batches import Batches

        return Batches

    def text_kind(self, data: str) -> str:
        """Return the kind of the text that --data names. Only for rank 0: others may not have the path."""
        from distgpt.core.data.textfile import resolve_data

        resolve_data(data)
        return "plain"

    def text(self, kind: str) -> TextKind:
        """Return how to load text of this kind."""
        from distgpt.core.data.loading import PLAIN_TEXT

        if kind != "plain":
            raise unknown("kind of text", kind)
        return PLAIN_TEXT

    # Activations of an extension, keyed by the value of the setting `mlp` (--set mlp=NAME).
    activations: Mapping[str, Activation] = {}

    # Tokenizer names, in the order in which they try a file of unknown format.
    tokenizers: tuple[str, ...] = ("byte",)

    def tokenizer(self, name: str) -> TokenizerKind | None:
        """Return the tokenizer kind with this name, or None if none exists."""
        from distgpt.core.data.tokenizers import BYTES

        return BYTES if name == "byte" else None

    def weights(self, scheme: str, name: str, fetches: bool) -> Path | None:
        """Return the file of the weights SCHEME:NAME, or None if SCHEME is unknown.

        If `fetches` is true, download missing weights; otherwise, reject them.
        """
        return None

    def imported(self, path: Path) -> Path | None:
        """Import a model in another format. Return its weights file, or None if the path has none."""
        return None

    # Dtypes of quantized weights files, as named in their metadata.
    quantized_dtypes: tuple[str, ...] = ()

    def quantized(self, dtype: str) -> QuantizedFormat:
        """Return how weights of this dtype are quantized, stored and loaded."""
        raise unknown("dtype", dtype)

    # Formats of weights files that hold part of a model, such as an adapter.
    parts: tuple[str, ...] = ()

    def part(self, format: str) -> PartKind:
        """Return how to read a weights file of this format."""
        raise unknown("format of a weights file", format)

    # Parts of a run

    def reject_unsuited(self, t: TrainConfig, ranks: int, on_gpu: bool) -> None:
        """Raise a UsageError if the settings are incompatible with each other, the ranks or the stage."""

    def model(self, t: TrainConfig) -> ModelKind:
        """Return how to build, train and describe the model."""
        from distgpt.core.train.interfaces import WHOLE

        return WHOLE

    def first_weights(self, name: str) -> FirstWeights | None:
        """Return how to learn the initial weights from the text, or None for random weights."""
        return None

    def strategy(self, t: TrainConfig, ranks: int) -> Strategy:
        """Return the strategy that ranks use to share a step."""
        from distgpt.core.train.parallel_strategy import Strategy

        return Strategy(t, ranks)

    def gradient_sync(self, comm: Comm, state: OptimizerState, t: TrainConfig, say: Say) -> GradientSync:
        """Return the exchange that sums the gradients over ranks. Collective."""
        from distgpt.core.train.parallel_strategy import allreduce

        return allreduce(comm, state, t, say)

    # Settings of an extension: a dataclass whose fields are declared with `setting` (core/config/setting.py).
    # Their values are in `TrainConfig.extra`, and --set extra.NAME=VALUE sets one.
    extra: type[DataclassInstance] | None = None

    def optimizer(self, t: TrainConfig) -> type[AdamW]:
        """Return the optimizer class."""
        from distgpt.core.model.muon import OPTIMIZERS

        return OPTIMIZERS[t.optimizer]

    def learning_rate(self, t: TrainConfig, step: int, elapsed: float | None = None) -> float:
        """Return the learning rate of a step. `elapsed`: used fraction of the time limit, or None."""
        from distgpt.core.model.optim import learning_rate

        return learning_rate(t, step, elapsed)

    def metric(self, name: str) -> MetricKind:
        """Return the metric that evaluations also measure if the setting `name` gives a file."""
        raise unknown("metric", name)

    def step_policy(self, t: TrainConfig, progress: Progress) -> StepPolicy:
        """Return the policy for which steps may change the weights."""
        from distgpt.core.train.interfaces import StepPolicy

        return StepPolicy(t, progress)

    def budget(
        self, t: TrainConfig, last: int, times: Times, pace: Pace, model: Model, validation: Validation | None
    ) -> Budget:
        """Return the policy for which step is the last; `last` is that step if only steps count."""
        from distgpt.core.train.interfaces import Budget

        return Budget(last)

    def disk(
        self, directory: RunDirectory, t: TrainConfig, model: Model, description: Description, say: Say
    ) -> Disk:
        """Return the writer of weights."""
        from distgpt.core.train.interfaces import Disk

        return Disk()

    def retention(self, t: TrainConfig) -> RetentionPolicy:
        """Return the policy for which checkpoints to delete."""
        from functools import partial

        from distgpt.core.saved.checkpoint import expired_checkpoints

        return partial(expired_checkpoints, t.keep)

    def callbacks(self, run: Run, limits: Limits) -> Sequence[Callback]:
        """Return the callbacks of a run, active from its first to its last step. Collective."""
        return ()

    def environment(self) -> dict[str, object] | None:
        """Return the run summary's information on the machine and its libraries, or None."""
        return None


_installed = Components()


def components() -> Components:
    return _installed


def extra_settings() -> dict[str, Setting]:
    """Return the extension's settings, keyed by their names in --set."""
    from distgpt.core.config import settings_of

    kind = _installed.extra
    return {f"extra.{name}": about for name, about in settings_of(kind).items()} if kind else {}


def install(replacement: Components) -> None:
    """Replace the components of this process. Call this before opening a stage."""
    global _installed
    _installed = replacement
    if replacement.activations:
        from distgpt.core.ops.activations import ACTIVATIONS

        ACTIVATIONS.update(replacement.activations)
