"""A library's attention is tried once per shape, compared with our own, and left where it does not agree."""

import numpy as np
import pytest
from devices import device, needs_device, poisoning

from distgpt.core.ops.api import AttentionMask
from distgpt.gpu import cudnn_attention as module
from distgpt.gpu.attention import OwnAttention
from distgpt.gpu.cudnn_attention import CheckedAttention, CudnnRefusal
from distgpt.gpu.kernels import CudaKernels

pytestmark = needs_device

B, T, H, K, D = 3, 5, 4, 2, 16


@pytest.fixture(autouse=True)
def any_length(monkeypatch):
    """No sequence is too short for the library."""
    monkeypatch.setattr(module, "SHORT", 0)


class Library:
    """Our own kernels under another name, with one fault in one of the passes."""

    def __init__(self, own, fault=None, where=None):
        self.own, self.fault, self.where, self.calls = own, fault, where, []

    def forward(self, y, lse, qkv, mask):
        self._pass("forward", y, lambda: self.own.forward(y, lse, qkv, mask))
        if self.fault == "has other statistics":
            device().zero(lse)

    def backward(self, dqkv, dy, y, lse, qkv, mask, sums=False):
        self._pass("backward", dqkv, lambda: self.own.backward(dqkv, dy, y, lse, qkv, mask))

    def _pass(self, name, out, work):
        self.calls.append(name)
        if name == self.where and self.fault == "refuses":
            raise CudnnRefusal("no plan")
        work()
        if name == self.where and self.fault == "is wrong":
            device().zero(out)


def run(library, times=2):
    """Forward and backward, some times; what came out of the last, and what was said."""
    kernels = poisoning(CudaKernels(device(), None, "bfloat16"))
    said, draw = [], np.random.default_rng(3).standard_normal
    checked = CheckedAttention(device(), library, OwnAttention(kernels._launcher), said.append)
    qkv, dy = kernels.zeros(B * T, (H + 2 * K) * D), kernels.zeros(B * T, H * D)
    y, dqkv, lse = kernels.zeros(*dy.shape), kernels.zeros(*qkv.shape), kernels.wide_zeros(B * T, H)
    for array in (qkv, dy):
        kernels.put(array, draw(array.shape))
    for _ in range(times):
        checked.forward(y, lse, qkv, AttentionMask(T))
        checked.backward(dqkv, dy, y, lse, qkv, AttentionMask(T))
    return kernels.to_host(y), kernels.to_host(dqkv), said


def own():
    return OwnAttention(poisoning(CudaKernels(device(), None, "bfloat16"))._launcher)


def test_a_library_that_agrees_is_used_from_then_on_and_nothing_is_said():
    library = Library(own())
    *_, said = run(library, times=3)
    assert said == []
    assert library.calls == ["forward"] * 2 + ["backward"] * 2 + ["forward", "backward"] * 2  # a try each


@pytest.mark.parametrize("fault", ["refuses", "is wrong"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_library_that_refuses_or_is_wrong_is_left_with_a_note(fault, where):
    y, dqkv, _ = run(Library(own()))
    library = Library(own(), fault, where)
    found_y, found_dqkv, (said,) = run(library, times=3)
    np.testing.assert_array_equal(found_y, y)
    np.testing.assert_array_equal(found_dqkv, dqkv)
    assert ("no plan" if fault == "refuses" else "differ from ours by 1") in said
    assert library.calls.count(where) == 1 and library.calls.count("backward") <= 1


def test_a_library_with_statistics_of_its_own_is_left_at_once():
    """Layers that it has passed might come back to our own backward pass."""
    library = Library(own(), "has other statistics", "forward")
    *_, (said,) = run(library)
    assert "differ from ours by 1" in said and library.calls == ["forward"]


def test_short_sequences_are_our_own_s_at_once(monkeypatch):
    monkeypatch.setattr(module, "SHORT", T)
    library = Library(own(), "is wrong", "forward")
    *_, said = run(library)
    assert library.calls == said == []
