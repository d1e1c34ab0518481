"""Causal attention in bfloat16 through cuDNN, planned once per shape and checked against our own kernels."""

from __future__ import annotations

import importlib
import importlib.metadata
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from distgpt.core.base.errors import DistgptError, first_line
from distgpt.core.ops.api import Array, AttentionMask
from distgpt.gpu import probe
from distgpt.gpu.attention import Attention
from distgpt.gpu.device import CupyDevice, address, floats
from distgpt.gpu.probe import (
    FRONTEND,
    FRONTEND_OLDEST,
    FRONTEND_TOO_NEW,
    OLDEST_BFLOAT16,
    frontend_bounds,
)

LIBRARY = "libcudnn.so.9"
HOPPER = (9, 0)

# Identifiers of a graph's tensors.
Q, K, V, Y, STATS, DY, DQ, DK, DV = range(1, 10)

# Kernels that the frontend itself brings and compiles when they are planned. cuDNN's own need no compiler.
_NOT_CUDNN = ["sdpa_fwd_", "sdpa_bwd_"]


class CudnnRefusal(DistgptError):
    """cuDNN cannot compute this attention: use another implementation."""


@dataclass(frozen=True, slots=True)
class Shape:
    """B sequences of T tokens with H heads of size D, packed as (B·T, (H + 2K)·D) and (B·T, H·D)."""

    n_seq: int
    seq_len: int
    n_head: int
    n_kv_head: int
    head: int

    @property
    def sizes(self) -> list[int]:
        return [self.n_seq, self.n_head, self.seq_len, self.head]

    @property
    def parts(self) -> list[list[int]]:
        """Return the sizes of q, k and v."""
        kv = [self.n_seq, self.n_kv_head, self.seq_len, self.head]
        return [self.sizes, kv, kv]

    @property
    def starts(self) -> list[int]:
        """Return the columns at which q, k and v begin."""
        return [0, self.channels, self.channels + self.n_kv_head * self.head]

    @property
    def channels(self) -> int:
        return self.n_head * self.head

    @property
    def packed(self) -> int:
        """Return the columns of q, k and v together."""
        return (self.n_head + 2 * self.n_kv_head) * self.head

    @property
    def stats(self) -> dict[str, list[int]]:
        """Sizes and strides of the softmax's statistics."""
        sizes = [self.n_seq, self.n_head, self.seq_len, 1]
        return {"dim": sizes, "stride": [self.n_head * self.seq_len, self.seq_len, 1, 1]}

    def strides(self, row: int) -> list[int]:
        """Return the strides of (B, H, T, D) in a matrix whose rows have `row` elements."""
        return [self.seq_len * row, self.head, row, 1]


@dataclass(frozen=True, slots=True)
class _Plan:
    graph: Any
    workspace: Array | None
    address: int | None


def why_not(head: int, capability: tuple[int, int], cuda: int) -> str | None:
    """Return why cuDNN attention is unavailable and how to enable it, or None.

    `capability`: the GPU's compute capability; `cuda`: the CUDA version (12 or 13) in use.
    """
    if capability < OLDEST_BFLOAT16:
        return f"cuDNN's attention needs compute capability 8.0, this GPU has {capability[0]}.{capability[1]}"
    widest = 256 if capability >= HOPPER else 128
    if head % 8 or not 0 < head <= widest:
        return f"cuDNN's attention needs head sizes in multiples of 8 up to {widest}, not {head}"
    bounds = frontend_bounds()
    install = f"pip install '{FRONTEND}{bounds}'"
    try:
        version = importlib.metadata.version(FRONTEND)
        cudnn = frontend()
    except importlib.metadata.PackageNotFoundError:
        return f"{FRONTEND} is not installed: {install}"
    except ImportError as error:
        return f"{FRONTEND} {version} does not load ({error}): {install} --force-reinstall"
    if not FRONTEND_OLDEST <= tuple(map(int, version.split(".")[:2])) < FRONTEND_TOO_NEW:
        return f"{FRONTEND} {version} is not {bounds}: {install}"
    try:
        cudnn.backend_version()
    except RuntimeError:
        return f"cuDNN itself ({LIBRARY}) was not found: pip install nvidia-cudnn-cu{cuda}"
    return None


def frontend() -> Any:
    """Import NVIDIA's package; it finds a cuDNN in LD_LIBRARY_PATH, in its environment, or loaded already."""
    named = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    if not any(folder and Path(folder, LIBRARY).exists() for folder in named):
        probe.load_library([LIBRARY])
    return importlib.import_module("cudnn")


def forward_graph(shape: Shape, handle: Any) -> Any:
    """y, stats ← attention of q, k, v; stats are the logarithms of the softmax's denominators."""
    graph = _graph("attention", handle)
    q, k, v = _packed(graph, shape)
    y, stats = graph.sdpa(q=q, k=k, v=v, generate_stats=True, name="attention", **_causal(shape))
    y.set_output(True).set_uid(Y).set_dim(shape.sizes).set_stride(shape.strides(shape.channels))
    stats.set_output(True).set_uid(STATS).set_data_type(frontend().data_type.FLOAT)
    stats.set_dim(shape.stats["dim"]).set_stride(shape.stats["stride"])
    return graph


