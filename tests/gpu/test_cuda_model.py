from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from adapted import adapted, expected
from adapted import gradients as adapters_gradients
from devices import ON_GPU, cuda_kernels, device, needs_the_processor  # noqa: F401  # noqa: F401
from distgpt.core.comm.api import SerialComm
from distgpt.core.comm.resources import usable_cores
from distgpt.core.config import TrainConfig
from distgpt.core.config.presets import preset
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.data.batches import ArrayTokens, Batches
from distgpt.core.generate.engine import Engine, complete
from distgpt.core.generate.engine_setup import slots_for, slots_that_fit
from distgpt.core.generate.plain_slots import PlainSlots
from distgpt.core.generate.request import Request, Sampling
from distgpt.core.generate.slots import Choice, Feed
from distgpt.core.model.model import FLAG_COUNT, Architecture, Model
from distgpt.core.model.muon import OPTIMIZERS
from distgpt.core.model.optim import AdamW
from distgpt.core.model.passes import Pass
from distgpt.core.ops.api import IGNORE_INDEX
from distgpt.core.ops.kernels import Kernels
from distgpt.core.saved.modelfile import Description, fill, load_model, on_host, save_model
from distgpt.core.train import assessment
from distgpt.core.train.assessment import Scorer, Span
from distgpt.corpora.tokenizers.collected import CharTokenizer
from distgpt.gpu.attention import cached_parts
from distgpt.gpu.kernels import CudaKernels
from distgpt.gpu.matmul import LtMatmul
from distgpt.inference.decoding.batched import BatchedSlots
from distgpt.inference.evaluation.benchmark import likelihoods
from hostgpu import BACKWARDS, FORWARDS, host_kernels
from mean_loss import MeanLoss
from steps import build_step

from models import VARIANTS, batch, build, one_by_one, sequences_for

TOLERANCE = {"float64": 1e-11, "float32": 1e-4, "bfloat16": 3e-2}
EACH_ONCE = [("gpt2", "float64"), ("microgpt", "float32"), ("modern", "bfloat16")]
BOTH_KINDS = pytest.mark.parametrize("kind", ["gpt2", "modern"])


def gradients(model, n_seq=3, seq_len=7, recompute="mlp", documents=()):
    """Return the gradients and the loss of two accumulated micro-batches.

    `documents`: lengths of packed documents in each sequence; their first tokens are not trained.
    """
    k = model.kernels
    tokens, targets = batch(model.config, n_seq, seq_len)
    positions = np.tile(np.concatenate([np.arange(n) for n in documents or (seq_len,)]), n_seq)
    targets = np.where((positions == 0) & bool(documents), IGNORE_INDEX, targets)
    placed = k.integers(positions) if documents else None
    work = Pass(model, n_seq, seq_len, training=True, recompute=recompute, positions=placed)
    tokens, targets = k.integers(tokens), k.integers(targets)
    backwards = k.integers(k.to_host(tokens)[::-1].copy())
    work.loss_and_gradients(tokens, targets, 0.7, accumulate=False)
    work.loss_and_gradients(backwards, targets, 0.3, accumulate=True)
    return np.array(k.to_host(model.grads.with_flags), np.float64)


def alike(config, kernels):
    """Return a model and its twin on the reference, with equal values."""
    model, twin = (Model(Architecture(config), kernels), Model(Architecture(config), Kernels("float64")))
    for name, values in build(config, Kernels("float64")).params.items():
        kernels.put(model.params[name], values)
        twin.params[name][...] = kernels.to_host(model.params[name])
    return model, twin


TWICE = ("gpt2", "modern", "microgpt", "grouped queries", "scaled queries", "windows")
PACKED = [("gpt2", "float32"), ("modern", "bfloat16"), ("windows", "float32")]


