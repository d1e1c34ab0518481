"""cuDNN's attention without a GPU: NVIDIA's frontend builds and validates graphs, a fake executes them."""

from __future__ import annotations

import importlib.metadata
import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from distgpt.gpu import cudnn_attention as module
from distgpt.gpu.cudnn_attention import (
    DK,
    DQ,
    DV,
    DY,
    STATS,
    CudnnAttention,
    CudnnRefusal,
    K,
    Q,
    Shape,
    V,
    Y,
    backward_graph,
    forward_graph,
    why_not,
)

cudnn = pytest.importorskip("cudnn", reason="needs nvidia-cudnn-frontend")

B, T, H, D = 3, 7, 5, 16
C = H * D
STREAM = 1234
WORKSPACE = {"attention": 256, "attention_backward": 4096}
HOPPER = (9, 0)


@dataclass
class Journal:
    """What the fake was asked to do."""

    calls: list[str] = field(default_factory=list)
    executed: list[tuple[str, dict[int, int], int | None, Any]] = field(default_factory=list)
    streams: list[tuple[Any, int]] = field(default_factory=list)
    barred: list[str] = field(default_factory=list)
    allocated: list[int] = field(default_factory=list)
    refuses: Exception | None = None


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch) -> Journal:
    """The frontend with everything that needs a GPU replaced; building and validating stay NVIDIA's."""
    journal = Journal()

    class Graph(cudnn.pygraph):  # type: ignore[misc]
        def __init__(self, **options: Any) -> None:
            self.title = options["name"]
            super().__init__(**options)

        def build_operation_graph(self) -> None:
            assert self._is_validated
            journal.calls.append("operations")

        def deselect_engines(self, names: list[str]) -> Any:
            journal.barred += names
            return self

        def create_execution_plans(self, modes: list[Any]) -> None:
            journal.calls.append("plans")

        def check_support(self) -> None:
            journal.calls.append("support")
            if journal.refuses:
                raise journal.refuses

        def build_plans(self) -> None:
            journal.calls.append("build")

        def get_workspace_size(self) -> int:
            return WORKSPACE[self.title]

        def execute(self, tensors: dict[int, int], workspace: int | None, handle: Any) -> None:
            journal.executed.append((self.title, tensors, workspace, handle))

    fake = SimpleNamespace(
        pygraph=Graph,
        data_type=cudnn.data_type,
        heur_mode=cudnn.heur_mode,
        diagonal_alignment=cudnn.diagonal_alignment,
        cudnnGraphNotSupportedError=cudnn.cudnnGraphNotSupportedError,
        create_handle=lambda: cudnn.Handle(99, 0, 0),
        set_stream=lambda handle, stream: journal.streams.append((handle, stream)),
        backend_version=lambda: 92800,
    )
    monkeypatch.setattr(module, "frontend", lambda: fake)
    return journal


def attention(journal: Journal, deterministic: bool = False) -> CudnnAttention:
    def allocate(size: int) -> Any:
        journal.allocated.append(size)
        return np.zeros(size, np.uint8)

    return CudnnAttention(STREAM, allocate, lambda array: int(array.ctypes.data), deterministic)


def arrays(n_seq: int = B) -> SimpleNamespace:
    rows = n_seq * T
    return SimpleNamespace(
        qkv=np.zeros((rows, 3 * C), np.uint16),
        dqkv=np.zeros((rows, 3 * C), np.uint16),
        y=np.zeros((rows, C), np.uint16),
        dy=np.zeros((rows, C), np.uint16),
        lse=np.zeros((rows, H), np.float32),
    )


def tensors_of(graph: Any) -> dict[int, dict[str, Any]]:
    """By uid: what the validated graph says of each of its tensors."""
    return {tensor["uid"]: tensor for tensor in graph.inspect()["tensors"].values()}


def seen_by(tensor: dict[str, Any], memory: Any) -> Any:
    """The numbers that a tensor of the graph reads, if it begins at the begin of a flat array."""
    strides = [stride * memory.itemsize for stride in tensor["stride"]]
    return np.lib.stride_tricks.as_strided(memory, tensor["dim"], strides)


