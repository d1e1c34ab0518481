from dataclasses import replace
from random import Random

import numpy as np
import pytest
from decoding import KINDS, MARKS, SHAPES, build, distance, round_alike, slots_of
from distgpt.core.base.errors import NonFiniteError
from distgpt.core.generate.engine import Engine, complete
from distgpt.core.generate.plain_slots import PlainSlots
from distgpt.core.generate.request import Request, Sampling
from distgpt.core.generate.slots import Choice, Feed
from distgpt.core.ops.kernels import Kernels
from distgpt.inference.decoding import compiled
from distgpt.inference.decoding.batched import BatchedSlots, TopKLogits, rounded_rows

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
