"""Short sequences through all layers in one call: the loss of single ones, of any architecture."""

from dataclasses import replace

import numpy as np
import pytest
import short_sequences as short
from attention_short import SHORT
from models import VARIANTS, build, one_by_one
from short_sequences import ShortLoss, short_sequences

from distgpt.core.cpu.kernels import Bfloat16Kernels, CpuKernels
from distgpt.core.cpu.matmul.packing import LANES
from distgpt.core.model.model import Architecture, Model
from distgpt.core.ops.kernels import Kernels
from distgpt.inference.quantized.kernels import Int8Kernels

CLOSE = 1e-5  # relative


def wide(config, **changes):
    """Heads as wide as a vector, and a context in which some sequences are too long for a lane."""
    size = {"n_embd": 2 * LANES, "n_head": 2, "seq_len": SHORT + 4, "vocab_size": 37, "mlp_width": 0}
    return replace(config, **size | changes)


def drawn(config, lengths):
    rng = np.random.default_rng(3)
    return [rng.integers(0, config.vocab_size, length) for length in lengths]


def loud(config, kernels):
    """With weights so large that everything in front of the head counts."""
    model = build(config, kernels)
    for spec in model.layout.specs:
        if spec.is_matrix:
            values = np.random.default_rng(spec.size).standard_normal(spec.shape)
            model.kernels.put(model.params[spec.name], values * 0.3)
    return model


@pytest.mark.slow  # compiles a walk of its own, which no command uses
def test_any_architecture_and_any_lengths():
    for threads, kind, changes in (
        (1, "gpt2", {}),
        (2, "one head, one layer", {"n_layer": 1, "n_head": 1}),
        (1, "microgpt", {}),
        (2, "modern", {"n_kv_head": 1}),
    ):
        config = wide(VARIANTS[kind], **changes)
        reference = loud(config, Kernels("float64"))
        model = loud(config, CpuKernels("float32", threads))
        assert short_sequences(model) is not None, kind
        mean_loss = ShortLoss(model, 60)
        lengths = [*range(2, config.seq_len + 2), *[5] * (short.BLOCK + 3), *[8] * LANES]
        for some in (lengths, lengths[::-1], [2], [SHORT + 1], [SHORT + 2], [9] * 3):
            sequences = drawn(config, some)
            found = mean_loss(sequences)
            assert found == pytest.approx(one_by_one(reference, sequences), rel=CLOSE), (kind, some)


def test_who_has_no_such_call():
    config = wide(VARIANTS["gpt2"])
    for other, kernels in (
        (config, CpuKernels("float64")),
        (config, Bfloat16Kernels()),
        (config, Int8Kernels()),
        (config, Kernels("float32")),
        (replace(config, n_head=LANES), CpuKernels("float32")),  # heads of two channels
        (replace(config, vocab_size=short.MOST_BYTES // (4 * config.n_embd) + 1), CpuKernels("float32")),
        (wide(config, n_embd=32 * LANES, n_head=32), CpuKernels("float32")),
    ):
        assert short_sequences(Model(Architecture(other), kernels)) is None