@pytest.mark.parametrize("deterministic", [False, True])
def test_both_graphs_are_valid_and_read_each_head_where_it_lies(deterministic: bool) -> None:
    shape = Shape(B, T, H, D)
    forward, backward = forward_graph(shape, None), backward_graph(shape, None, deterministic)
    for graph in (forward, backward):
        graph.validate()
    packed = np.arange(B * T * 3 * C)
    parts = packed.reshape(B, T, 3, H, D).transpose(2, 0, 3, 1, 4)
    plain = np.arange(B * T * C)
    heads = plain.reshape(B, T, H, D).transpose(0, 2, 1, 3)
    for graph, uids in ((forward, (Q, K, V)), (backward, (Q, K, V)), (backward, (DQ, DK, DV))):
        for i, uid in enumerate(uids):
            assert np.array_equal(seen_by(tensors_of(graph)[uid], packed[i * C :]), parts[i])
    for graph, uid in ((forward, Y), (backward, Y), (backward, DY)):
        assert np.array_equal(seen_by(tensors_of(graph)[uid], plain), heads)
    for graph in (forward, backward):
        stats = seen_by(tensors_of(graph)[STATS], np.arange(B * H * T))
        assert np.array_equal(stats[..., 0], np.arange(B * H * T).reshape(B, H, T))


def test_the_graphs_have_exactly_the_tensors_that_are_given_to_them() -> None:
    shape = Shape(B, T, H, D)
    forward, backward = forward_graph(shape, None), backward_graph(shape, None, True)
    assert set(tensors_of(forward)) == {Q, K, V, Y, STATS}
    assert set(tensors_of(backward)) == {Q, K, V, Y, DY, STATS, DQ, DK, DV}
    for graph in (forward, backward):
        graph.validate()
        for uid, tensor in tensors_of(graph).items():
            stored = cudnn.data_type.FLOAT if uid == STATS else cudnn.data_type.BFLOAT16
            assert tensor["dtype"] == str(stored)
            assert not tensor["is_virtual"]


@pytest.mark.parametrize("deterministic", [False, True])
def test_attention_is_causal_scaled_and_deterministic_if_asked(deterministic: bool) -> None:
    shape = Shape(B, T, H, D)
    (ahead,), (back,) = (
        graph.nodes for graph in (forward_graph(shape, None), backward_graph(shape, None, deterministic))
    )
    for node in (ahead, back):
        assert node.params["attn_scale"] == pytest.approx(1 / math.sqrt(D))
        assert node.params["diagonal_alignment"] == cudnn.diagonal_alignment.TOP_LEFT
        assert node.params["diagonal_band_right_bound"] == 0
    assert ahead.params["generate_stats"] is True
    assert back.params["use_deterministic_algorithm"] is deterministic
    wiring = {name: tensor.uid for name, tensor in {**back.inputs, **back.outputs}.items()}
    expected = {"q": Q, "k": K, "v": V, "o": Y, "dO": DY, "stats": STATS, "dQ": DQ, "dK": DK, "dV": DV}
    assert wiring == expected


def test_execution_is_given_the_address_of_each_part(journal: Journal) -> None:
    a, library = arrays(), attention(journal)
    library.forward(a.y, a.lse, a.qkv, T, H)
    library.backward(a.dqkv, a.dy, a.y, a.lse, a.qkv, T, H)
    parts = {uid: a.qkv[0, i * C :].ctypes.data for i, uid in enumerate((Q, K, V))}
    gradients = {uid: a.dqkv[0, i * C :].ctypes.data for i, uid in enumerate((DQ, DK, DV))}
    common = {Y: a.y.ctypes.data, STATS: a.lse.ctypes.data, **parts}
    (_, ahead, _, handle), (_, back, _, again) = journal.executed
    assert ahead == common
    assert back == {**common, **gradients, DY: a.dy.ctypes.data}
    assert handle is again
    assert journal.streams == [(handle, STREAM)]


