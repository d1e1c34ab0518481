"""The kinds of models that a run trains: how one is built, filled and described. Here the plain one."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from distgpt.core.base.tables import Table
from distgpt.core.comm.api import Comm
from distgpt.core.config import RunConfig, TrainConfig
from distgpt.core.data.tokenizers import Tokenizer
from distgpt.core.model.memory import Layout
from distgpt.core.model.model import Architecture, Model
from distgpt.core.ops.api import Kernels
from distgpt.core.saved.modelfile import Description


class ModelKind(Protocol):
    """Answers what a run asks about its model before it has one. All ranks take the same kind."""

    changeable: frozenset[str]  # settings that may change when such a run resumes, beside the usual ones

    def build(self, run: RunConfig, kernels: Kernels) -> Model:
        """Return the model, whose weights are not filled yet."""

    def trained(self, run: RunConfig) -> Layout:
        """Return the layout of what is trained: gradients, moments and checkpoints have it."""

    def describe(self, comm: Comm, run: RunConfig, tokenizer: Tokenizer) -> Description:
        """Return what the files of a run say of it. Collective."""

    def training(self, t: TrainConfig) -> str:
        """Say what a run does to the model of `t.init`, for people."""

    def begins_with(self, t: TrainConfig) -> str:
        """Return the file whose weights are trained further; "": first weights are drawn."""

    def load_frozen(self, comm: Comm, model: Model, t: TrainConfig) -> None:
        """Load the weights that are read and not trained. Collective."""

    def refuse_origin(self, origin: Description, weights: Path, t: TrainConfig, resumed: bool) -> None:
        """Refuse weights that a run of this kind cannot begin with; `resumed`: from a checkpoint."""

    def refuse_moved(self, t: TrainConfig) -> None:
        """Refuse to resume where a file that the run needs is gone."""


class WholeModel:
    """A model all of whose weights are trained."""

    changeable: frozenset[str] = frozenset()

    def build(self, run: RunConfig, kernels: Kernels) -> Model:
        return Model(Architecture(run.model), kernels)

    def trained(self, run: RunConfig) -> Layout:
        return Architecture(run.model).layout

    def describe(self, comm: Comm, run: RunConfig, tokenizer: Tokenizer) -> Description:
        return Description(run, tokenizer)

    def training(self, t: TrainConfig) -> str:
        return "is trained further"

    def begins_with(self, t: TrainConfig) -> str:
        return t.init

    def load_frozen(self, comm: Comm, model: Model, t: TrainConfig) -> None:
        """Nothing is frozen."""

    def refuse_origin(self, origin: Description, weights: Path, t: TrainConfig, resumed: bool) -> None:
        origin.refuse_training(t)
        if not resumed:
            origin.refuse_incomplete(weights)

    def refuse_moved(self, t: TrainConfig) -> None:
        """Its own checkpoint is all that it needs."""


MODEL_KINDS: Table[ModelKind] = Table("models", "kind of model", {"whole": WholeModel()})


def kind_of(t: TrainConfig) -> ModelKind:
    """Return the kind of model that these settings train."""
    return MODEL_KINDS[t.model_kind]
