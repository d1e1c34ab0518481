"""The engine: tokens against the plain forward pass, whoever shares the batch; stop strings; lanes shared."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from distgpt.core.base.errors import NonFiniteError, UsageError
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.data.tokenizers import ByteTokenizer
from distgpt.core.generate.engine import Engine, complete
from distgpt.core.generate.plain_slots import PlainSlots
from distgpt.core.generate.request import Request
from distgpt.core.generate.sample import Transcript
from distgpt.core.generate.sampling import choose, uniform
from distgpt.corpora.tokenizers.collected import CharTokenizer
from distgpt.inference.decoding.compiled import CompiledSlots
from test_lanes import plain_scores

from models import VARIANTS, build

LETTERS = CharTokenizer("abcdefghijklm")
HOT = {"temperature": 1.0}
# Lanes by what makes them, and the dtype in which pieces of a text give the same tokens.
LANES = {"vocabulary": (PlainSlots, "float64"), "compiled": (CompiledSlots, "float32")}
both_lanes = pytest.mark.parametrize("made, dtype", LANES.values(), ids=LANES)


def model(kind="gpt2", dtype="float64", **changes):
    return build(replace(VARIANTS[kind], **changes), CpuKernels(dtype, 2))


def engine_of(model, lanes=4, chunk=4, tokenizer=LETTERS, made=PlainSlots):
    return Engine(made(model, lanes), tokenizer, chunk)


def tokens_of(engine, *requests):
    return [[sample.tokens for sample in samples] for samples in complete(engine, requests)]


def window(tokens, overflow, length, begun):
    """What of the tokens is seen, and where that begins, by the definition of `overflow`."""
    if len(tokens) - begun > length:
        begun = len(tokens) - (length if overflow == "slide" else length - length // 2)
    return tokens[begun:], begun


@pytest.mark.parametrize(
    "kind, overflow", [*product(["gpt2"], ["slide", "shift", "stop"]), ("modern", "slide"), ("grouped queries", "stop")]
)  # what `shift` is for the others: test_dropping.py
def test_greedy_takes_the_likeliest_token_each_time_past_the_context(kind, overflow):
    one = model(kind)
    for size in (1, 5, 9, 20):
        seen = np.random.default_rng(size).integers(0, 13, size).tolist()
        if overflow == "stop" and size > 9:
            continue
        ((found,),) = complete(engine_of(one), [Request(list(seen), 14, overflow=overflow)])
        begun = max(0, size - 9)
        for token in found.tokens:
            seen_now, begun = window(seen, overflow, 9, begun)
            assert token == plain_scores(one, seen_now)[-1].argmax(), (size, len(seen))
            seen.append(token)
        whole = overflow != "stop"
        assert (len(found.tokens), found.reason) == ((14, "length") if whole else (10 - size, "context"))
        assert found.text == LETTERS.decode(found.tokens)


def varied_requests(count):
    random, requests = np.random.default_rng(5), []
    for i in range(count):
        how = {
            "temperature": float(random.choice([0, 0.7, 1.5])),
            "top_k": int(random.choice([0, 5])),
            "top_p": float(random.choice([1, 0.8])),
            "min_p": float(random.choice([0, 0.05])),
            "repetition_penalty": float(random.choice([1, 1.3])),
            "seed": i % 5,
        }
        prompt = random.integers(0, 13, random.integers(1, 40)).tolist()
        more = {"n": 1 + i % 3, "logprobs": 2, "lookup": 3 * (i % 4 == 0), "stop": ("gg", "abc") * (i % 2)}
        more["prompt_logprobs"] = i % 5 == 0 and len(prompt) <= 24
        overflow = ("slide", "shift")[i % 2]
        requests.append(Request(prompt, int(random.integers(0, 40)), overflow=overflow, **how, **more))
    return requests


@pytest.mark.ci
@pytest.mark.parametrize(
    "made, kind", [(PlainSlots, "modern"), (CompiledSlots, "grouped queries"), (CompiledSlots, "gpt2")]
)
def test_what_a_request_becomes_does_not_depend_on_the_others(kind, made):
    """In float32, to the bit of the log-probabilities: alone, among 12, in few lanes, and joining late."""
    one = model(kind, "float32", seq_len=24)
    requests = varied_requests(12)
    alone = [complete(engine_of(one, 3, 8, made=made), [request])[0] for request in requests]
    for lanes in (12, 5, 1):
        assert complete(engine_of(one, lanes, 8, made=made), requests) == alone, lanes
    late, done = engine_of(one, 6, 8, made=made), {}
    for request in requests:
        late.submit(request)
        for event in [*late.step(), *late.step()]:
            done.setdefault((event.ticket, event.choice), []).append(event.token)
    while not late.is_idle:
        for event in late.step():
            done.setdefault((event.ticket, event.choice), []).append(event.token)
    for ticket, samples in enumerate(alone):
        for choice, sample in enumerate(samples):
            assert [token for token in done[ticket, choice] if token is not None] == sample.tokens


class Watched:
    """Lanes that note what they are fed: (lane, start, tokens)."""

    def __init__(self, lanes):
        self._lanes, self.fed, self.calls, self.most = lanes, [], 0, 0

    def __getattr__(self, name):
        return getattr(self._lanes, name)

    def feed(self, work):
        self.fed += [(each.slot, each.start, len(each.tokens)) for each in work]
        self.calls += 1
        self.most = max(self.most, sum(len(each.tokens) for each in work if len(each.tokens) > 1))
        assert len({each.slot for each in work}) == len(work)
        return self._lanes.feed(work)

    @property
    def tokens(self):
        return sum(tokens for *_, tokens in self.fed)


@both_lanes
@pytest.mark.parametrize("lanes", [1, 5])
def test_samples_of_one_prompt_share_its_prefill(lanes, made, dtype):
    one, request = model("gpt2", dtype, seq_len=40), Request([1, 2, 3] * 5, 4, **HOT, n=5)
    counted = Watched(made(one, lanes))
    (found,) = tokens_of(Engine(counted, chunk=8), request)
    assert counted.tokens == 15 + 5 * 3  # the last token of each is never fed
    scores = [plain_scores(one, request.prompt)[-1]] * 5
    for i in range(4):
        draws = [uniform(0, choice, i) for choice in range(5)]
        chosen = [choose(row, request, draw) for row, draw in zip(scores, draws, strict=True)]
        assert [tokens[i] for tokens in found] == chosen
        scores = [plain_scores(one, [*request.prompt, *tokens[: i + 1]])[-1] for tokens in found]


def test_prompts_are_computed_in_pieces_between_the_tokens_of_others():
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


@both_lanes
@pytest.mark.parametrize("how", [{}, HOT])
@pytest.mark.parametrize("kind, overflow", [("gpt2", "slide"), ("modern", "shift")])
def test_lookup_changes_nothing_but_the_number_of_steps(how, kind, overflow, made, dtype):
    one = model(kind, dtype, seq_len=120)
    prompt = [1, 2, 3, 4, 5, 6] * 6
    counts, found = [], []
    for lookup in (0, 4):
        lanes = Watched(made(one, 1))
        request = Request(prompt, 130, **how, lookup=lookup, overflow=overflow)
        found.append(complete(Engine(lanes, LETTERS), [request]))
        counts.append(lanes.calls)
    assert found[0] == found[1]
    if not how:  # greedy text of a random model soon repeats itself
        assert counts[1] < 0.9 * counts[0]


def plain_likelihoods(one, prompt, alternatives):
    """Of each token of a prompt, from the second on, by the forward pass: its own, and the likeliest."""
    scores = plain_scores(one, prompt)[:-1]
    logs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    likeliest = np.argsort(-logs)[:, :alternatives]
    return logs[np.arange(len(logs)), prompt[1:]], likeliest, np.take_along_axis(logs, likeliest, -1)


@both_lanes
@pytest.mark.parametrize("new", [0, 3])
def test_a_prompt_s_own_tokens_have_log_probabilities_in_pieces_or_not(new, made, dtype):
    one, tolerance = model("gpt2", dtype, seq_len=30), {"rtol": 1e-9 if dtype == "float64" else 1e-5}
    for size in (1, 8, 9, 27):
        prompt = np.random.default_rng(size).integers(0, 13, size).tolist()
        plain = Request(prompt, new, n=3, logprobs=2, lookup=2)
        (without,) = complete(engine_of(one, 2, 8, made=made), [plain])
        (samples,) = complete(engine_of(one, 2, 8, made=made), [replace(plain, prompt_logprobs=True)])
        for found, other in zip(samples, without, strict=True):
            assert (found.text, found.tokens, found.reason) == (other.text, other.tokens, other.reason)
            first, *others = found.prompt_likelihoods
            assert other.prompt_likelihoods is None and first is None and len(others) == size - 1
            own, likeliest, logs = plain_likelihoods(one, prompt, 2)
            np.testing.assert_allclose([each.logprob for each in others], own, **tolerance)
            for i, each in enumerate(others):
                assert [token for token, _ in each.alternatives] == likeliest[i].tolist()
                np.testing.assert_allclose([p for _, p in each.alternatives], logs[i], **tolerance)


def test_a_scored_prompt_is_computed_once_and_leaves_nothing_behind():
    counted = Watched(PlainSlots(model(seq_len=40), 2))
    engine = Engine(counted, chunk=8)
    request = Request([1, 2, 3] * 7, 0, n=5, logprobs=0, prompt_logprobs=True)
    (found,) = complete(engine, [request])
    assert counted.tokens == 21 and len(found) == 5 and counted.most == 8
    assert engine.is_idle and not engine._prompts
    complete(engine, [replace(request, max_new_tokens=2)])
    assert counted.tokens == 21 + 21 + 5


def test_text_ends_before_the_stop_string_that_ends_first_however_tokens_cut_it():
    """Against a search in the whole text, letter by letter and in pieces of any length."""
    random = np.random.default_rng(0)
    for _ in range(300):
        text = "".join(random.choice(list("ab"), 12))
        stops = ["".join(random.choice(list("ab"), random.integers(1, 5))) for _ in range(2)]
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        expected = text
        if ends:
            until = text[: min(ends)]
            longest = max((stop for stop in stops if until.endswith(stop)), key=len)
            expected = until.removesuffix(longest)
        pieces, at = [], 0
        while at < len(text):
            pieces.append(text[at : at + random.integers(1, 6)])
            at += len(pieces[-1])
        transcript, shown = Transcript(Pieces(pieces).streamer(), stops), ""
        for i in range(len(pieces)):
            shown += transcript.feed(i)
            assert expected.startswith(shown)
            if transcript.stopped:
                break
        if not transcript.stopped:
            shown += transcript.flush()
        assert (shown, transcript.stopped) == (expected, bool(ends)), (text, stops)


class Pieces(CharTokenizer):
    """Token i is the i-th piece of a text."""

    def __init__(self, pieces):
        self.vocabulary, self.size = pieces, len(pieces)


def test_half_a_character_at_the_end_is_shown_once_no_more_comes():
    transcript = Transcript(ByteTokenizer().streamer_behind(list("né".encode())), ["xyz"])
    euro = "€".encode()
    assert [transcript.feed(byte) for byte in (*euro, ord("x"), euro[0])] == ["", "", "€", "", ""]
    assert transcript.flush() == "x\ufffd"


@both_lanes
def test_what_is_cancelled_is_forgotten_and_its_lanes_serve_others(made, dtype):
    one = model("gpt2", dtype)
    engine = engine_of(one, lanes=2, made=made)
    gone, stays = engine.submit(Request([1] * 9, 50, n=3)), engine.submit(Request([2], 6))
    seen = [event for _ in range(4) for event in engine.step()]
    assert gone in [event.ticket for event in seen] and engine.running == 2 and engine.waiting == 2
    engine.cancel(gone)
    engine.cancel(12345)
    left = []
    while not engine.is_idle:
        left += engine.step()
    seen = [event for event in seen if event.ticket == stays]
    assert {event.ticket for event in left} == {stays} and engine.running == engine.waiting == 0
    ((alone,),) = tokens_of(engine_of(one, made=made), Request([2], 6))
    assert [event.token for event in seen + left] == alone
    assert tokens_of(engine, Request([1] * 9, 5)) == tokens_of(engine_of(one, made=made), Request([1] * 9, 5))


def test_damaged_weights_are_noticed():
    one = model()
    one.params["wte"][3] = np.nan
    with pytest.raises(NonFiniteError):
        complete(engine_of(one), [Request([3], 2)])


def test_requests_that_make_no_sense_are_refused():
    with pytest.raises(UsageError, match="prompt_logprobs needs logprobs"):
        engine_of(model()).submit(Request([1], prompt_logprobs=True))
    with pytest.raises(UsageError, match=r"12 tokens, the context 9: shorten it, or leave out prompt_logprobs"):
        engine_of(model()).submit(Request([1] * 12, logprobs=0, prompt_logprobs=True))
    for name, value in {"n": 0, "lookup": 65, "overflow": "wrap", "stop": ("",)}.items():
        with pytest.raises(UsageError, match=name):
            Request([1], **{name: value})
    with pytest.raises(UsageError, match="'temperatur' is unknown; did you mean 'temperature'"):
        Request().override([1], {"temperatur": 1})
    with pytest.raises(UsageError, match="prompt is empty"):
        engine_of(model()).submit(Request([]))
    with pytest.raises(UsageError, match=r"12 tokens, the context 9"):
        engine_of(model()).submit(Request([1] * 12, overflow="stop"))
    with pytest.raises(UsageError, match="tokenizer"):
        engine_of(model(), tokenizer=None).submit(Request([1], stop=("a",)))
