from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from decoding import EXACT, LETTERS, Watched, marked, model, slots_of, varied_requests
from distgpt.core.base.errors import UsageError
from distgpt.core.data.tokenizers import ByteTokenizer
from distgpt.core.generate.engine import Engine, complete
from distgpt.core.generate.plain_slots import PlainSlots
from distgpt.core.generate.request import Request
from distgpt.core.generate.sample import Transcript
from distgpt.core.generate.sampling import choose, likelihood, uniform
from distgpt.corpora.tokenizers.collected import CharTokenizer
from distgpt.inference.decoding.batched import BatchedSlots
from distgpt.inference.decoding.compiled import CompiledSlots
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from models import plain_logits

HOT = {"temperature": 1.0}
# Slots with the dtype in which split text gives equal tokens.
SLOTS = {"plain": (PlainSlots, "float64"), "compiled": (CompiledSlots, "float32")}
both = pytest.mark.parametrize("made, dtype", SLOTS.values(), ids=SLOTS)


def stopped(text, stops):
    """Cut text at the stop string that ends first; return the text and whether a stop string was found."""
    ends = {end for stop in stops for end in [text.find(stop) + len(stop)] if stop in text}
    if not ends:
        return text, False
    until = text[: min(ends)]
    return until.removesuffix(max((stop for stop in stops if until.endswith(stop)), key=len)), True


def by_definition(one, request, choice):
    """Compute tokens, likelihoods, text and finish reason of a sample from the formulas.

    Tokens that left the window have no further effect, except through kept rotary keys.
    """
    length, seen, likely, text, reason = one.config.seq_len, list(request.prompt), [], "", "length"
    begin = max(0, len(seen) - length)
    begins = [begin] * len(seen)
    for i in range(request.max_new_tokens):
        if len(seen) - begin > length:
            kept = length if request.overflow == "slide" else length - length // 2
            begin = len(seen) - kept
            if request.overflow == "slide" or one.config.has_position_vectors:
                begins = [begin] * (len(seen) - 1)
        begins += [begin] * (len(seen) - len(begins))
        first = min(begins[begin:])  # learned positions restart
        sees = np.maximum(np.array(begins[first:]) - first, 0)
        scores = plain_logits(one.config, one.params, seen[first:], sees)[-1]
        token = choose(scores, request, uniform(request.seed, choice, i), seen)
        likely.append(likelihood(scores, token, request.logprobs or 0))
        seen.append(token)
        if token in request.ends:
            reason = "stop"
            break
        text, found = stopped(text + LETTERS.decode([token]), request.stop)
        if found:
            reason = "stop"
            break
        if i + 1 < request.max_new_tokens and request.overflow == "stop" and len(seen) - begin > length:
            reason = "context"
            break
    return seen[len(request.prompt) :], likely, text, reason


def assert_likely(found, expected, tolerance):
    assert found.logprob == pytest.approx(expected.logprob, abs=tolerance)
    ours, theirs = ([p for _, p in each.alternatives] for each in (found, expected))
    np.testing.assert_allclose(ours, theirs, atol=tolerance)


TOKENS = st.integers(0, 12)
REQUESTS = st.builds(
    Request,
    prompt=st.lists(TOKENS, min_size=1, max_size=14) | st.sampled_from([[1, 2, 3, 1, 2, 3, 1], [1, 2, 3, 1, 2, 4]]),
    max_new_tokens=st.integers(0, 14),
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    seed=st.integers(0, 4),
    n=st.integers(1, 3),
    logprobs=st.none() | st.integers(0, 2),
    prompt_logprobs=st.booleans(),
    stop=st.lists(st.text("abcdefgh", min_size=1, max_size=2), max_size=2).map(tuple),
    ends=st.sets(TOKENS, max_size=2).map(tuple),
    overflow=st.sampled_from(["slide", "shift", "stop"]),
    lookup=st.sampled_from([0, 3]),
    reuse=st.booleans(),
)


