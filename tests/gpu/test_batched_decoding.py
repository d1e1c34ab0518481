from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from devices import ON_GPU, cuda_kernels, device  # noqa: F401
from distgpt.core.generate.engine import Engine, complete
from distgpt.core.generate.engine_setup import slots_for, slots_that_fit
from distgpt.core.generate.plain_slots import PlainSlots
from distgpt.core.generate.request import Request, Sampling
from distgpt.core.generate.sampling import choose
from distgpt.core.generate.slots import Choice, Feed
from distgpt.gpu.attention import cached_parts
from distgpt.gpu.kernels import CudaKernels
from distgpt.gpu.matmul import LtMatmul
from distgpt.inference.decoding.batched import BatchedSlots
from test_cuda_model import alike

from models import VARIANTS

needs_counts = pytest.mark.skipif(ON_GPU, reason="counts emulated launches")


def launches(work):
    on = device()
    on.synchronize()
    before = len(on.xp.launches)
    work()
    on.synchronize()
    return Counter(f"{each.source}.{each.kernel}" for each in on.xp.launches[before:])


@pytest.fixture
def calls(monkeypatch):
    """Return a function that records a method's calls in a list."""
    noted = []

    def note(kind, name, of):
        method = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *args, **named: (noted.append(of(*args)), method(*args, **named))[1])
        return noted

    return note


@needs_counts
@pytest.mark.parametrize("kind", ["gpt2", "modern"])
def test_launches_per_token_do_not_grow_with_sequences(kind, cuda_kernels, calls):
    model, _ = alike(VARIANTS[kind], cuda_kernels("float32"))
    lanes, found = BatchedSlots(model, 16), {}
    matmuls = calls(LtMatmul, "run", lambda *args: 1)
    for count in (1, 2, 3, 5, 9):  # each the first of its size: 1, 2, 4, 8, 16
        work = [Feed(15 - i, 0, [i % 13], 1, choice=Choice(Sampling(), 0.0, 0)) for i in range(count)]
        matmuls.clear()
        found[count] = launches(lambda work=work: lanes.feed(work)).total() + len(matmuls)
        replayed = launches(lambda work=work: lanes.feed(work)).total()
        assert replayed <= found[count]  # matmuls are in the graph
    assert found[1] == found[2] == found[3] and found[5] == found[9] <= found[1]


@pytest.mark.ci
def test_prompt_lengths_share_plans(cuda_kernels):
    model, _ = alike(replace(VARIANTS["gpt2"], seq_len=96), cuda_kernels.__wrapped__("float32"))
    lanes, counts = BatchedSlots(model, 2), set()
    for length in range(33, 53, 3):
        lanes.feed([Feed(0, 0, [1] * length, 1)])
        counts.add(len(model.kernels.matmuls.chosen()))
    assert len(counts) == 1 and counts != {0}


@pytest.mark.ci
@pytest.mark.parametrize("kind, dtype", [("modern", "float64"), ("gpt2", "float32")])
def test_requests_match_reference(kind, dtype, cuda_kernels):
    model, twin = alike(VARIANTS[kind], cuda_kernels(dtype))
    how = [{}, {"lookup": 3}, {"temperature": 0.9, "top_k": 5, "logprobs": 2}]
    how += [{"temperature": 0.8, **more} for more in ({"top_p": 0.9}, {"logprobs": 2}, {"min_p": 0.1})]
    requests = [
        Request(prompt=[1 + i, 2, 3], max_new_tokens=12, n=2, seed=i, overflow=("slide", "shift")[i % 2], **each)
        for i, each in enumerate(how)
    ]
    lanes = slots_for(model, 5)
    assert isinstance(lanes, BatchedSlots)
    found, expected = (complete(Engine(each, chunk=4), requests) for each in (lanes, PlainSlots(twin, 5)))
    assert [[each.tokens for each in some] for some in found] == [[each.tokens for each in some] for some in expected]


@needs_counts
def test_shared_prompt_stays_on_the_device(cuda_kernels, monkeypatch):
    model, _ = alike(VARIANTS["modern"], cuda_kernels("float32"))
    lanes = BatchedSlots(model, 3)
    lanes.feed([Feed(0, 0, [1, 2, 3, 4], 0)])
    for name in ("to_host", "put", "integers"):
        monkeypatch.setattr(type(model.kernels), name, None)
    assert launches(lambda: (lanes.copy(0, 2, 4), lanes.drop(2, 1, 3))) == {"decoding.move_cached": 2}


