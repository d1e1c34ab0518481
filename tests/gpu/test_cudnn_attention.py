import math
from types import SimpleNamespace

import numpy as np
import pytest
from distgpt.core.base.errors import DistgptError
from distgpt.core.ops.api import AttentionMask
from distgpt.gpu import cudnn_attention as module
from distgpt.gpu.attention import OwnAttention
from distgpt.gpu.cudnn_attention import DK, DQ, DV, DY, STATS, CudnnAttention, K, Q, Shape, V, Y, why_not

cudnn = pytest.importorskip("cudnn", reason="needs nvidia-cudnn-frontend")

B, T, H, D = 3, 7, 6, 16
C = H * D
GROUPS = (1, 3)  # query heads per key/value head
STREAM = 1234
WORKSPACE = {"attention": 256, "attention_backward": 4096}
HOPPER = (9, 0)


@pytest.fixture
def journal(monkeypatch):
    """Fake the parts of the frontend that need a GPU, and record the calls."""
    journal = SimpleNamespace(
        **{name: [] for name in ["calls", "executed", "streams", "barred", "allocated", "said", "own"]}
    )
    journal.refuses = journal.fails = None

    def noted(name):
        return lambda self, *args: journal.calls.append(name)

    class Graph(cudnn.pygraph):
        def __init__(self, **options):
            self.title = options["name"]
            super().__init__(**options)

        def validate(self):
            journal.calls.append("validate")
            super().validate()

        build_operation_graph, create_execution_plans, build_plans = map(noted, ("operations", "plans", "build"))

        def deselect_engines(self, names):
            journal.barred += names
            return self

        def check_support(self):
            assert journal.calls[-2:] == ["operations", "plans"]
            journal.calls.append("support")
            if journal.refuses:
                raise journal.refuses

        def get_workspace_size(self):
            return WORKSPACE[self.title]

        def execute(self, tensors, workspace, handle):
            if journal.fails:
                raise journal.fails
            journal.executed.append((self.title, tensors, workspace, handle))

    own = {"pygraph": Graph, "create_handle": lambda: cudnn.Handle(99, 0, 0), "backend_version": lambda: 92800}
    own["set_stream"] = lambda handle, stream: journal.streams.append((handle, stream))
    fake = SimpleNamespace(**{**vars(cudnn), **own})
    monkeypatch.setattr(module, "frontend", lambda: fake)
    monkeypatch.setattr(module, "SHORT", 1)
    monkeypatch.setattr(OwnAttention, "forward", lambda *args: journal.own.append("forward"))
    monkeypatch.setattr(OwnAttention, "backward", lambda *args: journal.own.append("backward") or "sums")
    return journal


def attention(journal):
    def zeros(shape, dtype):
        journal.allocated += shape
        return np.zeros(shape, dtype)

    stream = SimpleNamespace(ptr=STREAM)
    device = SimpleNamespace(stream=stream, deterministic=False, zeros=zeros, capability=HOPPER)
    return CudnnAttention(SimpleNamespace(device=device), journal.said.append)


def arrays(n_seq=B, head=D, group=1):
    c = H * head
    packed = c + 2 * c // group
    widths = {"qkv": packed, "dqkv": packed, "y": c, "dy": c, "lse": H}
    found = {name: np.zeros((n_seq * T, width), np.uint16) for name, width in widths.items()}
    return SimpleNamespace(**{**found, "lse": found["lse"].astype(np.float32)})


def forward(library, a):
    library.forward(a.y, a.lse, a.qkv, AttentionMask(T))


def backward(library, a):
    return library.backward(a.dqkv, a.dy, a.y, a.lse, a.qkv, AttentionMask(T), False)


def twice(journal, a=None):
    a, library = a or arrays(), attention(journal)
    return [forward(library, a) or backward(library, a) for _ in range(2)][-1]


def seen_by(tensor, memory):
    """Return the numbers that a graph's tensor reads from the start of a flat array."""
    strides = [stride * memory.itemsize for stride in tensor["stride"]]
    return np.lib.stride_tricks.as_strided(memory, tensor["dim"], strides)


@pytest.mark.parametrize("group", GROUPS)
def test_graphs_are_valid_with_expected_layouts(group):
    kv = H // group
    shape = Shape(B, T, H, kv, D)
    packed, plain, stats = np.arange(B * T * (H + 2 * kv) * D), np.arange(B * T * C), np.arange(B * H * T)
    parts = np.split(packed.reshape(B, T, -1, D).transpose(0, 2, 1, 3), [H, H + kv], axis=1)
    heads = plain.reshape(B, T, H, D).transpose(0, 2, 1, 3)
    expected = {
        uid: (packed[start:], part)
        for three in ((Q, K, V), (DQ, DK, DV))
        for uid, start, part in zip(three, (0, C, C + kv * D), parts, strict=True)
    }
    expected |= dict.fromkeys((Y, DY), (plain, heads)) | {STATS: (stats, stats.reshape(B, H, T, 1))}
    for graph, uids in (
        (module.forward_graph(shape, None), {Q, K, V, Y, STATS}),
        (module.backward_graph(shape, None, False), {Q, K, V, Y, DY, STATS, DQ, DK, DV}),
        (module.backward_graph(shape, None, True), {Q, K, V, Y, DY, STATS, DQ, DK, DV}),
    ):
        graph.validate()
        tensors = {tensor["uid"]: tensor for tensor in graph.inspect()["tensors"].values()}
        assert set(tensors) == uids
        for uid, tensor in tensors.items():
            assert np.array_equal(seen_by(tensor, expected[uid][0]), expected[uid][1]), uid
            assert tensor["dtype"] == str(cudnn.data_type.FLOAT if uid == STATS else cudnn.data_type.BFLOAT16)
            assert not tensor["is_virtual"]


