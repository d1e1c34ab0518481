"""Gradients of weights on a second stream: the same bits, whatever the two streams leave open."""

import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from devices import needs_the_processor
from fakecupy import CudaError
from hostgpu import HostDevice, host_lt
from models import VARIANTS
from steps import build_step
from test_cuda_model import TRAIN
from test_gradsync_gpu import CONFIG, MODEL, batches, on_gpus, same

from distgpt.comm.serial import SerialComm
from distgpt.config import GpuConfig
from distgpt.data.batches import ArrayTokens, Batches
from distgpt.gpu import accelerator
from distgpt.gpu.device import FIRST_STREAM, SECOND_STREAM, SecondStream
from distgpt.gpu.kernels import CudaKernels
from distgpt.gpu.matmul import LtMatmul
from distgpt.model import passes
from distgpt.model.model import Model
from distgpt.model.optim import AdamW
from distgpt.training.exchange import overlapped as buckets

pytestmark = needs_the_processor

LATE, EARLY, DRAWN = "late", "early", "drawn"  # when the second stream does its work
KEPT = replace(TRAIN, recompute="none")


def kernels_on(device, dtype, aside):
    kernels = CudaKernels(device, LtMatmul(host_lt(device.xp), device), dtype, has_second_stream=aside)
    # As with the second stream: the same sums in the same order.
    kernels.capabilities = replace(kernels.capabilities, sums_bias_gradients=False)
    return kernels


def trained(config, dtype, aside, when=LATE, train=KEPT, steps=3):
    """Weights, losses and norms of some steps: run, recorded, repeated."""
    device = HostDevice()
    device.xp.hasty, device.xp.drawn = when == EARLY, random.Random(5) if when == DRAWN else None
    found = trained_on(kernels_on(device, dtype, aside), config, train, steps)
    device.xp.check()
    return found


def trained_on(kernels, config, train=KEPT, steps=5):
    model = Model(config, kernels)
    model.train()
    model.initialise(3)
    text = np.random.default_rng(0).zipf(1.5, 400) % config.vocab_size
    data = Batches(ArrayTokens(text.astype(np.int32)), config.seq_len, train.batch_size, train.seed, True)
    work = build_step(AdamW(model, train), SerialComm(), train)
    outcomes = np.array([work.launch(step, data).read() for step in range(steps)])
    return np.append(outcomes, model.kernels.to_host(model.weights.flat))


LAYERS = {"gpt2": 3, "modern": 2, "scaled queries": 3}
SHAPES = {name: replace(VARIANTS[name], n_layer=layers) for name, layers in LAYERS.items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SHAPES)
def test_a_second_stream_changes_no_bit(kind):
    expected = trained(SHAPES[kind], "bfloat16", aside=False)
    for when in (LATE, EARLY, DRAWN):
        np.testing.assert_array_equal(trained(SHAPES[kind], "bfloat16", True, when), expected, err_msg=when)


@pytest.mark.parametrize("recompute", ["mlp", "block"])
def test_where_layers_share_activations_no_layer_begins_before_the_weights_of_the_last(recompute):
    train = replace(KEPT, recompute=recompute)
    expected = trained(SHAPES["gpt2"], "float32", False, train=train)
    for when in (LATE, EARLY):
        found = trained(SHAPES["gpt2"], "float32", True, when, train)
        np.testing.assert_array_equal(found, expected)


def graph_of(aside):
    """The work of a recorded backward pass, as streams and what waits for what."""
    device = HostDevice()
    model = Model(SHAPES["gpt2"], kernels_on(device, "float32", aside))
    n, seq_len = 2, model.config.seq_len
    work = passes.Pass(model, n, seq_len, training=True, recompute="none")
    ids = model.kernels.integers(np.arange(n * seq_len) % model.config.vocab_size)
    step = lambda: work.loss_and_gradients(ids, ids, 1.0, accumulate=False)  # noqa: E731
    step()
    return device.capture(step)._captured


