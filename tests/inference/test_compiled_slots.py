import tracemalloc
from dataclasses import replace

import distgpt
import numpy as np
import pytest
from decoding import EXACT, KINDS, build, marked, sequences, slots_of
from distgpt.core.config import ModelConfig
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.cpu.matmul.packing import COLUMNS
from distgpt.core.cpu.pool import pool_of
from distgpt.core.generate.engine_setup import slot_bytes, slots_for
from distgpt.core.generate.slots import Feed
from distgpt.core.model.model import Architecture, Model
from distgpt.inference.decoding import compiled
from distgpt.inference.decoding.compiled import CompiledSlots, most_rows, packing_of
from distgpt.inference.decoding.loops.weights import PIECE, checksums_of
from hypothesis import given
from hypothesis import strategies as st
from test_slots import all_threads  # noqa: F401

CONFIG = ModelConfig(vocab_size=13, seq_len=9, n_layer=2, n_head=2, n_embd=16, init_std=0.3)


@pytest.mark.parametrize("shape, kind", [
    *(("llama", "float32"), ("odd", "float32"), ("odd", "int8"), ("short", "float32")),
    pytest.param("odd", "int4", marks=pytest.mark.ci),
])  # fmt: skip
def test_slot_scores_do_not_depend_on_split(shape, kind):
    texts, found = sequences(shape), []
    for threads in (1, 2, 3):
        lanes = slots_of(shape, kind, len(texts), threads)
        whole = lanes.feed([Feed(i, 0, text, len(text)) for i, text in enumerate(texts)])
        alone = [lanes.feed([Feed(0, 0, text, len(text))]) for text in texts]
        steps = [lanes.feed([Feed(1, at, [token], 1)]) for text in texts for at, token in enumerate(text)]
        found += [whole, np.concatenate(alone), np.concatenate(steps)]
    assert len({scores.tobytes() for scores in found}) == 1


def test_large_feeds_are_split(monkeypatch):
    texts = sequences("llama")
    work = [Feed(i, 0, text, min(3, len(text))) for i, text in enumerate(texts)]
    at_once = slots_of("llama", "float32", len(texts)).feed(work)
    config = build("llama", CpuKernels("float32", 1)).config
    assert most_rows(config, 3) == config.seq_len
    for name, value, rows in (("ROWS", 7, 7), ("ROOM", 9 * 4 * (48 + 144 + 48 + 2 * config.hidden), 9), ("ROOM", 1, 5)):
        with monkeypatch.context() as patched:
            patched.setattr(compiled, name, value)
            assert most_rows(config, len(texts)) == rows  # at least one for each slot
            np.testing.assert_array_equal(slots_of("llama", "float32", len(texts)).feed(work), at_once)


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_compiled_slots_match_slot_bytes(kind):
    model = build("odd", KINDS[kind].kernels(1))
    slots = slots_for(model, 3)
    assert isinstance(slots, CompiledSlots) and sum(array.nbytes for array in slots.cache) == 3 * slot_bytes(model)


def test_plain_slots_match_slot_bytes():
    model = Model(Architecture(replace(CONFIG, seq_len=200, vocab_size=3000)), CpuKernels("float64", 1))
    model.initialise(1)
    tracemalloc.start()
    slots, taken = slots_for(model, 3), []
    for count in (1, 3):
        slots.feed([Feed(i, 0, [1], 1) for i in range(count)])
        taken.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert taken[1] - taken[0] == pytest.approx(2 * slot_bytes(model), rel=0.05)


def test_shifted_keys_are_rounded_once():
    """A shifted int8 cache holds the bfloat16 keys nearest to the rotated old ones."""
    slots = slots_of("llama", "int8", 1)
    slots.feed([Feed(0, 0, sequences("llama")[4][:30], 0)])

    def keys():
        """Return float32 keys, (layers, heads, T, head)."""
        found = slots.cache.keys[:, 0]
        shape = *found.shape[:2], -1, 12, COLUMNS, 2
        pairs = (found.astype(np.uint32) << 16).view(np.float32).reshape(shape)
        return pairs.transpose(0, 1, 2, 4, 3, 5).reshape(*found.shape[:2], -1, 24)

    old, weights = keys()[:, :, 11:30], packing_of(build("llama", KINDS["int8"].kernels(1))).weights
    slots.drop(0, 11, 19)
    cos, sin = (table[11].astype(np.float64) for table in (weights.cos, weights.sin))
    left, right = np.split(old.astype(np.float64), 2, axis=-1)
    wanted = np.concatenate((left * cos + right * sin, right * cos - left * sin), axis=-1)
    assert (np.abs(keys()[:, :, :19] - wanted) <= 2.0**-8 * np.abs(wanted) * (1 + 1e-3) + 1e-7).all()


@given(
    st.sampled_from([1, 31, 32, 33, 256, 300, 1000, PIECE, PIECE + 1]),  # PIECE is compiled into cached loops
    *[st.integers(0, 1 << 62)] * 2,
    st.integers(0, 63),
    st.sampled_from(["one bit", "the same bit of two", "exchanged"]),
)
def test_checksums_detect_changed_words(size, one, other, bit, change):
    words = np.random.default_rng(size).integers(0, 1 << 63, size).astype(np.uint64)
    before, changed = checksums_of(words, pool_of(1)), words.copy()
    np.testing.assert_array_equal(checksums_of(words, pool_of(3)), before)
    one, other = one % size, (one + (1, 32, other)[other % 3]) % size
    if change == "exchanged":
        changed[[one, other]] = words[[other, one]]
    else:
        changed[[one, other] if change != "one bit" else [one]] ^= np.uint64(1 << bit)
    assert np.array_equal(checksums_of(changed, pool_of(2)), before) == np.array_equal(changed, words)


@pytest.mark.parametrize("kind", marked(*EXACT))
def test_packing_is_cached_until_weights_change(kind):
    kernels = KINDS[kind].kernels(2)
    model = build("llama", kernels)
    first = packing_of(model)
    assert packing_of(model) is first
    if kind in ("int8", "int4"):
        return
    kernels.put(model.params["blocks.1.norm1.w"], np.full(48, 1.5))
    second = packing_of(model)
    assert second is not first and packing_of(model) is second
    other = build("llama", kernels)
    kernels.put(other.params["blocks.1.norm1.w"], np.full(48, 1.5))
    scores = [CompiledSlots(each, 1).feed([Feed(0, 0, [1, 2, 3], 3)]) for each in (model, other)]
    np.testing.assert_array_equal(*scores)
    model.make_gradients()
    assert model.packing is None


def test_generation_follows_changed_weights(tmp_path):
    model = distgpt.init(CONFIG, seed=1)

    def told():
        model.save(tmp_path / "weights")
        return [each.generate([1, 2], 7, logprobs=1) for each in (model, distgpt.load(tmp_path / "weights"))]

    first, loaded = told()
    assert first == model.generate([1, 2], 7, logprobs=1) == loaded
    for name, values in model.parameters().items():
        values *= 1.5 if name.endswith(".w") else 1.0
    second, loaded = told()
    assert second == loaded
    for name, values in distgpt.init(CONFIG, seed=2).parameters().items():
        model.parameters()[name][...] = values
    third, loaded = told()
    assert third == loaded == distgpt.init(CONFIG, seed=2).generate([1, 2], 7, logprobs=1)
    for name, gradient in model.gradients([[1, 2, 3]], [[2, 3, 4]]).items():
        model.parameters()[name][...] -= 0.5 * gradient
    fourth, loaded = told()
    assert fourth.tokens == loaded.tokens
    assert len({tuple(text.tokens) for text in (first, second, third, fourth)}) == 4
