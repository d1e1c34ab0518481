"""A library's attention, tried and checked against our own the first time a shape comes; else our own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from distgpt.gpu.api import TYPE_OF, Attention
from distgpt.gpu.cudnn_attention import CudnnRefusal
from distgpt.gpu.device import CupyDevice
from distgpt.kernels.api import Array
from distgpt.kernels.low_precision import from_bfloat16

DISTANCE = 0.03  # relative, between two ways that both round to bfloat16; a wrong one is off by 1
# Training on sequences up to so many tokens is as fast without cuDNN on an H100, and nothing is planned.
SHORT = 256
SLOWER = "attention runs on our own kernels, which should be slower than cuDNN's"

Shape = tuple[int, int]  # rows, tokens of a sequence


class CheckedAttention:
    """Implements `distgpt.gpu.api.Attention`.

    Short sequences are our own's at once. Of a longer shape the first sequence goes through both ways. Where
    the library refuses, fails or differs, `say` is told so and the shape stays with our own. Work is run once
    before it is recorded, so that nothing is checked while recording.
    """

    def __init__(
        self, device: CupyDevice, library: Attention, own: Attention, say: Callable[[str], None]
    ) -> None:
        self._device, self._library, self._own, self._say = device, library, own, say
        self._forward: dict[Shape, Attention] = {}
        self._backward: dict[Shape, Attention] = {}

    def forward(self, y: Array, lse: Array, qkv: Array, seq_len: int, n_head: int) -> None:
        key = (len(y), seq_len)
        if key not in self._forward:
            works = seq_len > SHORT and self._works(
                seq_len, lambda: self._forward_agrees(y, lse, qkv, seq_len, n_head)
            )
            self._forward[key] = self._library if works else self._own
        self._forward[key].forward(y, lse, qkv, seq_len, n_head)

    def backward(
        self,
        dqkv: Array,
        dy: Array,
        y: Array,
        lse: Array,
        qkv: Array,
        seq_len: int,
        n_head: int,
        sums: bool = False,
    ) -> Array | None:
        key, args = (len(y), seq_len), (dqkv, dy, y, lse, qkv, seq_len, n_head)
        if key not in self._backward:
            works = self._forward[key] is self._library and self._works(
                seq_len, lambda: self._backward_agrees(*args)
            )
            if self._forward[key] is not self._own and not works:
                self._forward[key] = self._own
                self._own.forward(y, lse, qkv, seq_len, n_head)  # as if it had been ours from the start
            self._backward[key] = self._forward[key]
        return self._backward[key].backward(*args, sums)

    def _works(self, seq_len: int, difference: Callable[[], float]) -> bool:
        """Try it: whether it agrees with our own."""
        try:
            found = difference()
        except CudnnRefusal as refusal:
            reason = str(refusal)
        else:
            if found <= DISTANCE:
                return True
            reason = f"its results differ from ours by {found:.2g}: please report this"
        self._say(f"{SLOWER}, for sequences of {seq_len}: {reason}")
        return False

    def _forward_agrees(self, y: Array, lse: Array, qkv: Array, seq_len: int, n_head: int) -> float:
        """The relative distance of the first sequence's results."""
        self._library.forward(y, lse, qkv, seq_len, n_head)
        own_y, own_lse = self._own_results(y, lse, qkv, seq_len, n_head)
        # The statistics too: layers that the library has passed may be left to our own on the way back.
        first = lse.reshape(-1)[: own_lse.size]
        return max(self._distance(y[:seq_len], own_y), self._distance(first, own_lse.reshape(-1)))

    def _backward_agrees(
        self, dqkv: Array, dy: Array, y: Array, lse: Array, qkv: Array, seq_len: int, n_head: int
    ) -> float:
        self._library.backward(dqkv, dy, y, lse, qkv, seq_len, n_head)
        first = slice(0, seq_len)
        own_y, own_lse = self._own_results(y, lse, qkv, seq_len, n_head)
        own = self._device.zeros((seq_len, dqkv.shape[1]), dqkv.dtype)
        self._own.backward(own, dy[first], own_y, own_lse, qkv[first], seq_len, n_head)
        return self._distance(dqkv[first], own)

    def _own_results(
        self, y: Array, lse: Array, qkv: Array, seq_len: int, n_head: int
    ) -> tuple[Array, Array]:
        own_y = self._device.zeros((seq_len, y.shape[1]), y.dtype)
        own_lse = self._device.zeros((seq_len, n_head), lse.dtype)
        self._own.forward(own_y, own_lse, qkv[:seq_len], seq_len, n_head)
        return own_y, own_lse

    def _distance(self, found: Array, expected: Array) -> float:
        a, b = (_values(self._device.download(array)) for array in (found, expected))
        size = float(np.linalg.norm(b))
        distance = float(np.linalg.norm(a - b))
        return distance / size if size else distance


def _values(host: Any) -> Any:
    return from_bfloat16(host) if TYPE_OF[np.dtype(host.dtype)] == "bfloat16" else host
