"""First weights from pair counts: gradients and predictions."""

import weakref
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from distgpt.core.base.errors import UsageError
from distgpt.core.comm.affinity import Affinity
from distgpt.core.comm.resources import Cores
from distgpt.core.config import ModelConfig, TrainConfig
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.model.model import Architecture, Model
from distgpt.core.model.passes import Pass
from distgpt.core.ops.kernels import Kernels
from distgpt.core.train import setup
from distgpt.recipes import bigrams
from distgpt.recipes.bigrams import Pairs, learn_bigrams
from distgpt.recipes.scaling import PAIR_PASSES

from conftest import SMALL, inside, losses

V, C = 37, 16


def text(length=20_000, seed=1):
    """Return a chain in which one of three tokens follows each token. Token 5 is absent."""
    rng = np.random.default_rng(seed)
    follows = np.delete(np.arange(V), 5)[rng.integers(0, V - 1, (V, 3))]
    tokens = [0]
    for choice in rng.integers(0, 3, length - 1):
        tokens.append(int(follows[tokens[-1], choice]))
    return np.array(tokens, np.uint16)


def random_weights(dtype=np.float32):
    rng = np.random.default_rng(2)
    return [rng.standard_normal((V, C)).astype(dtype) * std for std in (0.8, 0.1)]


def mean_loss(tokens, embedding, head, centred=False):
    x = embedding - embedding.mean(1, keepdims=True) * centred
    x = x / np.sqrt(np.mean(x * x, 1, keepdims=True) + 1e-5)
    scores = x @ head.T
    logs = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    return -logs[tokens[:-1], tokens[1:]].mean()


def entropy(tokens):
    counts = np.zeros((V, V))
    np.add.at(counts, (tokens[:-1], tokens[1:]), 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(counts / counts.sum(1, keepdims=True))
    return -(counts * np.where(counts > 0, logs, 0)).sum() / counts.sum()


@pytest.mark.parametrize("centred", [False, True])
def test_pair_gradients_match_differences(centred):
    tokens = text(500)
    pairs = Pairs.of(tokens, V)
    e, h = (weights[pairs.order] for weights in random_weights(np.float64))
    places, de = np.argsort(pairs.order)[tokens], np.zeros_like(e)
    dh = bigrams.gradients(pairs, slice(0, V), e, h, de, centred)
    rng = np.random.default_rng(3)
    for weights, gradient in ((e, de), (h, dh)):
        for _ in range(8):
            at = rng.integers(0, V - 2), rng.integers(0, C)
            before, found = weights[at], []
            for moved in (1e-5, -1e-5):
                weights[at] = before + moved
                found.append(mean_loss(places, e, h, centred))
            weights[at] = before
            assert gradient[at] == pytest.approx((found[0] - found[1]) / 2e-5, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("length", [1, 2])
def test_bigrams_learn_short_sequences(length):
    e, h = random_weights()
    learn_bigrams(np.arange(length, dtype=np.uint16), e, h, centred=False, threads=1)
    assert np.isfinite(e).all() and np.isfinite(h).all()


def test_bigrams_predict_like_counts():
    tokens = text()
    e, h = random_weights()
    unseen, before = e[5].copy(), mean_loss(tokens, e, h)
    learn_bigrams(tokens, e, h, centred=False, threads=1)
    assert mean_loss(tokens, e, h) < entropy(tokens) + 0.1 * (before - entropy(tokens))
    assert np.array_equal(e[5], unseen)


def test_bigrams_are_identical_for_any_threads(monkeypatch):
    """Few results, each as large as the output layer, exist at a time."""
    gradients, made, alive, found = bigrams.gradients, [], [], []

    def watched(*args):
        result = gradients(*args)
        made.append(weakref.ref(result))
        alive.append(sum(each() is not None for each in made))
        return result

    monkeypatch.setattr(bigrams, "ROWS", 2)
    monkeypatch.setattr(bigrams, "gradients", watched)
    for threads in (1, 3):
        found.append(random_weights())
        learn_bigrams(text(1000), *found[-1], centred=True, threads=threads)
        assert len(made) > 100 and max(alive) <= 2 * threads + 1
    assert all(map(np.array_equal, *found))


@pytest.mark.parametrize(
    ("size", "cores", "is_async", "threads"),
    [(1, 16, False, 3), (8, 16, False, 12), (8, 16, True, 16), (8, 8, False, 8)],
    ids=["serial", "of waiting ranks", "beside a GPU", "as granted"],
)
def test_bigrams_use_threads_of_waiting_ranks(size, cores, is_async, threads, monkeypatch):
    """Use all cores of the process, not only the cores of this rank."""

    class Bound(Affinity):
        @contextmanager
        def unbound(self):
            with monkeypatch.context() as patched:
                patched.setattr(setup, "granted_cores", lambda: Cores(float(cores)))
                yield

    taken = []
    learned = SimpleNamespace(tokens=8, learn=lambda tokens, host, config, threads: taken.append(threads))
    kernels = CpuKernels(threads=3)
    kernels.capabilities = replace(kernels.capabilities, is_async=is_async)
    model = SimpleNamespace(kernels=kernels, config=ModelConfig(), initial=lambda seed: ())
    monkeypatch.setattr(setup, "affinity", Bound)
    monkeypatch.setattr(setup, "learned_first", lambda config, t: learned)
    monkeypatch.setattr(setup, "granted_cores", lambda: Cores(2.0))
    state = SimpleNamespace(optimizer=SimpleNamespace(model=model), begin=lambda: None)
    state.load_weights = lambda comm, load: load({})
    comm = SimpleNamespace(size=size, local_size=4, cores=4.0)
    setup.begin_anew(comm, state, TrainConfig(), SimpleNamespace(sample=lambda tokens: None))
    assert taken == [threads]


def test_pair_passes_match_phases():
    assert sum(part * steps for part, steps in bigrams.PHASES) == PAIR_PASSES


def test_first_loss_matches_pairs():
    tokens = text(2000)
    shape = ModelConfig(V, seq_len=8, n_layer=2, n_head=2, n_embd=C, positions="rope", norm="rmsnorm")
    config = replace(shape, bias=False, tied=False, init_weights="bigrams")
    model = Model(Architecture(config), Kernels())
    model.initialise(1)
    e, h = (model.weights[name][:V] for name in ("wte", "head.w"))
    learn_bigrams(tokens, e, h, centred=False, threads=1)
    model.refresh()
    window, total = tokens[:9].astype(np.int32), model.kernels.scalars(1)
    Pass(model, 1, 8, training=True).loss(total, window[:-1], window[1:])
    assert total[0] == pytest.approx(mean_loss(window, e, h), rel=1e-4)


def test_run_starts_from_bigrams(tmp_path):
    words = ("--untied", "--positions", "rope", "--set", "init_weights=bigrams", "--steps", "1")
    assert inside("train", *SMALL, *words, "--out", tmp_path / "run").returncode == 0
    assert losses(tmp_path / "run")[0] < 3.5  # ln 256 is 5.5


def test_bigrams_reject_tied_output():
    with pytest.raises(UsageError, match="init_weights to unit"):
        ModelConfig(init_weights="bigrams")
