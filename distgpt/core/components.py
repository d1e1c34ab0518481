"""What can be replaced: each seam of the program, with its plain version.

`Components` is the whole list. `distgpt/assembly.py` overrides it with what is installed, and an extension
overrides that. Each method imports its part when it is called, so a run loads only what it uses.

The contracts of a run's objects are in `core/train/seams.py` and `core/train/sharing.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distgpt.core.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from _typeshed import DataclassInstance

    from distgpt.core.base.errors import Say
    from distgpt.core.comm.api import Comm
    from distgpt.core.comm.job import Job
    from distgpt.core.comm.layout import Layout
    from distgpt.core.comm.resources import Grants
    from distgpt.core.config import Setting, TrainConfig
    from distgpt.core.cpu.stages import MakeKernels, StageKind
    from distgpt.core.data.loading import TextKind
    from distgpt.core.data.tokenizers import TokenizerKind
    from distgpt.core.generate.slots import SlotKind
    from distgpt.core.model.model import Model
    from distgpt.core.model.optim import AdamW
    from distgpt.core.ops.activations import Activation
    from distgpt.core.saved.checkpoint import Outdated
    from distgpt.core.saved.modelfile import Description
    from distgpt.core.saved.rundir import RunDirectory
    from distgpt.core.saved.weights import PartKind, RoundedKind
    from distgpt.core.train.assessment import MetricKind, Validation
    from distgpt.core.train.progress import Pace, Progress
    from distgpt.core.train.run import Limits, Run
    from distgpt.core.train.seams import Clock, Disk, Guard, Judge, ModelKind, Times
    from distgpt.core.train.setup import FirstWeights
    from distgpt.core.train.sharing import Exchange, OptimizerState, Strategy


EXTENDED = "DISTGPT_COMPONENTS=MODULE:CLASS names an extension that may have it"


def unknown(what: str, name: str) -> UsageError:
    return UsageError(f"{what} {name!r} is not known here")


class Components:
    """The plain program: it needs nothing outside of the core."""

    # Of the process. Threads call these, and there may be no run.

    def job(self) -> Job:
        """Return the job of this process: its launcher and its batch system."""
        from distgpt.core.comm.job import PLAIN

        return PLAIN

    def layout(self) -> Layout:
        """Return where the ranks of a node and their threads run."""
        from distgpt.core.comm.layout import PLAIN

        return PLAIN

    def grants(self) -> Grants:
        """Return the cores and the memory that a batch system grants to its job."""
        from distgpt.core.comm.resources import UNKNOWN

        return UNKNOWN

    def stage(self, name: str) -> StageKind:
        """Return the stage of this name: how it opens, and how it chooses --dtype auto."""
        from distgpt.core.cpu.stages import ON_CPU

        if name not in ("serial", "mpi"):
            raise unknown("stage", name)
        return ON_CPU

    def kernels(self, dtype: str) -> MakeKernels:
        """Return what makes a CPU stage's kernels of this dtype."""
        from distgpt.core.cpu.stages import cpu_kernels

        if dtype not in ("float32", "float64", "bfloat16"):
            raise unknown("dtype", dtype)
        return cpu_kernels

    def slots(self, model: Model) -> SlotKind:
        """Return how a model decodes, as it is now."""
        from distgpt.core.generate.plain_slots import PLAIN

        return PLAIN

    # Text and files.

    def text_kind(self, path: Path) -> str:
        """Return the kind of the text at this path. For rank 0, which alone may see the path."""
        return "plain"

    def text(self, kind: str) -> TextKind:
        """Return how text of a kind is loaded."""
        from distgpt.core.data.loading import PLAIN_TEXT

        if kind != "plain":
            raise unknown("text of kind", kind)
        return PLAIN_TEXT

    # Activations of an extension, by the values of the setting `mlp`: --set mlp=NAME.
    activations: Mapping[str, Activation] = {}

    # Names of tokenizers, in the order in which they are offered a file of unknown format.
    tokenizers: tuple[str, ...] = ("byte",)

    def tokenizer(self, name: str) -> TokenizerKind | None:
        """Return the kind of tokenizers of this name, or None if there is none."""
        from distgpt.core.data.tokenizers import BYTES

        return BYTES if name == "byte" else None

    def weights(self, scheme: str, name: str, fetches: bool) -> Path | None:
        """Return the file of the weights SCHEME:NAME, fetched if need be; None if SCHEME means nothing.

        Without `fetches`, reject weights that are not on this machine.
        """
        return None

    # By the value in their metadata, the dtypes of quantized weights files.
    quantized_dtypes: tuple[str, ...] = ()

    def quantized(self, dtype: str) -> RoundedKind:
        """Return how weights of this dtype are quantized, stored and loaded."""
        raise unknown("dtype", dtype)

    # Formats of weights files that hold a part of a model.
    parts: tuple[str, ...] = ()

    def part(self, format: str) -> PartKind:
        """Return how a weights file of this format is read."""
        raise unknown("weights file of format", format)

    # Of a run.

    def refuse_unsuited(self, t: TrainConfig, ranks: int, on_gpu: bool) -> None:
        """Raise a UsageError if the settings don't fit together, or don't fit the ranks or the stage."""

    def model(self, t: TrainConfig) -> ModelKind:
        """Return what is built, trained and described."""
        from distgpt.core.train.seams import WHOLE

        return WHOLE

    def first_weights(self, name: str) -> FirstWeights | None:
        """Return what replaces random first weights by ones learned from the text, if anything does."""
        return None

    def strategy(self, t: TrainConfig, ranks: int) -> Strategy:
        """Return how ranks share a step."""
        from distgpt.core.train.sharing import Strategy

        return Strategy(t, ranks)

    def exchange(self, comm: Comm, state: OptimizerState, t: TrainConfig, say: Say) -> Exchange:
        """Return what sums the gradients over ranks. Collective."""
        from distgpt.core.train.sharing import allreduce

        return allreduce(comm, state, t, say)

    # Settings of an extension: a dataclass whose fields `setting` (core/config/setting.py) declares. A run
    # has their values in `TrainConfig.extra`; --set extra.NAME=VALUE sets one.
    extra: type[DataclassInstance] | None = None

    def optimizer(self, t: TrainConfig) -> type[AdamW]:
        """Return what updates the weights."""
        from distgpt.core.model.muon import OPTIMIZERS

        return OPTIMIZERS[t.optimizer]

    def learning_rate(self, t: TrainConfig, step: int, elapsed: float | None = None) -> float:
        """Return the learning rate of a step; `elapsed`: the fraction of the time that is over, if any."""
        from distgpt.core.model.optim import learning_rate

        return learning_rate(t, step, elapsed)

    def metric(self, name: str) -> MetricKind:
        """Return a metric that evaluations measure besides the loss, by the setting that names its file."""
        raise unknown("metric", name)

    def step_policy(self, t: TrainConfig, progress: Progress) -> Judge:
        """Return what decides which steps may change the weights."""
        from distgpt.core.train.seams import Judge

        return Judge(t, progress)

    def budget(
        self, t: TrainConfig, last: int, times: Times, pace: Pace, model: Model, validation: Validation | None
    ) -> Clock:
        """Return what decides which step is the last one; `last` is it if only steps count."""
        from distgpt.core.train.seams import Clock

        return Clock(last)

    def disk(
        self, directory: RunDirectory, t: TrainConfig, model: Model, description: Description, say: Say
    ) -> Disk:
        """Return what writes weights."""
        from distgpt.core.train.seams import Disk

        return Disk()

    def retention(self, t: TrainConfig) -> Outdated:
        """Return what decides which checkpoints are deleted."""
        from functools import partial

        from distgpt.core.saved.checkpoint import beyond

        return partial(beyond, t.keep)

    def callbacks(self, run: Run, limits: Limits) -> Sequence[Guard]:
        """Return what watches a run from its first to its last step. Collective."""
        return ()

    def environment(self) -> dict[str, object] | None:
        """Return what a run's summary has about its machine and its libraries."""
        return None


_installed = Components()


def components() -> Components:
    """Return the components of this process."""
    return _installed


def extra_settings() -> dict[str, Setting]:
    """Return the settings of the extension, by the names that --set takes."""
    from distgpt.core.config import settings_of

    kind = _installed.extra
    return {f"extra.{name}": about for name, about in settings_of(kind).items()} if kind else {}


def install(replacement: Components) -> None:
    """Replace the components of this process. Call it before a stage is opened."""
    global _installed
    _installed = replacement
    if replacement.activations:
        from distgpt.core.ops.activations import ACTIVATIONS

        ACTIVATIONS.update(replacement.activations)
