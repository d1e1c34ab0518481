"""Causal attention in bfloat16 through cuDNN, planned once per shape."""

from __future__ import annotations

import importlib
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distgpt.core.base.errors import DistgptError, Say, first_line
from distgpt.core.ops.api import Array, AttentionMask
from distgpt.gpu import probe
from distgpt.gpu.attention import OwnAttention
from distgpt.gpu.device import Launcher, address

LIBRARY = "libcudnn.so.9"
FRONTEND = "nvidia-cudnn-frontend>=1.28,<1.33"  # the same as in pyproject.toml
HOPPER = (9, 0)
# cuDNN is not faster on an H100 for training on sequences up to this length, so no plan is made.
SHORT = 256
SLOWER = "attention uses distgpt's own kernels, which are probably slower than cuDNN's"

# IDs of a graph's tensors.
Q, K, V, Y, STATS, DY, DQ, DK, DV = range(1, 10)

# Kernels that the frontend contains and compiles in planning. cuDNN's own kernels need no compiler.
_NOT_CUDNN = ["sdpa_fwd_", "sdpa_bwd_"]


class Shape(NamedTuple):
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
        kv = [self.n_seq, self.n_kv_head, self.seq_len, self.head]
        return [self.sizes, kv, kv]

    @property
    def stats(self) -> dict[str, list[int]]:
        sizes = [self.n_seq, self.n_head, self.seq_len, 1]
        return {"dim": sizes, "stride": [self.n_head * self.seq_len, self.seq_len, 1, 1]}

    def strides(self, heads: int) -> list[int]:
        """Return the strides of (B, H, T, D) in a matrix whose rows have `heads` heads."""
        row = heads * self.head
        return [self.seq_len * row, self.head, row, 1]

    @property
    def plain(self) -> list[int]:
        return self.strides(self.n_head)

    @property
    def packed(self) -> list[int]:
        return self.strides(self.n_head + 2 * self.n_kv_head)

    def addresses(self, uids: tuple[int, int, int], packed: Array) -> dict[int, int]:
        """Return the addresses of the three parts of a packed array, which are adjacent in its first row."""
        columns = 0, self.n_head * self.head, (self.n_head + self.n_kv_head) * self.head
        return {uid: address(packed) + 2 * column for uid, column in zip(uids, columns, strict=True)}


def why_not(head: int, capability: tuple[int, int], cuda: int) -> str | None:
    """Return why cuDNN attention is unavailable and how to enable it, or None.

    `capability`: the GPU's compute capability. `cuda`: the CUDA version (12 or 13) in use.
    """
    widest = 256 if capability >= HOPPER else 128
    if head % 8 or not 0 < head <= widest:
        return f"cuDNN's attention requires head sizes that are multiples of 8 up to {widest}, not {head}"
    try:
        frontend().backend_version()
    except (ImportError, RuntimeError) as error:  # the package or cuDNN is missing
        return f"{first_line(error)}: pip install nvidia-cudnn-cu{cuda} '{FRONTEND}'"
    return None


def frontend() -> Any:
    """Import NVIDIA's package. It finds cuDNN in LD_LIBRARY_PATH, in the environment, or if it is loaded."""
    named = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    if not any(folder and Path(folder, LIBRARY).exists() for folder in named):
        probe.load_library([LIBRARY])
    return importlib.import_module("cudnn")


def forward_graph(shape: Shape, handle: Any) -> Any:
    """Graph of y, stats ← attention(q, k, v). stats are the logarithms of the softmax denominators."""
    graph = _graph("attention", handle)
    inputs = _packed(graph, shape)
    y, stats = graph.sdpa(**inputs, generate_stats=True, name="attention", **_causal(shape))
    y.set_output(True).set_uid(Y).set_dim(shape.sizes).set_stride(shape.plain)
    stats.set_output(True).set_uid(STATS).set_data_type(frontend().data_type.FLOAT)
    stats.set_dim(shape.stats["dim"]).set_stride(shape.stats["stride"])
    return graph


def backward_graph(shape: Shape, handle: Any, deterministic: bool) -> Any:
    """Graph of dq, dk, dv, from dy and the results of the forward pass."""
    types = frontend().data_type
    graph = _graph("attention_backward", handle)
    inputs = _packed(graph, shape)
    for argument, name, uid in (("o", "y", Y), ("dO", "dy", DY)):
        inputs[argument] = graph.tensor(
            dim=shape.sizes, stride=shape.plain, data_type=types.BFLOAT16, name=name, uid=uid
        )
    inputs["stats"] = graph.tensor(**shape.stats, data_type=types.FLOAT, name="stats", uid=STATS)
    options = {"use_deterministic_algorithm": deterministic, "name": "attention_backward"}
    gradients = graph.sdpa_backward(**inputs, **options, **_causal(shape))
    for gradient, uid, sizes in zip(gradients, (DQ, DK, DV), shape.parts, strict=True):
        gradient.set_output(True).set_uid(uid).set_dim(sizes)
        gradient.set_stride(shape.packed)
    return graph