class Traffic(RuleBasedStateMachine):
    """Submit, run and cancel requests; every sample matches `by_definition`."""

    CHUNK, COUNT = 4, 3

    def __init__(self, kind, made, dtype):
        super().__init__()
        self.one = _models(kind, dtype)
        self.exact = _models(kind, "float64")
        self.slots = Watched(made(self.one, self.COUNT))
        self.engine = Engine(self.slots, LETTERS, self.CHUNK)
        self.tolerance = 1e-9 if dtype == "float64" else 1e-4
        self.open, self.ended = {}, {}  # (request, tokens, pieces) by ticket and choice; definitions

    @rule(request=REQUESTS)
    def submit(self, request):
        is_long = len(request.prompt) > self.one.config.seq_len
        unscored = request.prompt_logprobs and (request.logprobs is None or is_long)
        if unscored or (is_long and request.overflow == "stop"):
            with pytest.raises(UsageError):
                self.engine.submit(request)
            return
        ticket = self.engine.submit(request)
        self.open |= {(ticket, choice): (request, [], []) for choice in range(request.n)}

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data):
        gone = data.draw(st.sampled_from(sorted({ticket for ticket, _ in self.open})))
        self.engine.cancel(gone)
        self.engine.cancel(gone)
        self.engine.cancel(12345)
        self.open = {which: about for which, about in self.open.items() if which[0] != gone}

    @rule(times=st.integers(1, 6))
    def step(self, times):
        for _ in range(times):
            self.take(self.engine.step())

    def take(self, events):
        for event in events:
            which = event.ticket, event.choice
            request, tokens, texts = self.open[which]
            expected, likely, text, reason = self.definition(request, event.choice)
            first = not tokens
            texts.append(event.text)
            if event.token is not None:
                place = len(tokens)
                tokens.append(event.token)
                assert tokens == expected[: place + 1]
                if request.logprobs is not None:
                    assert_likely(event.likelihood, likely[place], self.tolerance)
                    assert len(event.likelihood.alternatives) == request.logprobs
            assert (event.prompt_likelihoods is not None) == (first and request.prompt_logprobs)
            if event.prompt_likelihoods:
                self.check_prompt(request, event.prompt_likelihoods)
            if event.reason is not None:
                assert (tokens, "".join(texts), event.reason) == (expected, text, reason), request
                del self.open[which]

    def definition(self, request, choice):
        key = replace(request, n=1, lookup=0, reuse=False, prompt=tuple(request.prompt)), choice
        if key not in self.ended:
            self.ended[key] = by_definition(self.exact, request, choice)
        return self.ended[key]

    def check_prompt(self, request, found):
        scores = plain_logits(self.exact.config, self.exact.params, request.prompt)
        assert found[0] is None and len(found) == len(request.prompt)
        for each, row, token in zip(found[1:], scores, request.prompt[1:], strict=False):
            assert_likely(each, likelihood(row, token, request.logprobs), self.tolerance)

    @invariant()
    def all_are_counted(self):
        running = self.engine.running
        assert running + self.engine.waiting == len(self.open) and self.engine.is_idle == (not self.open)
        assert running <= self.COUNT and self.slots.most <= self.CHUNK + 3 * self.COUNT

    def teardown(self):
        for last in (False, True):
            for _ in range(2000):
                self.take(self.engine.step())
                if self.engine.is_idle:
                    break
            assert not self.open
            if not last:  # every slot can be used again
                self.slots.fed.clear()
                self.submit(Request([1], 3, n=self.COUNT, **HOT))
        assert {slot for slot, *_ in self.slots.fed} == set(range(self.COUNT))


@cache
def _models(kind, dtype):
    return model(kind, dtype, seq_len=9 if kind == "gpt2" else 8)


@pytest.mark.parametrize("kind, made, dtype", [
    *((kind, *SLOTS["plain"]) for kind in ("gpt2", "grouped queries", "none")),
    *((kind, *SLOTS["compiled"]) for kind in ("gpt2", "scaled queries")),
    *((kind, BatchedSlots, "float64") for kind in ("gpt2", "modern")),
])  # fmt: skip
def test_requests_in_any_order_match_definition(kind, made, dtype):
    how = settings(max_examples=12, stateful_step_count=20, phases=[Phase.generate])  # shrinking takes minutes
    run_state_machine_as_test(lambda: Traffic(kind, made, dtype), settings=how)


@pytest.mark.parametrize("kind", marked(*EXACT))
def test_answers_are_bitwise_equal_in_any_batch(kind):
    requests = varied_requests(9, 97)
    alone = [complete(Engine(slots_of("llama", kind, 3), chunk=16), [request])[0] for request in requests]
    for count in (9, 1):
        assert complete(Engine(slots_of("llama", kind, count), chunk=16), requests) == alone, count
    greedy = Request([1, 2, 3] * 9, 120, overflow="shift")
    plain, guessing = (
        complete(Engine(slots_of("llama", kind, count), chunk=16), [replace(greedy, lookup=lookup)])
        for count, lookup in ((1, 0), (2, 4))
    )
    assert plain == guessing