def test_weights_of_a_layer_are_beside_the_layer_below():
    captured = graph_of(aside=False)
    assert {stream for stream, _, _ in captured.works} == {captured.origin}
    captured = graph_of(aside=True)
    other = [i for i, (stream, _, _) in enumerate(captured.works) if stream is not captured.origin]
    free = 0
    for i, (stream, _, behind) in enumerate(captured.works):
        before = captured.all_behind(behind)
        free += stream is captured.origin and any(j not in before for j in other if j < i)
    layers = SHAPES["gpt2"].n_layer
    assert len(other) >= 4 * layers and free >= 7 * layers


@pytest.mark.slow
def test_the_stand_in_notices_what_is_left_out(monkeypatch):
    """Each alone is a wrong number or a capture that CUDA refuses."""
    kinds = ("gpt2", "scaled queries")
    expected = {kind: trained(SHAPES[kind], "float32", aside=False) for kind in kinds}

    def is_noticed(kind="gpt2"):
        for when in (LATE, EARLY):
            try:
                found = trained(SHAPES[kind], "float32", True, when)
            except CudaError:
                return True
            if not np.array_equal(found, expected[kind]):
                return True
        return False

    assert not is_noticed()
    with monkeypatch.context() as patch:  # the weights of a layer begin before its gradients are there
        after = HostDevice.after

        def unforked(device, stream, other):
            after(device, stream, other)
            stream.behind = stream.behind if stream is device.stream else frozenset()

        patch.setattr(HostDevice, "after", unforked)
        assert is_noticed()
    with monkeypatch.context() as patch:  # nobody waits for them
        patch.setattr(SecondStream, "join", lambda self: None)
        assert is_noticed()
    rotate = passes.Rows.rotate
    for ring in passes.BUFFERS:  # the layer below writes over what they read
        with monkeypatch.context() as patch:

            def sharing(rows, names, steps=1, ring=ring):
                rotate(rows, ring if names[: len(ring)] == ring else names, steps)

            patch.setattr(passes.Rows, "rotate", sharing)
            assert is_noticed("scaled queries" if ring == ("dgain",) else "gpt2"), ring


def test_buckets_that_leave_early_are_final(monkeypatch):
    """NCCL is called between parts of the recorded pass, each of which has joined the second stream."""
    monkeypatch.setattr(buckets, "LARGE_BUCKET", 5000)
    kept = replace(CONFIG, recompute="none")

    def act(comm, device, config, aside):
        device.xp.drawn = random.Random(comm.rank)
        model = Model(MODEL, kernels_on(device, "float32", aside))
        model.train(comm.size)
        model.initialise(1)
        work = build_step(AdamW(model, config), comm, config)
        read = [work.launch(step, batches()).read() for step in range(3)]
        return model.kernels.to_host(model.params.flat).copy(), read

    packed = on_gpus(2, lambda comm, device: act(comm, device, kept, False))
    overlapped = replace(kept, grad_sync="overlapped")
    found = on_gpus(2, lambda comm, device: act(comm, device, overlapped, True))
    assert same(found, packed)


def test_it_is_off_unless_turned_on_and_needs_graphs(monkeypatch):
    monkeypatch.setattr(accelerator, "_matmuls", lambda device, options: None)
    for value, graphs in product(("", "0", "1"), (True, False)):
        monkeypatch.setenv(SECOND_STREAM, value)
        kernels = accelerator.kernels_on(HostDevice(), "float32", GpuConfig(graphs=graphs), print)
        assert kernels.capabilities.has_second_stream == (value == "1" and graphs)
        assert accelerator.kernels_for_estimate("float32", None).capabilities.has_second_stream == (
            value == "1"
        )


def test_the_first_stream_goes_before_the_second_where_that_is_asked_for(monkeypatch):
    for value, priority in (("", None), ("0", None), ("1", -1)):
        monkeypatch.setenv(FIRST_STREAM, value)
        device = HostDevice()
        assert (device.stream.priority, device.second_stream().priority) == (priority, None)
