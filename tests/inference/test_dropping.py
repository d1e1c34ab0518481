"""Windows that move on without computing anew: against attention that cannot see what has gone."""

from dataclasses import replace

import numpy as np
import pytest
import test_compiled_lanes
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.cpu.matmul.packing import COLUMNS
from distgpt.core.generate.engine import Engine, complete
from distgpt.core.generate.plain_slots import PlainSlots
from distgpt.core.generate.request import Request
from distgpt.core.generate.slots import Feed
from distgpt.core.model.model import Architecture, Model
from distgpt.core.model.passes import Pass
from distgpt.core.ops.kernels import Kernels
from distgpt.inference.decoding.compiled import CompiledSlots
from test_compiled_lanes import KINDS, all_threads, distance, lanes_of, sequences  # noqa: F401
from test_engine import Watched

from models import VARIANTS, build

LENGTH = 9


class Windowed(Kernels):
    """Attention of token t begins at token `begins[t]`: what has gone is not seen, positions go on."""

    begins: np.ndarray

    def _masked_scores(self, q, k, mask, start=0):
        scores = super()._masked_scores(q, k, mask, start)
        gone = np.arange(k.shape[2]) < self.begins[: q.shape[2], None]
        return np.where(gone, -np.inf, scores)


def windowed_scores(model, tokens, begins, longest):
    """Scores after each token, by a forward pass over all of them in a context that has room for them."""
    kernels = Windowed("float64")
    kernels.begins = np.array(begins)
    whole = Model(Architecture(replace(model.config, seq_len=longest)), kernels)
    for name in whole.params:
        whole.params[name][...] = model.kernels.to_host(model.params[name])
    work, scores = Pass(whole, 1, len(tokens), training=False), kernels.zeros(len(tokens), 16)
    work.logits(scores, work.forward(kernels.integers(tokens)))
    return scores[:, : model.config.vocab_size]


def moved(prompt, count, length):
    """Where the window of each token began, by the definition of `shift`."""
    begins = [min(i, max(0, prompt - length)) for i in range(prompt)]
    for size in range(prompt + 1, prompt + count + 1):
        full = size - begins[-1] > length
        begins.append(size - (length - length // 2) if full else begins[-1])
    return begins


@pytest.mark.parametrize("lookup", [0, 5])
@pytest.mark.parametrize("made, dtype", [(PlainSlots, "float64"), (CompiledSlots, "float32")])
@pytest.mark.parametrize("kind", ["grouped queries", "scaled queries", "llama3 scaling", "none"])
def test_a_shifted_window_is_attention_that_sees_no_more_than_it(kind, made, dtype, lookup):
    for length in (1, 3, 8):
        one = build(replace(VARIANTS[kind], seq_len=length), CpuKernels(dtype, 2))
        for size in (1, 9, 20):
            prompt = np.random.default_rng(size).integers(0, 13, size).tolist()
            how = Request(prompt, 30, overflow="shift", logprobs=0, lookup=lookup)
            ((found,),) = complete(Engine(made(one, 2), None, 4), [how])
            seen = [*prompt, *found.tokens]
            scores = windowed_scores(one, seen, moved(size, 30, length), 64)[size - 1 : -1]
            logs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
            likely = [each.logprob for each in found.likelihoods]
            np.testing.assert_allclose(likely, logs.max(-1), atol=1e-10 if dtype == "float64" else 1e-4)
            np.testing.assert_allclose(logs[np.arange(30), found.tokens], logs.max(-1), atol=1e-4)


def test_it_computes_nothing_anew():
    lanes = Watched(PlainSlots(build(replace(VARIANTS["modern"], seq_len=16), CpuKernels("float64", 1)), 1))
    complete(Engine(lanes, None, 8), [Request([1] * 6, 100, overflow="shift")])
    assert lanes.tokens == 6 + 99


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "int4"])  # whose memory is int8's
@pytest.mark.parametrize("variant", ["one key", "bare"])
def test_compiled_lanes_move_as_the_reference_does(variant, kind):
    """By any number of positions, whatever else the memory holds; other lanes stay as they are."""
    model = test_compiled_lanes.build(variant, Kernels("float64"))
    exact, text = PlainSlots(model, 1), sequences(variant)[4]
    tolerance = {"float32": 3e-6, "bfloat16": 4e-2, "int8": 6e-2}[kind]
    for count, kept in ((1, 40), (26, 24), (32, 9), (40, 1)):
        lanes = lanes_of(variant, kind, 3)
        for array in lanes._cache:
            array[...] = 0x7FC0 if array.dtype == np.uint16 else np.nan
        for each in (lanes, exact):
            each.feed([Feed(0, 0, text[: count + kept], 0)])
        before = lanes.feed([Feed(2, 0, text, 1)])
        for each in (lanes, exact):
            each.drop(0, count, kept)
        rest = text[count + kept :][:3] or [1]
        found = lanes.feed([Feed(0, kept, rest, len(rest))])
        assert distance(found, exact.feed([Feed(0, kept, rest, len(rest))])) < tolerance, (count, kept)
        np.testing.assert_array_equal(lanes.feed([Feed(2, len(text) - 1, text[-1:], 1)]), before)


def test_keys_are_rounded_once():
    """The bfloat16 keys of int8 are the nearest to what the rotation of those in the cache gives."""
    lanes = lanes_of("llama", "int8", 1)
    lanes.feed([Feed(0, 0, sequences("llama")[4][:30], 0)])

    def keys():
        """(layers, heads, T, head) of float32."""
        found = lanes._cache.keys[:, 0]
        shape = *found.shape[:2], -1, 12, COLUMNS, 2
        pairs = (found.astype(np.uint32) << 16).view(np.float32).reshape(shape)
        return pairs.transpose(0, 1, 2, 4, 3, 5).reshape(*found.shape[:2], -1, 24)

    old = keys()[:, :, 11:30]
    lanes.drop(0, 11, 19)
    cos, sin = (table[11].astype(np.float64) for table in lanes._angles)
    left, right = np.split(old.astype(np.float64), 2, axis=-1)
    wanted = np.concatenate((left * cos + right * sin, right * cos - left * sin), axis=-1)
    assert (np.abs(keys()[:, :, :19] - wanted) <= 2.0**-8 * np.abs(wanted) * (1 + 1e-3) + 1e-7).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_shifted_text_is_the_same_alone_and_among_others(kind):
    """Samples of one prompt that share its prefill, in few lanes or many, with guesses or not."""
    hot = {"temperature": 1.0, "top_k": 3}
    requests = [
        Request(text[:20] or [1], 60 + i, **hot, seed=i, n=3, overflow="shift", logprobs=1)
        for i, text in enumerate(sequences("llama")[::2])
    ]

    def done(count, *some):
        return complete(Engine(lanes_of("llama", kind, count), None, 16), some)

    alone = [done(3, request)[0] for request in requests]
    for count in (1, 9):
        assert done(count, *requests) == alone
    greedy = Request([1, 2, 3] * 9, 120, overflow="shift")
    assert done(1, greedy) == done(2, replace(greedy, lookup=4))


def test_what_does_not_fit_or_cannot_move_is_refused():
    lanes = lanes_of("llama", "float32", 2)
    for lane, count, kept in ((2, 1, 1), (-1, 1, 1), (0, -1, 1), (0, 1, -1), (0, 25, 26)):
        with pytest.raises(ValueError, match="cannot keep"):
            lanes.drop(lane, count, kept)
    learned = lanes_of("gpt2", "float32", 1)
    assert not learned.can_drop
    with pytest.raises(ValueError, match="cannot keep"):
        learned.drop(0, 1, 1)