@pytest.mark.parametrize("deterministic", [False, True])
def test_attention_is_causal_and_scaled(deterministic):
    shape = Shape(B, T, H, H, D)
    (ahead,), (back,) = module.forward_graph(shape, None).nodes, module.backward_graph(shape, None, deterministic).nodes
    for node in (ahead, back):
        assert node.params["attn_scale"] == pytest.approx(1 / math.sqrt(D))
        assert node.params["diagonal_alignment"] == cudnn.diagonal_alignment.TOP_LEFT
        assert node.params["diagonal_band_right_bound"] == 0
    assert ahead.params["generate_stats"] is True and back.params["use_deterministic_algorithm"] is deterministic
    wiring = {name: tensor.uid for name, tensor in {**back.inputs, **back.outputs}.items()}
    expected = {"q": Q, "k": K, "v": V, "o": Y, "dO": DY, "stats": STATS, "dQ": DQ, "dK": DK, "dV": DV}
    assert wiring == expected


@pytest.mark.parametrize("group", GROUPS)
def test_execution_gets_the_address_of_each_part(journal, group):
    a, library = arrays(group=group), attention(journal)
    forward(library, a)
    backward(library, a)
    starts = (0, C, C + C // group)
    parts, gradients = (
        {uid: array[0, i:].ctypes.data for i, uid in zip(starts, uids, strict=True)}
        for array, uids in ((a.qkv, (Q, K, V)), (a.dqkv, (DQ, DK, DV)))
    )
    common = {Y: a.y.ctypes.data, STATS: a.lse.ctypes.data, **parts}
    (_, ahead, _, handle), (_, back, _, again) = journal.executed
    assert ahead == common and handle is again and back == {**common, **gradients, DY: a.dy.ctypes.data}
    assert journal.streams == [(handle, STREAM)]


def test_shape_is_planned_once(journal):
    a, library, planned = arrays(), attention(journal), ["validate", "operations", "plans", "support", "build"]
    for _ in range(3):
        forward(library, a)
    assert (journal.calls, journal.allocated) == (planned, [256])  # no gradient is planned
    for _ in range(3):
        backward(library, a)
        forward(library, a)
    assert (journal.calls, journal.allocated) == (planned * 2, [256, 4096])
    workspaces = {(title, workspace) for title, _, workspace, _ in journal.executed}
    assert len(workspaces) == 2 and all(workspace for _, workspace in workspaces)
    forward(library, arrays(n_seq=1))
    assert journal.allocated == [256, 4096, 256]


def test_plan_without_workspace_allocates_none(journal, monkeypatch):
    monkeypatch.setitem(WORKSPACE, "attention", 0)
    forward(attention(journal), arrays())
    assert journal.allocated == [] and journal.executed[0][2] is None


def test_only_kernels_of_cudnn_are_allowed(journal):
    from cudnn.engines.manifest import MANIFEST

    twice(journal)
    others = [name for family in MANIFEST if "sdpa" in family.name for name in family.slots]
    assert others and all(any(part in name for part in journal.barred) for name in others)


@pytest.mark.parametrize(
    "error, head, says",
    [
        (cudnn.cudnnGraphNotSupportedError("no\nengine"), D, "no"),
        (RuntimeError("no"), D, "no"),
        (None, 12, "multiple of 8"),  # rejected by the frontend
        (None, D, None),  # short sequences
    ],
)
def test_unsupported_shapes_use_own_attention(error, head, says, journal, monkeypatch):
    journal.refuses = error
    monkeypatch.setattr(module, "SHORT", T if says is None else 1)
    assert twice(journal, arrays(head=head)) == "sums"
    assert journal.own == ["forward", "backward"] * 2 and not journal.executed + journal.allocated
    assert len(journal.said) == 2 * (says is not None)
    assert all(f"for sequences of {T}: " in note and says in note for note in journal.said)


def test_missing_backward_plan_uses_own_gradient(journal, monkeypatch):
    def fails(*_):
        raise RuntimeError("no")

    monkeypatch.setattr(module, "backward_graph", fails)
    assert twice(journal) == "sums"
    assert journal.own == ["backward"] * 2 and len(journal.executed) == 2 and len(journal.said) == 1


def test_failing_execution_is_an_error(journal):
    journal.fails = RuntimeError("CUDNN_STATUS_EXECUTION_FAILED")
    with pytest.raises(DistgptError, match="EXECUTION_FAILED"):
        twice(journal)


@pytest.mark.parametrize(("head", "capability", "cuda", "reason"), [
    *((64, HOPPER, 13, None), (256, HOPPER, 13, None), (128, (8, 0), 12, None), (12, HOPPER, 13, "not 12")),
    *((264, HOPPER, 13, "up to 256"), (136, (8, 9), 13, "up to 128")),
])  # fmt: skip
def test_unsupported_gpus_and_heads_are_named(head, capability, cuda, reason, journal):
    found = why_not(head, capability, cuda)
    assert found is None if reason is None else reason in found


def test_broken_cudnn_names_the_remedy(journal, monkeypatch):
    def fails():
        raise error

    fake = module.frontend()
    for error in (RuntimeError("no cudnnGetVersion"), ImportError("undefined symbol")):
        if isinstance(error, ImportError):
            monkeypatch.setattr(module, "frontend", fails)
        monkeypatch.setattr(fake, "backend_version", fails)
        wanted = f"{error}: pip install nvidia-cudnn-cu12 'nvidia-cudnn-frontend>=1.28,<1.33'"
        assert why_not(64, HOPPER, 12) == wanted
