"""Kinds of models: what a run is told before it has a model holds for the model that it gets."""

import numpy as np
import pytest
from distgpt.core.base.errors import UsageError
from distgpt.core.comm.api import SerialComm
from distgpt.core.components import components
from distgpt.core.config import RunConfig, TrainConfig
from distgpt.core.ops.kernels import Kernels
from distgpt.core.saved.modelfile import Description, save_model

from models import BASE

KINDS = {"whole": TrainConfig(), "adapters": TrainConfig(lora_rank=2)}


@pytest.mark.parametrize("t", KINDS.values(), ids=KINDS)
def test_a_kind_knows_what_its_model_trains(t, tmp_path):
    file, k, whole = tmp_path / "weights.safetensors", Kernels("float32"), components().model(TrainConfig())
    given = whole.build(RunConfig(BASE), k)
    given.initialise(1)
    save_model(file, given, Description(RunConfig(BASE), None))
    run = RunConfig(BASE).with_values({"lora_rank": t.lora_rank, "init": str(file)})
    kind = components().model(run.train)
    model = kind.build(run, k)
    assert kind.trained(run).offsets == model.layout.offsets
    kind.load_frozen(SerialComm(), model, run.train)
    frozen = model.tensors.keys() - model.params.keys()
    assert bool(frozen) == bool(t.lora_rank) == (not kind.begins_with(run.train))
    for name, values in getattr(model, "frozen", {}).items():
        np.testing.assert_array_equal(values, given.params[name])
    described = kind.describe(SerialComm(), run, None)
    assert described.layout.offsets == model.layout.offsets


def test_only_adapters_stand_beside_a_model_that_is_rounded(tmp_path):
    rounded = Description(RunConfig(BASE), None, rounded="int8")
    components().model(KINDS["adapters"]).refuse_origin(rounded, tmp_path, KINDS["adapters"], resumed=False)
    with pytest.raises(UsageError, match="cannot be trained further"):
        components().model(KINDS["whole"]).refuse_origin(rounded, tmp_path, KINDS["whole"], resumed=False)