@both
@pytest.mark.parametrize("count", [1, 5])
def test_samples_share_one_prefill(count, made, dtype):
    counted = Watched(made(model("gpt2", dtype, seq_len=40), count))
    complete(Engine(counted, chunk=8), [Request([1, 2, 3] * 5, 4, **HOT, n=5)])
    assert counted.tokens == 15 + 5 * 3  # the last token of each is never fed


def test_long_prompts_are_computed_in_chunks():
    counted = Watched(PlainSlots(model(seq_len=400), 4))
    engine = Engine(counted, chunk=16)
    first = engine.submit(Request([1, 2], 60))
    engine.step()
    long = engine.submit(Request([3] * 300, 2))
    for turn in range(19):  # 300 tokens by 16
        events = engine.step()
        assert first in [event.ticket for event in events], "the others stood still"
        assert (long in [event.ticket for event in events]) == (turn == 18)
    assert counted.most == 16


@both
@pytest.mark.parametrize("kind, overflow", [("gpt2", "slide"), ("modern", "shift")])
def test_lookup_needs_fewer_steps_for_equal_text(kind, overflow, made, dtype):
    one, prompt, counts, found = model(kind, dtype, seq_len=120), [1, 2, 3, 4, 5, 6] * 6, [], []
    for lookup in (0, 4):
        counted = Watched(made(one, 1))
        found.append(complete(Engine(counted, LETTERS), [Request(prompt, 130, lookup=lookup, overflow=overflow)]))
        counts.append(counted.calls)
    assert found[0] == found[1]
    assert counts[1] < 0.9 * counts[0]  # greedy text of a random model soon repeats itself


def test_scored_prompt_is_computed_once():
    counted = Watched(PlainSlots(model(seq_len=40), 2))
    engine = Engine(counted, chunk=8)
    request = Request([1, 2, 3] * 7, 0, n=5, logprobs=0, prompt_logprobs=True)
    (found,) = complete(engine, [request])
    assert counted.tokens == 21 and len(found) == 5 and counted.most == 8
    complete(engine, [replace(request, max_new_tokens=2)])
    assert counted.tokens == 21 + 21 + 5


def test_shifted_window_recomputes_nothing():
    counted = Watched(PlainSlots(model("modern", seq_len=16), 1))
    complete(Engine(counted, None, 8), [Request([1] * 6, 100, overflow="shift")])
    assert counted.tokens == 6 + 99


def begun(engine, *prompts):
    """Return the first (slot, position) that is fed for each prompt."""
    found = []
    for prompt in prompts:
        engine.slots.fed.clear()
        complete(engine, [Request(prompt, max_new_tokens=1, overflow="stop", reuse=True)])
        found.append(engine.slots.fed[0][:2])
    return found


class WatchedEngine(Engine):
    def __init__(self, made, dtype, count=1, **changes):
        self.slots = Watched(made(model("modern", dtype, **changes), count))
        super().__init__(self.slots, chunk=4)


@both
def test_next_turn_computes_only_new_tokens(made, dtype):
    engine = WatchedEngine(made, dtype, seq_len=32)
    first = Request([1, 2, 3, 4, 5, 6, 7], max_new_tokens=5, overflow="stop", reuse=True)
    turn = [*first.prompt, *complete(engine, [first])[0][0].tokens, 8, 9, 3]
    assert begun(engine, turn) == [(0, 11)]  # the answer's last token was never fed
    assert begun(engine, [*turn[:5], 9], turn[:3], [4, 2]) == [(0, 5), (0, 2), (0, 0)]  # reuses the equal prefix
    complete(engine, [Request(turn, max_new_tokens=1, overflow="stop")])
    assert engine.slots.fed[-4:] == [(0, 0, 4), (0, 4, 4), (0, 8, 4), (0, 12, 3)]  # no `reuse`


@both
@pytest.mark.parametrize("overflow", ["shift", "slide"])
def test_shifted_slot_is_not_reused(made, dtype, overflow):
    engine = WatchedEngine(made, dtype, seq_len=8)
    complete(engine, [Request([1, 2, 3, 4, 5], max_new_tokens=9, overflow=overflow)])
    assert begun(engine, [1, 2, 3, 4, 5, 6]) == [(0, 0)]


@both
def test_chats_reuse_slots_and_evict_least_recent(made, dtype):
    engine = WatchedEngine(made, dtype, count=3, seq_len=64, vocab_size=50)
    chats = [[first, *range(2, 9 + 4 * first)] for first in range(4)]  # the shortest first
    at = dict(enumerate(slot for slot, _ in begun(engine, *chats[:3])))
    assert set(at.values()) == {0, 1, 2} and begun(engine, [*chats[0], 9]) == [(at[0], len(chats[0]))]
    assert begun(engine, chats[3]) == [(at[1], 0)] and begun(engine, [*chats[2], 9]) == [(at[2], len(chats[2]))]
    assert begun(engine, chats[1]) == [(at[0], 0)]