def backward_graph(shape: Shape, handle: Any, deterministic: bool) -> Any:
    """dq, dk, dv ← gradients of attention, from dy and what the forward pass gave."""
    types = frontend().data_type
    graph = _graph("attention_backward", handle)
    q, k, v = _packed(graph, shape)
    strides = shape.strides(shape.channels)
    y = graph.tensor(dim=shape.sizes, stride=strides, data_type=types.BFLOAT16, name="y", uid=Y)
    dy = graph.tensor(dim=shape.sizes, stride=strides, data_type=types.BFLOAT16, name="dy", uid=DY)
    stats = graph.tensor(**shape.stats, data_type=types.FLOAT, name="stats", uid=STATS)
    gradients = graph.sdpa_backward(
        q=q,
        k=k,
        v=v,
        o=y,
        dO=dy,
        stats=stats,
        use_deterministic_algorithm=deterministic,
        name="attention_backward",
        **_causal(shape),
    )
    for gradient, uid, sizes in zip(gradients, (DQ, DK, DV), shape.parts, strict=True):
        gradient.set_output(True).set_uid(uid).set_dim(sizes)
        gradient.set_stride(shape.strides(shape.packed))
    return graph


class CudnnAttention:
    """Implements `Attention`, on one device.

    A shape's plans are made when it first comes, and only then memory is allocated: run the work once before
    recording it. Raises CudnnRefusal where cuDNN has no plan, or fails.
    """

    def __init__(self, device: CupyDevice) -> None:
        self._device = device
        self._handle: Any = None
        self._plans: dict[tuple[Shape, bool], _Plan] = {}

    def forward(self, y: Array, lse: Array, qkv: Array, mask: AttentionMask) -> None:
        shape = _shape(y, lse, qkv, mask)
        tensors = {Y: address(y), STATS: address(lse), **self._parts((Q, K, V), qkv, shape)}
        self._execute(shape, False, tensors)

    def backward(
        self,
        dqkv: Array,
        dy: Array,
        y: Array,
        lse: Array,
        qkv: Array,
        mask: AttentionMask,
        sums: bool = False,
    ) -> None:
        """Compute dqkv; cuDNN has no sums."""
        shape = _shape(y, lse, qkv, mask)
        tensors = {Y: address(y), STATS: address(lse), DY: address(dy)}
        tensors |= self._parts((Q, K, V), qkv, shape) | self._parts((DQ, DK, DV), dqkv, shape)
        self._execute(shape, True, tensors)

    def _parts(self, uids: tuple[int, int, int], packed: Array, shape: Shape) -> dict[int, int]:
        """Return the addresses of the three parts of a packed array, side by side in its first row."""
        return {uid: address(packed) + 2 * start for uid, start in zip(uids, shape.starts, strict=True)}

    def _execute(self, shape: Shape, backward: bool, tensors: dict[int, int]) -> None:
        plan = self._plan(shape, backward)
        try:
            plan.graph.execute(tensors, plan.address, handle=self._handle)
        except Exception as error:  # of any type: NVIDIA's code
            raise CudnnRefusal(f"cuDNN's attention fails: {first_line(error)}") from error

    def _plan(self, shape: Shape, backward: bool) -> _Plan:
        key = (shape, backward)
        if key not in self._plans:
            handle = self._on_stream()
            if backward:
                graph = backward_graph(shape, handle, self._device.deterministic)
            else:
                graph = forward_graph(shape, handle)
            n_bytes = _planned(graph, shape)
            workspace = self._device.zeros((n_bytes,), np.dtype(np.uint8)) if n_bytes else None
            self._plans[key] = _Plan(graph, workspace, None if workspace is None else address(workspace))
        return self._plans[key]

    def _on_stream(self) -> Any:
        if self._handle is None:
            cudnn = frontend()
            try:
                handle = cudnn.create_handle()
                cudnn.set_stream(handle, self._device.stream.ptr)
            except RuntimeError as error:
                raise CudnnRefusal(f"cuDNN does not start: {first_line(error)}") from error
            self._handle = handle
        return self._handle


def _planned(graph: Any, shape: Shape) -> int:
    """Build cuDNN's plan for a graph; return the bytes of workspace it needs."""
    modes = frontend().heur_mode
    try:
        graph.validate()
        graph.build_operation_graph()
        graph.deselect_engines(_NOT_CUDNN)
        graph.create_execution_plans([modes.A, modes.FALLBACK])
        graph.check_support()
        graph.build_plans()
        return int(graph.get_workspace_size())
    except Exception as error:  # of any type: planning is NVIDIA's code, and there is another way
        what = f"{shape.n_seq} x {shape.seq_len} tokens with {shape.n_head} heads of {shape.head}"
        raise CudnnRefusal(f"cuDNN has no plan for attention over {what}: {first_line(error)}") from error


