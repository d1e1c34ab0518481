import tracemalloc
from dataclasses import replace
from random import Random

import distgpt
import numpy as np
import pytest
from decoding import EXACT, KINDS, MARKS, SHAPES, build, distance, marked, round_alike, sequences, slots_of
from distgpt.core.base.errors import NonFiniteError
from distgpt.core.config import ModelConfig
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.cpu.matmul.packing import COLUMNS
from distgpt.core.cpu.pool import pool_of
from distgpt.core.generate.engine import Engine, complete
from distgpt.core.generate.engine_setup import slot_bytes, slots_for
from distgpt.core.generate.plain_slots import PlainSlots
from distgpt.core.generate.request import Request, Sampling
from distgpt.core.generate.slots import Choice, Feed
from distgpt.core.model.model import Architecture, Model
from distgpt.core.ops.kernels import Kernels
from distgpt.inference.decoding import compiled
from distgpt.inference.decoding.batched import BatchedSlots, TopKLogits, rounded_rows
from distgpt.inference.decoding.compiled import CompiledSlots, most_rows, packing_of
from distgpt.inference.decoding.loops.weights import PIECE, checksums_of
from hypothesis import given
from hypothesis import strategies as st

import models
from models import plain_logits

COUNT = 5


@pytest.fixture(autouse=True)
def all_threads(monkeypatch):
    monkeypatch.setattr(compiled, "WORTHWHILE", 0)


class Told:
    """Reference slots. A slot has tokens, the first token that each attends to, and the number dropped."""

    def __init__(self, shape, kind):
        exact = build(shape, Kernels("float64"))
        for spec in exact.layout.specs if kind == "int4" else ():  # int8 differs by less than the tolerance
            exact.params[spec.name][:] = round_alike(exact.params[spec.name].astype(np.float32), spec, kind)
        self._config, self._params = exact.config, exact.params
        self._held = {slot: ([], [], 0) for slot in range(COUNT)}

    def length(self, slot):
        tokens, _, gone = self._held[slot]
        return len(tokens) - gone

    def feed(self, work):
        rows = [np.zeros((0, self._config.vocab_size))]
        for slot, start, tokens, wanted, _ in work:
            before, begins, gone = self._held[slot]
            whole = [*before[: gone + start], *tokens]
            begins = [*begins[: gone + start], *[gone] * len(tokens)]
            self._held[slot] = whole, begins, gone
            if wanted:
                rows.append(plain_logits(self._config, self._params, whole, np.array(begins))[-wanted:])
        return np.concatenate(rows)

    def copy(self, source, target, length):
        tokens, begins, gone = self._held[source]
        self._held[target] = tokens[: gone + length], begins[: gone + length], gone

    def drop(self, slot, count, kept):
        tokens, begins, gone = self._held[slot]
        end = gone + count + kept
        self._held[slot] = tokens[:end], begins[:end], gone + count


def some_feeds(random, told, config, single):
    """Make feeds of single tokens, or of prompts and drafts that extend or replace a slot's tokens."""
    work = []
    for slot in random.sample(range(COUNT), random.randint(1, COUNT)):
        have = told.length(slot)
        start = random.choice((have, have, max(0, have - 2), 0))
        size = min(1 if single else random.choice((1, 2, 5, 7, 17, 33, 50)), config.seq_len - start)
        if size:
            tokens = [random.randrange(config.vocab_size) for _ in range(size)]
            work.append(Feed(slot, start, tokens, 1 if single else random.choice((0, 1, size))))
    return work


# Shapes that suffice if the kind of slots matters more than the architecture.
FEW = ("llama", "odd", "wide", "value embeddings", "heads of eleven")
WITH_FEW = {"plain, compiled operations", "batched", "int8"}
CASES = [
    pytest.param(shape, kind, marks=MARKS.get(kind, pytest.mark.ci if kind in WITH_FEW and shape not in FEW else ()))
    for kind in KINDS
    for shape in SHAPES
]


@pytest.mark.parametrize("shape, kind", CASES)
def test_slots_match_formulas_in_any_order(shape, kind):
    random, config = Random(f"{shape}"), SHAPES[shape]
    slots, told = slots_of(shape, kind, COUNT), Told(shape, kind)
    for turn in range(14):
        work = some_feeds(random, told, config, single=turn % 3 > 0)
        found = slots.feed(work)
        expected = told.feed(work)
        assert found.shape == expected.shape
        assert not len(found) or distance(found, expected) < KINDS[kind].tolerance, (turn, work)
        source, target = random.sample(range(COUNT), 2)
        have, kept = told.length(source), random.randint(0, told.length(source))
        name, given = "copy", (source, target, kept)
        if turn % 2 and slots.can_drop and kept:
            name, given = "drop", (source, have - kept, random.randint(1, kept))
        for each in (slots, told):
            getattr(each, name)(*given)
    assert slots.feed([]).shape == (0, config.vocab_size)