def test_a_shape_is_planned_once_and_only_planning_allocates(journal: Journal) -> None:
    a, library = arrays(), attention(journal)
    library.prepare(B, T, H, D, backward=True)
    assert journal.calls == ["operations", "plans", "support", "build"] * 2
    assert journal.allocated == [256, 4096]
    for _ in range(3):
        library.forward(a.y, a.lse, a.qkv, T, H)
        library.backward(a.dqkv, a.dy, a.y, a.lse, a.qkv, T, H)
    assert journal.allocated == [256, 4096]
    assert len(journal.calls) == 8
    workspaces = {(title, workspace) for title, _, workspace, _ in journal.executed}
    assert len(workspaces) == 2
    assert None not in {workspace for _, workspace in workspaces}
    other = arrays(n_seq=1)
    library.forward(other.y, other.lse, other.qkv, T, H)
    assert journal.allocated == [256, 4096, 256]


def test_a_plan_without_workspace_allocates_none(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WORKSPACE, "attention", 0)
    a = arrays()
    attention(journal).forward(a.y, a.lse, a.qkv, T, H)
    assert journal.allocated == []
    assert journal.executed[0][2] is None


def test_only_cudnn_s_own_kernels_are_considered(journal: Journal) -> None:
    from cudnn.engines.manifest import MANIFEST

    attention(journal).prepare(B, T, H, D, backward=True)
    others = [name for family in MANIFEST if "sdpa" in family.name for name in family.slots]
    assert others
    assert all(any(part in name for part in journal.barred) for name in others)


@pytest.mark.parametrize("error", [cudnn.cudnnGraphNotSupportedError("no\nengine"), RuntimeError("no")])
def test_what_cudnn_cannot_plan_is_refused_before_anything_is_allocated(
    journal: Journal, error: Exception
) -> None:
    journal.refuses = error
    with pytest.raises(CudnnRefusal, match=f"no plan for attention over {B} x {T} tokens .* of {D}: no$"):
        attention(journal).prepare(B, T, H, D, backward=False)
    assert journal.allocated == []


def test_shapes_that_the_frontend_itself_knows_to_be_impossible_are_refused(journal: Journal) -> None:
    with pytest.raises(CudnnRefusal, match="multiple of 8"):
        attention(journal).prepare(B, T, H, 12, backward=False)
    with pytest.raises(CudnnRefusal, match="not supported"):
        attention(journal).prepare(B, 1, H, D, backward=True)


def test_nothing_speaks_against_cudnn_where_all_is_there(journal: Journal) -> None:
    assert why_not(64, HOPPER, 13) is None
    assert why_not(256, HOPPER, 13) is None
    assert why_not(128, (8, 0), 12) is None


def test_gpus_and_heads_that_cudnn_cannot_serve_are_named(journal: Journal) -> None:
    for head, capability, reason in (
        (64, (7, 5), "this GPU has 7.5"),
        (12, HOPPER, "not 12"),
        (264, HOPPER, "up to 256"),
        (136, (8, 9), "up to 128"),
    ):
        assert reason in (why_not(head, capability, 13) or ""), (head, capability)


def test_a_frontend_of_another_version_is_named_with_the_way_to_the_right_one(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in ("1.27.9", "1.33.0", "2.0.1"):
        monkeypatch.setattr(importlib.metadata, "version", lambda name, version=version: version)
        reason = why_not(64, HOPPER, 13) or ""
        assert version in reason
        assert "pip install 'nvidia-cudnn-frontend>=1.28,<1.33'" in reason


def test_a_missing_or_broken_frontend_is_named_with_the_way_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken() -> Any:
        raise ImportError("undefined symbol")

    monkeypatch.setattr(module, "frontend", broken)
    assert "undefined symbol" in (why_not(64, HOPPER, 13) or "")

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert "not installed: pip install 'nvidia-cudnn-frontend" in (why_not(64, HOPPER, 13) or "")


def test_a_missing_cudnn_is_named_with_the_package_for_the_cuda_in_use(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> int:
        raise RuntimeError("Unable to find symbol cudnnGetVersion")

    monkeypatch.setattr(module.frontend(), "backend_version", missing)
    assert (why_not(64, HOPPER, 12) or "").endswith("pip install nvidia-cudnn-cu12")
