"""The contract of slots, of every kind: any calls in any order give the scores that the formulas give."""

from random import Random

import numpy as np
import pytest
from decoding import KINDS, MARKS, SHAPES, build, distance, round_alike, slots_of
from distgpt.core.generate.slots import Feed
from distgpt.core.ops.kernels import Kernels
from distgpt.inference.decoding import compiled

from models import plain_logits

COUNT = 5


@pytest.fixture(autouse=True)
def all_threads(monkeypatch):
    monkeypatch.setattr(compiled, "WORTHWHILE", 0)


class Told:
    """What slots were told: of each slot its tokens, the first one that each of them sees, and how many are gone."""

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
        """The scores of the wanted tokens, by the formulas from all that a slot was told."""
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
    """Single tokens of several slots, or prompts and drafts behind what slots hold, or in place of it."""
    work = []
    for slot in random.sample(range(COUNT), random.randint(1, COUNT)):
        have = told.length(slot)
        start = random.choice((have, have, max(0, have - 2), 0))
        size = min(1 if single else random.choice((1, 2, 5, 7, 17, 33, 50)), config.seq_len - start)
        if size:
            tokens = [random.randrange(config.vocab_size) for _ in range(size)]
            work.append(Feed(slot, start, tokens, 1 if single else random.choice((0, 1, size))))
    return work


# Shapes for what depends on the type of weights, or on who computes, more than on the architecture.
FEW = ("llama", "odd", "wide", "value embeddings", "heads of eleven")
WITH_FEW = {"plain, compiled operations", "batched", "int8"}
CASES = [
    pytest.param(shape, kind, marks=MARKS.get(kind, pytest.mark.ci if kind in WITH_FEW and shape not in FEW else ()))
    for kind in KINDS
    for shape in SHAPES
]


@pytest.mark.parametrize("shape, kind", CASES)
def test_any_calls_give_the_scores_of_the_formulas(shape, kind):
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


@pytest.mark.parametrize(
    "feeds",
    [
        *([Feed(2, 0, [1], 1)], [Feed(-1, 0, [1], 1)], [Feed(0, 50, [1], 1)], [Feed(0, -1, [1], 1)]),
        *([Feed(0, 0, [1], 2)], [Feed(0, 0, [1], -1)], [Feed(1, 0, [1], 1), Feed(1, 1, [2], 1)]),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["batched", "float32"])
def test_feeds_that_do_not_fit_are_refused(kind, feeds):
    with pytest.raises(ValueError, match=r"does not fit 2 slots of 50|a slot occurs twice"):
        slots_of("gpt2", kind, 2).feed(feeds)


@pytest.mark.parametrize("token", [-1, 97])
def test_compiled_slots_refuse_tokens_beyond_the_vocabulary(token):
    with pytest.raises(ValueError, match=r"tokens.*\b97$"):
        slots_of("llama", "float32", 1).feed([Feed(0, 0, [1, token], 1)])


@pytest.mark.parametrize("kind", ["plain", "batched", "float32"])
def test_drops_that_do_not_fit_or_cannot_be_are_refused(kind):
    slots = slots_of("llama", kind, 2)
    for slot, count, kept in ((2, 1, 1), (-1, 1, 1), (0, -1, 1), (0, 1, -1), (0, 1, 0), (0, 25, 26)):
        with pytest.raises(ValueError, match=f"slot {slot} cannot drop .* and keep {kept}"):
            slots.drop(slot, count, kept)
    learned = slots_of("gpt2", kind, 1)
    assert not learned.can_drop
    with pytest.raises(ValueError, match="cannot drop"):
        learned.drop(0, 1, 1)