def _graph(name: str, handle: Any) -> Any:
    cudnn = frontend()
    types = cudnn.data_type
    return cudnn.pygraph(
        name=name,
        io_data_type=types.BFLOAT16,
        intermediate_data_type=types.FLOAT,
        compute_data_type=types.FLOAT,
        handle=handle,
    )


def _packed(graph: Any, shape: Shape) -> list[Any]:
    """Make q, k and v."""
    strides, stored = shape.strides(shape.packed), frontend().data_type.BFLOAT16
    return [
        graph.tensor(dim=sizes, stride=strides, data_type=stored, name=name, uid=uid)
        for name, uid, sizes in zip("qkv", (Q, K, V), shape.parts, strict=True)
    ]


def _causal(shape: Shape) -> dict[str, Any]:
    """Options for causal attention."""
    return {
        "attn_scale": 1 / math.sqrt(shape.head),
        "diagonal_alignment": frontend().diagonal_alignment.TOP_LEFT,
        "diagonal_band_right_bound": 0,
    }


def _shape(y: Array, lse: Array, qkv: Array, mask: AttentionMask) -> Shape:
    (rows, width), n_head = y.shape, lse.shape[1]
    head = width // n_head
    return Shape(rows // mask.seq_len, mask.seq_len, n_head, (qkv.shape[1] - width) // (2 * head), head)


# -- the check against our own kernels

DISTANCE = 0.03  # relative, between two ways that both round to bfloat16; a wrong one is off by 1
# Training on sequences of up to this many tokens is as fast without cuDNN on an H100, and nothing is planned.
SHORT = 256
SLOWER = "attention runs on our own kernels, which should be slower than cuDNN's"

Batch = tuple[int, int]  # rows, tokens of a sequence


class CheckedAttention:
    """Implements `Attention`.

    Short sequences use our own kernels. The first sequence of a longer shape runs through both, and the
    results are compared. Where the library refuses, fails or differs, `say` reports it and the shape keeps
    our own. Work is run once before it is recorded, so that nothing is checked while recording.
    """

    def __init__(
        self, device: CupyDevice, library: Attention, own: Attention, say: Callable[[str], None]
    ) -> None:
        self._device, self._library, self._own, self._say = device, library, own, say
        self._forward: dict[Batch, Attention] = {}
        self._backward: dict[Batch, Attention] = {}

    def forward(self, y: Array, lse: Array, qkv: Array, mask: AttentionMask) -> None:
        key = (len(y), mask.seq_len)
        if key not in self._forward:
            works = mask.seq_len > SHORT and self._works(
                mask.seq_len, lambda: self._forward_agrees(y, lse, qkv, mask)
            )
            self._forward[key] = self._library if works else self._own
        self._forward[key].forward(y, lse, qkv, mask)

    def backward(
        self,
        dqkv: Array,
        dy: Array,
        y: Array,
        lse: Array,
        qkv: Array,
        mask: AttentionMask,
        sums: bool = False,
    ) -> Array | None:
        key, args = (len(y), mask.seq_len), (dqkv, dy, y, lse, qkv, mask)
        if key not in self._backward:
            works = self._forward[key] is self._library and self._works(
                mask.seq_len, lambda: self._backward_agrees(*args)
            )
            if self._forward[key] is not self._own and not works:
                self._forward[key] = self._own
                self._own.forward(y, lse, qkv, mask)  # as if it had been ours from the start
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

    def _forward_agrees(self, y: Array, lse: Array, qkv: Array, mask: AttentionMask) -> float:
        """The relative distance of the first sequence's results."""
        self._library.forward(y, lse, qkv, mask)
        own_y, own_lse = self._own_results(y, lse, qkv, mask)
        # The statistics too: layers that the library has passed may be left to our own on the way back.
        first = lse.reshape(-1)[: own_lse.size]
        return max(self._distance(y[: mask.seq_len], own_y), self._distance(first, own_lse.reshape(-1)))

    def _backward_agrees(
        self, dqkv: Array, dy: Array, y: Array, lse: Array, qkv: Array, mask: AttentionMask
    ) -> float:
        self._library.backward(dqkv, dy, y, lse, qkv, mask)
        first = slice(0, mask.seq_len)
        own_y, own_lse = self._own_results(y, lse, qkv, mask)
        own = self._device.zeros((mask.seq_len, dqkv.shape[1]), dqkv.dtype)
        self._own.backward(own, dy[first], own_y, own_lse, qkv[first], mask)
        return self._distance(dqkv[first], own)

    def _own_results(self, y: Array, lse: Array, qkv: Array, mask: AttentionMask) -> tuple[Array, Array]:
        own_y = self._device.zeros((mask.seq_len, y.shape[1]), y.dtype)
        own_lse = self._device.zeros((mask.seq_len, lse.shape[1]), lse.dtype)
        self._own.forward(own_y, own_lse, qkv[: mask.seq_len], mask)
        return own_y, own_lse

    def _distance(self, found: Array, expected: Array) -> float:
        a, b = (floats(self._device.download(array)) for array in (found, expected))
        size = float(np.linalg.norm(b))
        distance = float(np.linalg.norm(a - b))
        return distance / size if size else distance