class _Plan(NamedTuple):
    graph: Any
    workspace: Array | None


class CudnnAttention(OwnAttention):
    """Attention through cuDNN. Masks must have neither positions nor a window.

    A shape's plans are made, and memory is allocated, when it first occurs: run the work once before
    recording it. Short sequences, and passes that cuDNN cannot plan (reported through `say`), use the
    kernels of distgpt. Both compute the same statistics.
    """

    def __init__(self, launcher: Launcher, say: Say) -> None:
        super().__init__(launcher)
        self._device, self._say = launcher.device, say
        self._handle: Any = None
        self._cudnn_plans: dict[tuple[Shape, bool], _Plan | None] = {}

    def forward(self, y: Array, lse: Array, qkv: Array, mask: AttentionMask) -> None:
        shape = _shape(y, lse, qkv, mask)
        if plan := self._cudnn_plan(shape, False):
            tensors = {Y: address(y), STATS: address(lse), **shape.addresses((Q, K, V), qkv)}
            self._execute(plan, tensors)
        else:
            super().forward(y, lse, qkv, mask)

    def backward(
        self, dqkv: Array, dy: Array, y: Array, lse: Array, qkv: Array, mask: AttentionMask, sums: bool
    ) -> Array | None:
        """Compute dqkv, without sums."""
        shape = _shape(y, lse, qkv, mask)
        if (plan := self._cudnn_plan(shape, True)) is None:
            return super().backward(dqkv, dy, y, lse, qkv, mask, sums)
        tensors = {Y: address(y), STATS: address(lse), DY: address(dy)}
        self._execute(plan, tensors | shape.addresses((Q, K, V), qkv) | shape.addresses((DQ, DK, DV), dqkv))
        return None

    def _execute(self, plan: _Plan, tensors: dict[int, int]) -> None:
        memory = None if plan.workspace is None else address(plan.workspace)
        try:
            plan.graph.execute(tensors, memory, handle=self._handle)
        except Exception as error:  # NVIDIA's code may raise any type
            raise DistgptError(f"cuDNN's attention failed: {first_line(error)}") from error

    def _cudnn_plan(self, shape: Shape, backward: bool) -> _Plan | None:
        key = (shape, backward)
        if key not in self._cudnn_plans:
            try:
                self._cudnn_plans[key] = None if shape.seq_len <= SHORT else self._planned(shape, backward)
            except Exception as error:  # NVIDIA's code may raise any type, and there is a fallback
                self._cudnn_plans[key] = None
                self._say(f"{SLOWER}, for sequences of {shape.seq_len}: {first_line(error)}")
        return self._cudnn_plans[key]

    def _planned(self, shape: Shape, backward: bool) -> _Plan:
        cudnn = frontend()
        if self._handle is None:
            self._handle = cudnn.create_handle()
            cudnn.set_stream(self._handle, self._device.stream.ptr)
        if backward:
            graph = backward_graph(shape, self._handle, self._device.deterministic)
        else:
            graph = forward_graph(shape, self._handle)
        graph.validate()
        graph.build_operation_graph()
        graph.deselect_engines(_NOT_CUDNN)
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        n_bytes = int(graph.get_workspace_size())
        return _Plan(graph, self._device.zeros((n_bytes,), np.dtype(np.uint8)) if n_bytes else None)


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


def _packed(graph: Any, shape: Shape) -> dict[str, Any]:
    strides, stored = shape.packed, frontend().data_type.BFLOAT16
    return {
        name: graph.tensor(dim=sizes, stride=strides, data_type=stored, name=name, uid=uid)
        for name, uid, sizes in zip("qkv", (Q, K, V), shape.parts, strict=True)
    }


def _causal(shape: Shape) -> dict[str, Any]:
    return {
        "attn_scale": 1 / math.sqrt(shape.head),
        "diagonal_alignment": frontend().diagonal_alignment.TOP_LEFT,
        "diagonal_band_right_bound": 0,
    }


def _shape(y: Array, lse: Array, qkv: Array, mask: AttentionMask) -> Shape:
    (rows, width), n_head = y.shape, lse.shape[1]
    head = width // n_head
    return Shape(rows // mask.seq_len, mask.seq_len, n_head, (qkv.shape[1] - width) // (2 * head), head)