@both
def test_common_prefix_is_copied(made, dtype, monkeypatch):
    monkeypatch.setattr("distgpt.core.generate.engine.WORTHWHILE", 4)
    engine = WatchedEngine(made, dtype, count=3, seq_len=32)
    system = [1, 2, 3, 4, 5]
    chats = [[*system, other, *range(2, 12)] for other in (6, 7)]
    (first, _), (second, place) = begun(engine, *chats)
    assert first != second and place == len(system)
    for chat, slot in zip(chats, (first, second), strict=True):
        assert begun(engine, [*chat, 3]) == [(slot, len(chat))]
    engine.submit(Request([*system, 8, 8], max_new_tokens=9, reuse=True))
    engine.step()
    engine.step()
    engine.submit(Request([*system, 8, 8, 9], max_new_tokens=1, reuse=True))
    engine.slots.fed.clear()
    engine.step()
    assert engine.slots.fed[-1][1] == len(system) + 2  # copied from a running slot


@pytest.mark.parametrize("kind", marked(*EXACT))
def test_exact_slots_are_bitwise_equal_after_reuse(kind, monkeypatch):
    monkeypatch.setattr("distgpt.core.generate.engine.WORTHWHILE", 4)
    chats = [[i % 3, *range(1, 20), *range(i, 60, 5)] for i in range(6)]
    hot = {"max_new_tokens": 4, "temperature": 1.0, "logprobs": 3, "overflow": "stop"}
    counted = Watched(slots_of("llama", kind, 3))
    engine = Engine(counted, chunk=16)
    assert counted.is_exact
    for _ in range(2):  # the second turn follows the first
        again = [complete(engine, [Request(chat, **hot)])[0][0] for chat in chats]
        taken = complete(engine, [Request(chat, **hot, reuse=True) for chat in chats])
        assert [each[0] for each in taken] == again
        chats = [[*chat, *said.tokens, 5, 6] for chat, said in zip(chats, again, strict=True)]
    counted.fed.clear()
    assert complete(engine, [Request([*chats[-1], 1], **hot, reuse=True)]) and counted.fed[0][1] > 30


@given(
    st.text("ab", min_size=1, max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=2),
    st.lists(st.integers(1, 5), min_size=12, max_size=12),
)
@settings(max_examples=300)
def test_transcript_cuts_at_first_stop_string(text, stops, lengths):
    pieces = [text[begin:end] for begin, end in pairwise(np.cumsum([0, *lengths])) if begin < len(text)]
    transcript, shown, expected = Transcript(Pieces(pieces).streamer(), stops), "", stopped(text, stops)
    for i in range(len(pieces)):
        shown += transcript.feed(i)
        assert expected[0].startswith(shown)
        if transcript.stopped:
            break
    shown += "" if transcript.stopped else transcript.flush()
    assert (shown, transcript.stopped) == expected


class Pieces(CharTokenizer):
    """A tokenizer whose token i is the i-th piece."""

    def __init__(self, pieces):
        self.vocabulary, self.size = pieces, len(pieces)


def test_partial_utf8_is_shown_at_the_end():
    transcript = Transcript(ByteTokenizer().streamer_behind(list("né".encode())), ["xyz"])
    euro = "€".encode()
    assert [transcript.feed(byte) for byte in (*euro, ord("x"), euro[0])] == ["", "", "€", "", ""]
    assert transcript.flush() == "x\ufffd"


@pytest.mark.parametrize("words, how", [
    ("prompt_logprobs requires logprobs", {"prompt_logprobs": True}),
    (r"12 tokens.*context.* 9\b.*prompt_logprobs", {"prompt": [1] * 12, "logprobs": 0, "prompt_logprobs": True}),
    (r"12 tokens.*context.* 9\b.*overflow", {"prompt": [1] * 12, "overflow": "stop"}),
    ("prompt is empty", {"prompt": []}), ("tokenizer", {"stop": ("a",)}), ("n", {"n": 0}), ("lookup", {"lookup": 65}),
    ("overflow", {"overflow": ["stop"]}), ("stop", {"stop": ("",)}),
    ("unknown setting 'temperatur'; did you mean 'temperature'", {"temperatur": 1}),
])  # fmt: skip
def test_invalid_requests_are_rejected(words, how):
    with pytest.raises(UsageError, match=words):
        Engine(PlainSlots(model(), 4), None, 4).submit(Request([1]).override(how.pop("prompt", [1]), how))