@pytest.mark.parametrize("kind, dtype, documents", [
    *((kind, "float32", ()) for kind in VARIANTS), *product(TWICE, ("float64", "bfloat16"), [()]),
    *((*each, (1, 4, 2)) for each in PACKED),
])  # fmt: skip
def test_gradients_match_reference(kind, dtype, documents, cuda_kernels):
    config = VARIANTS[kind]
    model, twin = alike(config, cuda_kernels(dtype))
    got, expected = gradients(model, documents=documents), gradients(twin, documents=documents)
    slack = 4 if config.mlp == "relu" else 1  # rounding across ReLU's kink changes the gradient
    slack = 2 if config.qk_norm_gain else slack  # its gradient is a small difference between many heads
    assert got[-FLAG_COUNT] == pytest.approx(expected[-FLAG_COUNT], rel=TOLERANCE[dtype])
    for name in model.grads:
        start = model.layout.offsets[name]
        part = slice(start, start + model.grads[name].size)
        distance = np.linalg.norm(got[part] - expected[part])
        assert distance <= slack * TOLERANCE[dtype] * max(np.linalg.norm(expected[part]), 1e-3), name


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@BOTH_KINDS
def test_adapter_gradients_match_reference(kind, dtype, cuda_kernels):
    model, (tokens, targets) = adapted(VARIANTS[kind], cuda_kernels(dtype)), batch(VARIANTS[kind], 3, 7)
    wanted, _ = expected(model, Kernels("float64"), tokens, targets)
    for recompute in ("none", "mlp"):
        found, _ = adapters_gradients(model, tokens, targets, recompute)
        for name, gradient in wanted.items():
            distance = np.linalg.norm(found[name] - gradient)
            assert distance <= 4 * TOLERANCE[dtype] * np.linalg.norm(gradient), name


@pytest.mark.parametrize("recompute", ["none", "block"])
@BOTH_KINDS
def test_recompute_changes_nothing(kind, recompute, cuda_kernels):
    model, twin = alike(VARIANTS[kind], cuda_kernels("float64"))
    np.testing.assert_allclose(gradients(model, recompute=recompute), gradients(twin), rtol=0, atol=1e-11)


def training(kernels, config, t, count=8):
    model = Model(Architecture(config), kernels)
    model.allocate_master_weights()
    model.initialise(3)
    text = np.random.default_rng(0).zipf(1.5, 400) % config.vocab_size
    batches = Batches(ArrayTokens(text.astype(np.int32)), config.seq_len, t.batch_size, t.seed, True)
    optimizer = OPTIMIZERS[t.optimizer](model, t)
    work = build_step(optimizer, SerialComm(), replace(t, recompute="mlp"))
    return model, optimizer, np.array([work.launch(step, batches).wait()[:2] for step in range(count)])


SMALL = replace(VARIANTS["modern"], seq_len=8)
TRAIN = TrainConfig(steps=8, batch_size=4, grad_accum=2, lr=1e-2, warmup=2, clip=0.5)
MUON = replace(SMALL, n_kv_head=1, qk_norm=True, value_embeddings=True, mlp="relu2", init_weights="unit")
BY_MUON = replace(TRAIN, optimizer="muon", lr=0.02, embedding_lr=0.1)
MINI = preset("gpt-mini", {"vocab_size": 300, "steps": 50, "grad_accum": 1})
MINI_RUN, SLOW = (MINI.model, MINI.train), pytest.mark.slow
ON_A_GPU = pytest.mark.skipif(not ON_GPU, reason="large, for a real GPU")


@pytest.mark.ci
@pytest.mark.parametrize("dtype, tolerance, config, t", [
    *(("float64", 1e-10, SMALL, TRAIN), ("float32", 1e-4, SMALL, replace(TRAIN, grad_accum=1))),
    ("bfloat16", 1e-2, SMALL, TRAIN),
    *(pytest.param(*each, MUON, BY_MUON, marks=SLOW) for each in [("float32", 1e-4), ("bfloat16", 2e-2)]),
    *(pytest.param(*each, *MINI_RUN, marks=ON_A_GPU) for each in [("float32", 1e-4), ("bfloat16", 1e-2)]),
])  # fmt: skip
def test_recorded_steps_train_like_the_cpu(dtype, tolerance, config, t, cuda_kernels):
    """Steps are run, recorded and replayed. The learning rate and tokens change."""
    crew = CpuKernels("float32", min(8, len(usable_cores()))) if t is MINI.train else CpuKernels("float64", 1)
    model, _, got = training(cuda_kernels(dtype), config, t, t.steps)
    twin, _, expected = training(crew, config, t, t.steps)
    assert expected[-1, 0] < 0.98 * expected[0, 0]
    np.testing.assert_allclose(got[:, 0], expected[:, 0], rtol=tolerance)
    if config is SMALL:
        np.testing.assert_allclose(got[:, 1], expected[:, 1], rtol=3e-2 if dtype == "bfloat16" else 1e-3)
        if dtype != "bfloat16":
            weights = model.kernels.to_host(model.weights.flat)
            np.testing.assert_allclose(weights, twin.weights.flat, rtol=0, atol=20 * tolerance)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_graphs_change_no_bit(dtype, cuda_kernels):
    all_alike(cuda_kernels(dtype, graphs=graphs, deterministic=True) for graphs in (True, True, False))


