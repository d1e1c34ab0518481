"""Training on a GPU against the serial stage, as a user would see it; small where there is no GPU."""

from dataclasses import replace

import numpy as np
import pytest
from devices import ON_GPU, cuda_kernels  # noqa: F401

from distgpt.comm.cores import usable_cores
from distgpt.comm.serial import SerialComm
from distgpt.config.presets import preset
from distgpt.data.batches import Batches
from distgpt.data.loading import DataRequest, load_corpus
from distgpt.kernels.cpu import CpuKernels
from distgpt.model.generate import Sampling, generate
from distgpt.model.model import Model
from distgpt.model.optim import AdamW
from distgpt.saved.modelfile import Description, fill, load_model, on_host, save_model
from distgpt.training.step import Step

STEPS = 50 if ON_GPU else 12
CPU = CpuKernels("float32", min(8, len(usable_cores())))


def course_project():
    """`gpt-mini` and its text; without a GPU a model of the same kind, the size of a test."""
    run = preset("gpt-mini")
    if not ON_GPU:
        small = replace(run.model, seq_len=16, n_layer=2, n_head=2, n_embd=32)
        run = replace(run, model=small, train=replace(run.train, batch_size=4, lr=1e-2))
    return run


@pytest.fixture(scope="module")
def corpus():
    run = course_project()
    found = load_corpus(SerialComm(), DataRequest(run.train.data, run.train.tokenizer, run.model.seq_len))
    return found.tokenizer, found.train


def trained(kernels, corpus, steps=STEPS):
    """The model after some steps, and their losses."""
    run, (tokenizer, tokens) = course_project(), corpus
    config, t = replace(run.model, vocab_size=tokenizer.size), replace(run.train, steps=steps)
    model = Model(config, kernels)
    model.train()
    model.initialise(t.seed)
    batches = Batches(tokens, config.seq_len, t.batch_size, t.seed, t.shift_windows)
    optimizer = AdamW(model, t)
    work = Step(model, optimizer, SerialComm(), replace(t, recompute="none"))
    losses = [work.launch(step, batches).read()[0] for step in range(steps)]
    return model, optimizer, np.array(losses)


@pytest.fixture(scope="module")
def serial(corpus):
    return trained(CPU, corpus)[2]


@pytest.mark.parametrize("dtype,tolerance", [("float32", 1e-4), ("bfloat16", 1e-2)])
def test_losses_are_those_of_the_serial_stage(dtype, tolerance, serial, corpus, cuda_kernels):
    losses = trained(cuda_kernels(dtype), corpus)[2]
    assert serial[-1] < 0.98 * serial[0]
    np.testing.assert_allclose(losses, serial, rtol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_change_no_bit(dtype, corpus, cuda_kernels):
    weights = []
    for graphs in (True, False):
        k = cuda_kernels(dtype, graphs=graphs, deterministic=True)
        weights.append(k.to_host(trained(k, corpus, steps=6)[0].weights.flat))
    np.testing.assert_array_equal(*weights)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_moves_between_stages_as_a_file(dtype, corpus, tmp_path, cuda_kernels):
    k, comm = cuda_kernels(dtype), SerialComm()
    model, _, _ = trained(k, corpus, steps=3)
    run, (tokenizer, _) = course_project(), corpus
    run = replace(run, model=model.config)
    path = tmp_path / "weights.safetensors"
    save_model(path, model, Description(run, tokenizer))
    moved, _ = load_model(path, CPU, comm)
    np.testing.assert_array_equal(moved.weights.flat, k.to_host(model.weights.flat))
    back, _ = load_model(path, k, comm)
    np.testing.assert_array_equal(k.to_host(back.params.flat), k.to_host(model.params.flat))
    tokens = [list(generate(each, [1, 2, 3], 8, Sampling(), comm)) for each in (model, back)]
    assert tokens[0] == tokens[1]
    if dtype == "float32":
        assert tokens[0] == list(generate(moved, [1, 2, 3], 8, Sampling(), comm))


def test_moments_survive_the_way_to_the_host_and_back(corpus, cuda_kernels):
    k = cuda_kernels("bfloat16")
    model, optimizer, _ = trained(k, corpus, steps=3)
    saved = on_host(model, optimizer.m, "m/")
    other = AdamW(model, course_project().train)
    fill(
        SerialComm(),
        model,
        {"m/": other.m},
        lambda host: [host[n].__setitem__(..., saved[n]) for n in host] and None,
    )
    np.testing.assert_array_equal(k.to_host(other.m.flat), k.to_host(optimizer.m.flat))
    assert np.abs(k.to_host(other.m.flat)).max() > 0
