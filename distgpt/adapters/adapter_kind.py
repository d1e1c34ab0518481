"""A run that trains adapters beside a model, which it reads from --init and leaves as it is."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from distgpt.adapters.adapter import ADAPTER, base_of, load_frozen, refuse_other_base
from distgpt.adapters.lora import AdaptedModel, adapter_layout
from distgpt.core.base.errors import DataError, UsageError
from distgpt.core.comm.agree import on_root
from distgpt.core.comm.api import Comm
from distgpt.core.config import RunConfig, TrainConfig
from distgpt.core.data.tokenizers import Tokenizer
from distgpt.core.model.memory import Layout
from distgpt.core.model.model import Model
from distgpt.core.ops.api import Kernels
from distgpt.core.saved.modelfile import Base, Description


class AdapterKind:
    """A `ModelKind`: of an `AdaptedModel`."""

    may_move = frozenset({"init"})  # its content is compared: `refuse_origin`

    def build(self, run: RunConfig, kernels: Kernels) -> Model:
        return AdaptedModel(run, kernels)

    def trained(self, run: RunConfig) -> Layout:
        return adapter_layout(run)

    def describe(self, comm: Comm, run: RunConfig, tokenizer: Tokenizer) -> Description:
        """Name the model that the adapters stand beside, too."""
        found = on_root(comm, lambda: asdict(base_of(Path(run.train.init))))
        return Description(run, tokenizer, part=ADAPTER, base=Base(**found))

    def begins_with(self, t: TrainConfig) -> str:
        """Adapters are drawn: --init names the model beside which they stand."""
        return ""

    def load_frozen(self, comm: Comm, model: Model, t: TrainConfig) -> None:
        assert isinstance(model, AdaptedModel)
        load_frozen(comm, model, Path(t.init))

    def use_of_init(self, t: TrainConfig) -> str:
        return f"gets adapters of rank {t.lora_rank}"

    def refuse_origin(self, origin: Description, weights: Path, t: TrainConfig, resumed: bool) -> None:
        """Accept a model that is rounded: adapters may stand beside it."""
        if not resumed:
            origin.refuse_incomplete(weights)
        elif origin.base:
            refuse_other_base(weights, origin, Path(t.init))

    def refuse_moved(self, t: TrainConfig) -> None:
        if not Path(t.init).is_file():
            raise DataError(
                f"{t.init} is not there: --init says where the model of this run's adapters is now"
            )


ADAPTERS = AdapterKind()


def check(t: TrainConfig, ranks: int, on_gpu: bool) -> None:
    """Raise a UsageError about what adapters do not go with."""
    if not t.lora_rank:
        if t.adapter_kind == "lora":
            raise UsageError("adapter_kind lora needs a rank: --lora-rank")
        return
    if not t.init:
        raise UsageError("--lora-rank trains adapters beside a model's weights: name them with --init FILE")
    if t.optimizer != "adamw":
        raise UsageError(f"--lora-rank does not go with --optimizer {t.optimizer}: use adamw")