@needs_the_processor
def test_thread_order_changes_no_bit():
    all_alike((host_kernels("bfloat16", order=order) for order in (FORWARDS, BACKWARDS, 2)), count=2)


def all_alike(many_kernels, count=3):
    found = []
    for k in many_kernels:
        model, optimizer, outcomes = training(k, SMALL, TRAIN, count)
        parts = (model.weights, model.params, optimizer.m, optimizer.v)
        found.append(np.concatenate([outcomes.reshape(-1), *(k.to_host(part.flat) for part in parts)]))
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_model_moves_between_stages(dtype, tmp_path, cuda_kernels):
    k, comm, cpu = cuda_kernels(dtype), SerialComm(), CpuKernels("float32", 1)
    model, optimizer, _ = training(k, SMALL, TRAIN, count=3)
    path, run = tmp_path / "weights.safetensors", replace(preset("gpt-mini"), model=model.config)
    save_model(path, model, Description(run, CharTokenizer("abcdefghijklm")))
    (moved, _), (back, _) = load_model(path, cpu, comm), load_model(path, k, comm)
    np.testing.assert_array_equal(moved.weights.flat, k.to_host(model.weights.flat))
    np.testing.assert_array_equal(k.to_host(back.params.flat), k.to_host(model.params.flat))
    requests = [Request([1, 2, 3], 5), Request([4], 12, overflow="shift", lookup=3)]
    tokens = [complete(Engine(slots_for(each, 32)), requests) for each in (model, back, moved)]
    assert tokens[0] == tokens[1]
    assert tokens[0] == tokens[2] or dtype == "bfloat16"

    saved, other = on_host(model, optimizer.m, "m/"), AdamW(model, TRAIN)
    fill(comm, model, {"m/": other.m}, lambda host: [np.copyto(host[n], saved[n]) for n in host] and None)
    np.testing.assert_array_equal(k.to_host(other.m.flat), k.to_host(optimizer.m.flat))
    assert np.abs(k.to_host(other.m.flat)).max() > 0


@pytest.mark.parametrize("made", [PlainSlots, BatchedSlots])
@pytest.mark.parametrize("kind, dtype", [*EACH_ONCE, ("modern", "bfloat16")])
def test_cached_decoding_matches_reference(kind, dtype, made, cuda_kernels):
    """Prompts, single tokens (recorded from the second on), a copy, a draft, and windows that restart and move."""
    model, twin = alike(VARIANTS[kind], cuda_kernels(dtype))
    lanes, plain = made(model, 3), PlainSlots(twin, 3)
    t = np.random.default_rng(3).integers(0, 13, 14).tolist()
    feeds = [[Feed(1, 0, t[:3], 1)], [Feed(1, 3, t[3:4], 1), Feed(0, 0, t[:4], 0)]]
    feeds += [[Feed(0, n, t[n : n + 1], 1), Feed(1, n, t[n : n + 1], 1)] for n in (4, 5)]
    feeds += [[Feed(2, 6, t[6:9], 3), Feed(0, 6, t[6:7], 1)], [Feed(1, 0, t[5:], 1)]]
    feeds += [[Feed(0, 5, t[7:9], 2)]] if lanes.can_drop else []
    for work in feeds:
        if work[0] == Feed(0, 5, t[7:9], 2):
            lanes.drop(0, 2, 5)
            plain.drop(0, 2, 5)
        if work[0].slot == 2:
            lanes.copy(1, 2, 6)
            plain.copy(1, 2, 6)
        got, expected = lanes.feed(work), plain.feed(work)
        np.testing.assert_allclose(got, expected, rtol=0, atol=3 * TOLERANCE[dtype] * np.abs(expected).max())


