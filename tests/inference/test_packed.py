"""Packed weights are kept from call to call, and never answer for others."""

import distgpt
import numpy as np
import pytest
from distgpt.core.config import ModelConfig
from distgpt.core.cpu.pool import pool_of
from distgpt.core.generate.slots import Feed
from distgpt.inference.decoding.compiled import CompiledSlots, packing_of
from distgpt.inference.decoding.loops.weights import PIECE, checksums_of
from test_compiled_lanes import KINDS, TYPES, build

CONFIG = ModelConfig(vocab_size=13, seq_len=9, n_layer=2, n_head=2, n_embd=16, init_std=0.3)


def test_checksums_differ_once_any_word_does():
    """Changed, exchanged, or with another sign: in whole pieces or not, by any number of threads."""
    random = np.random.default_rng(0)
    for size in (1, 31, 32, 33, 256, 300, 1000, PIECE, PIECE + 1):  # which loops that are on disk hold
        words = random.integers(0, 1 << 63, size).astype(np.uint64)
        before = checksums_of(words, pool_of(1))
        np.testing.assert_array_equal(checksums_of(words, pool_of(3)), before)
        for i in {0, size // 2, size - 1}:
            for bit in (0, 31, 32, 63):
                for others in ([i], [i, (i + 32) % size], [i, (i + 1) % size]):
                    changed = words.copy()
                    changed[others] ^= np.uint64(1 << bit)
                    assert not np.array_equal(checksums_of(changed, pool_of(2)), before), (size, i, bit)
            other = (i + 32) % size
            changed = words.copy()
            changed[[i, other]] = words[[other, i]]
            assert (i == other) == np.array_equal(checksums_of(changed, pool_of(2)), before)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_packed_once_until_they_change(kind):
    kernels = TYPES[kind](2)
    model = build("llama", kernels)
    first = packing_of(model)
    assert packing_of(model) is first
    if kind not in ("int8", "int4"):
        kernels.put(model.params["blocks.1.norm1.w"], np.full(48, 1.5))
        second = packing_of(model)
        assert second is not first and packing_of(model) is second
        other = build("llama", kernels)
        kernels.put(other.params["blocks.1.norm1.w"], np.full(48, 1.5))
        scores = [CompiledSlots(each, 1).feed([Feed(0, 0, [1, 2, 3], 3)]) for each in (model, other)]
        np.testing.assert_array_equal(*scores)


def test_what_is_generated_follows_the_weights_whoever_writes_them(tmp_path):
    """By hand, by training, and over others, always as a model would that never had any others."""
    model = distgpt.init(CONFIG, seed=1)

    def fresh():
        model.save(tmp_path / "weights")
        return distgpt.load(tmp_path / "weights").generate([1, 2], 7, logprobs=1)

    texts = [model.generate([1, 2], 7, logprobs=1)]
    assert texts[0] == model.generate([1, 2], 7, logprobs=1) == fresh()
    for name, values in model.parameters().items():
        values *= 1.5 if name.endswith(".w") else 1.0
    texts.append(model.generate([1, 2], 7, logprobs=1))
    assert texts[-1] == fresh()
    model._model.initialise(2)
    texts.append(model.generate([1, 2], 7, logprobs=1))
    assert texts[-1] == fresh() == distgpt.init(CONFIG, seed=2).generate([1, 2], 7, logprobs=1)
    for name, gradient in model.gradients([[1, 2, 3]], [[2, 3, 4]]).items():
        model.parameters()[name][...] -= 0.5 * gradient
    assert model._model.packing is None
    texts.append(model.generate([1, 2], 7, logprobs=1))
    assert texts[-1].tokens == fresh().tokens
    assert len({tuple(text.tokens) for text in texts}) == 4