@pytest.mark.parametrize("feeds", [
    *([Feed(2, 0, [1], 1)], [Feed(-1, 0, [1], 1)], [Feed(0, 50, [1], 1)], [Feed(0, -1, [1], 1)]),
    *([Feed(0, 0, [1], 2)], [Feed(0, 0, [1], -1)], [Feed(1, 0, [1], 1), Feed(1, 1, [2], 1)]),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("kind", ["batched", "float32"])
def test_invalid_feeds_are_rejected(kind, feeds):
    with pytest.raises(ValueError, match=r"does not fit 2 slots of 50|a slot occurs twice"):
        slots_of("gpt2", kind, 2).feed(feeds)


@pytest.mark.parametrize("token", [-1, 97])
def test_tokens_beyond_vocabulary_are_rejected(token):
    with pytest.raises(ValueError, match=r"tokens.*\b97$"):
        slots_of("llama", "float32", 1).feed([Feed(0, 0, [1, token], 1)])


@pytest.mark.parametrize("kind", ["plain", "batched", "float32"])
def test_invalid_drops_are_rejected(kind):
    slots = slots_of("llama", kind, 2)
    for slot, count, kept in ((2, 1, 1), (-1, 1, 1), (0, -1, 1), (0, 1, -1), (0, 1, 0), (0, 25, 26)):
        with pytest.raises(ValueError, match=f"slot {slot} cannot drop .* and keep {kept}"):
            slots.drop(slot, count, kept)
    learned = slots_of("gpt2", kind, 1)
    assert not learned.can_drop
    with pytest.raises(ValueError, match="cannot drop"):
        learned.drop(0, 1, 1)


class Fetching(Kernels):
    fetched = 0

    def to_host(self, array):
        self.fetched += array.ndim == 1 and len(array) > 64
        return super().to_host(array)


def test_rounded_rows_has_few_sizes():
    assert {rounded_rows(n) for n in range(1, 201)} == {1, 2, 3, 4, 8, 16, 32, 64, 128, 192, 256}
    assert all(n <= rounded_rows(n) < max(2 * n, n + 64) for n in range(1, 999))


def test_batched_slots_fetch_only_top_tokens():
    model = models.build(models.VARIANTS["modern"], Kernels())
    batched, plain = BatchedSlots(model, 5), PlainSlots(model, 5)
    three, one = (Choice(Sampling(), 0.0, count) for count in (3, 1))
    work = [Feed(0, 0, [1], 1, choice=three), Feed(1, 0, [2], 1), Feed(2, 0, [3], 1, choice=one)]
    first, whole, last = batched.feed(work)
    expected = plain.feed(work)  # plain slots ignore the choice
    np.testing.assert_allclose(whole, expected[1], atol=1e-11)
    for row, scores in ((first, expected[0]), (last, expected[2])):
        assert isinstance(row, TopKLogits) and len(row.tokens) == 8
        assert row.tokens.tolist() == np.argsort(-scores, kind="stable")[:8].tolist()
        assert row.log_sum == pytest.approx(np.log(np.exp(scores).sum()), abs=1e-11)


@pytest.mark.parametrize("temperature", [0.05, 0.3, 3.0])
@pytest.mark.parametrize("how", [{}, {"top_p": 0.9}, {"min_p": 0.2}, {"top_p": 0.99, "min_p": 0.001}], ids=str)
def test_tokens_beyond_top_64_use_all_scores(how, temperature):
    config, kernels = replace(models.VARIANTS["modern"], vocab_size=300), Fetching()
    how = how | {"max_new_tokens": 20, "temperature": temperature}
    requests = [Request(prompt=[1 + i, 2], seed=i, logprobs=i, **how) for i in range(4)]
    model = models.build(config, kernels)
    found, expected = (complete(Engine(slots(model, 5)), requests) for slots in (BatchedSlots, PlainSlots))
    for (mine,), (other,) in zip(found, expected, strict=True):
        assert mine.tokens == other.tokens
        for a, b in zip(mine.likelihoods, other.likelihoods, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-9)
            assert [i for i, _ in a.alternatives] == [i for i, _ in b.alternatives]
    if len(how) == 2 or temperature == 0.05:
        assert not kernels.fetched
    elif temperature == 3.0:
        assert kernels.fetched


@pytest.mark.parametrize("how", [{}, {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9}], ids=str)
def test_batched_slots_detect_nonfinite_scores(how):
    model = models.build(models.VARIANTS["modern"], Kernels())
    engine = Engine(BatchedSlots(model, 2))
    engine.submit(Request(prompt=[1, 2], max_new_tokens=5, **how))
    engine.step()
    model.head[-model.config.padded_vocab + 3] = np.inf
    with pytest.raises(NonFiniteError):
        engine.step()


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