@pytest.mark.parametrize("kind, dtype", EACH_ONCE)
def test_span_losses_match_reference(kind, dtype, cuda_kernels, monkeypatch):
    for name in ("AT_A_TIME", "AT_A_TIME_QUEUED"):
        monkeypatch.setattr(assessment, name, 40)  # multiple batches, the last one partial
    pair, sequences = alike(VARIANTS[kind], cuda_kernels(dtype)), sequences_for(VARIANTS[kind], 20)
    spans = [Span(np.array(ids, np.uint16), 1 + i % (len(ids) - 1)) for i, ids in enumerate(sequences)]
    for score, exact in ((Scorer.sums, 0), (likelihoods, dtype != "bfloat16")):
        found, expected = (np.array(score(Scorer(each, SerialComm()), spans)) for each in pair)
        of = (slice(None), 0) if found.ndim == 2 else slice(None)
        np.testing.assert_allclose(found[of], expected[of], rtol=3 * TOLERANCE[dtype])
        assert not exact or np.array_equal(found[:, 1], expected[:, 1])
    expected = one_by_one(pair[1], sequences)
    assert MeanLoss(pair[0], 40)(sequences) == pytest.approx(expected, rel=TOLERANCE[dtype])


# Tokens are sorted once per micro-batch, for all gradients by token.
SHAPE = 5, 7  # sequences and tokens: more rows than a block sums


def gradients_by(k, layers):
    """Return a function from a seed to the gradients of two micro-batches, with value embeddings."""
    config, sort = VARIANTS["value embeddings"], k.sort_tokens

    def sort_tokens(*args):
        k.sorted = sort(*args)  # replays use the same memory
        return k.sorted

    k.sort_tokens = sort_tokens
    model = Model(Architecture(replace(config, n_layer=layers)), k)
    model.allocate_master_weights()
    model.initialise(3)
    work = Pass(model, *SHAPE, training=True, recompute="none")
    tokens, targets = map(k.integers, batch(config, *SHAPE))
    parts = [
        k.record(lambda accumulate=each: work.loss_and_gradients(tokens, targets, 0.5, accumulate))
        for each in (False, True)
    ]

    def of(seed):
        for i, part in enumerate(parts):
            for array, host in zip((tokens, targets), batch(config, *SHAPE, seed=2 * seed + i), strict=True):
                k.put(array, host)
            part()
        return k.to_host(model.grads.with_flags).copy()

    return of


@needs_the_processor
@pytest.mark.parametrize("layers", [2, 3])
def test_value_embeddings_share_one_sort(layers):
    k = host_kernels("float32", graphs=False)
    gradients_by(k, layers)(0)
    names = [launch.kernel for launch in k.device.xp.launches]
    assert [names.count(each) for each in ("count_values", "add_up_tiles", "place_rows")] == [2, 2, 2]
    added = [each for each in names if each.startswith("token_gradient") and "across" not in each]
    assert len(added) == 2 * (1 + (layers + 1) // 2)


@needs_the_processor
def test_replayed_work_sorts_its_own_tokens():
    k = host_kernels("float32")
    right, repeated = gradients_by(Kernels("float64"), 3), gradients_by(k, 3)
    for seed in range(3):  # run, recorded, replayed
        values, found = right(seed), repeated(seed)
        # Emulated blocks run sequentially, so sums are also correct if the order is wrong.
        tokens, order = k.sorted
        np.testing.assert_array_equal(k.to_host(order), np.argsort(k.to_host(tokens), kind="stable"))
        np.testing.assert_allclose(found, values, rtol=0, atol=1e-5 * np.abs(values).max())
    k.device.xp.check()


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