@pytest.mark.ci
@needs_counts
@pytest.mark.parametrize(
    ("how", "found"),
    [({"logprobs": 50}, 64), ({"temperature": 0.8}, 1), ({"temperature": 0.01, "top_p": 0.9}, 64)],
    ids=str,
)
def test_few_bytes_are_copied_per_token(how, found, cuda_kernels, calls):
    """Tokens without top-p are drawn from all scores; with top-p 0.9 and a low temperature, the top 64 suffice."""
    model, _ = alike(replace(VARIANTS["gpt2"], vocab_size=5000), cuda_kernels("float32"))
    engine = Engine(BatchedSlots(model, 8))
    engine.submit(Request(prompt=[1, 2], max_new_tokens=5, n=8, **how))
    for _ in range(2):  # the prompt, and its copies
        engine.step()
    sizes = calls(CudaKernels, "to_host", lambda self, x: x.nbytes)
    assert len(engine.step()) == 8
    # Tokens, scores and a sum; per drawn token, an int32 token, a float64 score and a float64 sum.
    assert sum(sizes) == 8 * (4 * found + 4 * (found + 1) + (20 if "temperature" in how else 0))


@pytest.mark.ci
def test_device_sampling_matches_host(cuda_kernels):
    """Tokens may differ only if the random number is next to a border."""
    kernels = cuda_kernels("float32")
    random, rows, vocab, turns, differ = np.random.default_rng(5), 64, 5000, 8, 0
    scores, tokens = kernels.zeros(rows, vocab + 24), kernels.integers(np.zeros(rows))
    how, found = (kernels.scalars(2 * rows).reshape(rows, 2) for _ in range(2))
    for _ in range(turns):
        host = (random.uniform(0.1, 4) * random.standard_normal((rows, vocab + 24))).astype(np.float32)
        given = np.stack((random.uniform(0.3, 2, rows), random.random(rows)), axis=1)
        kernels.put(scores, host)
        kernels.put(how, given)
        kernels.drawn(tokens, found, scores, vocab, how)
        results = np.asarray(kernels.to_host(tokens))
        for token, row, (temperature, number) in zip(results, host[:, :vocab], given, strict=True):
            sampling = Sampling(temperature=float(temperature))
            if token == choose(row, sampling, number):
                continue
            p = np.exp((row.astype(float) - row.max()) / temperature)
            borders = np.cumsum(p)[[token - 1, token]] / p.sum()
            assert abs(borders - number).min() < 1e-6
            differ += 1
    assert differ <= 3


@needs_counts
def test_nan_survives_cached_attention_in_parts(cuda_kernels):
    """A corrupt model must not generate plausible text."""
    k, random = cuda_kernels("float32"), np.random.default_rng(1)
    cache, qkv, y = k.zeros(2, 1, 2, 600, 8), k.zeros(1, 48), k.zeros(1, 16)
    k.put(cache, random.standard_normal((2, 1, 2, 600, 8)))
    values = random.standard_normal((1, 48))
    values[0, 0] = np.nan  # the first of two heads has a NaN in q
    k.put(qkv, values)
    assert cached_parts(2, 600, k.device.multiprocessors) > 1
    k.attention_cached(y, cache, qkv, k.integers([500]), 0)
    found = k.to_host(y)
    assert np.isnan(found[0, :8]).all() and np.isfinite(found[0, 8:]).all()


def test_slots_use_half_of_free_memory(cuda_kernels, monkeypatch):
    model, _ = alike(VARIANTS["gpt2"], cuda_kernels("float32"))
    one = slots_that_fit(model, 1 << 40, memory=1 << 30)
    monkeypatch.setattr(type(model.kernels), "free_memory", lambda self: 2 << 30)
    assert slots_that_fit(model, 1 << 40) == one and slots_that_fit(model, 128) == 128


def test_nonfinite_scores_are_detected_on_the_device(cuda_kernels):
    model, _ = alike(VARIANTS["modern"], cuda_kernels("float32"))
    lanes = BatchedSlots(model, 2)
    head = np.array(model.kernels.to_host(model.head))
    head[4] = np.nan
    model.kernels.put(model.head, head)
    for temperature in (0, 0.8):
        choice = Choice(Sampling(temperature=temperature), 0.5, 2)
        (row,) = lanes.feed([Feed(1, 0, [3], 1, choice=choice)])
        assert np.isnan(row.log_sum)
