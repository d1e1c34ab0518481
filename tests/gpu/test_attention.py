import math
from dataclasses import dataclass

import numpy as np
import pytest
from devices import ON_GPU, device, needs_device, needs_the_processor, poisoning
from distgpt.core.ops.api import AttentionMask, BiasGradient
from distgpt.core.ops.kernels import Kernels
from distgpt.gpu import attention
from distgpt.gpu.attention import SHARED_LIMIT, TILES, attention_shape, cached_parts
from distgpt.gpu.kernels import CudaKernels
from hostgpu import BACKWARDS, FORWARDS, HostDevice

pytestmark = needs_device

TOLERANCE = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 1e-2}
ORDERS = (FORWARDS, BACKWARDS, 2)
REFERENCE = Kernels("float64")


def kernels(storage, on=None):
    """Return kernels with our own attention, and NaN in scratch memory before each operation."""
    return poisoning(CudaKernels(on or device(), None, storage))


def older():
    """Return a device without bfloat16 tensor cores, which runs the other source."""
    return HostDevice(capability=(7, 5))


def stored(k, numbers, wide=False):
    """Round to the storage type, or to the type of statistics."""
    array = (k.accum_zeros if wide else k.zeros)(*numbers.shape)
    k.put(array, numbers)
    return array


def random(k, *shape, seed, scale=1.0):
    return values(k, stored(k, np.random.default_rng(seed).standard_normal(shape) * scale))


def poisoned(k, *shape, wide=False):
    return stored(k, np.full(shape, np.nan), wide)


def values(k, array):
    return np.array(k.to_host(array), np.float64)


@dataclass(frozen=True)
class Case:
    """Random qkv and dy, and their attention by kernels and by the reference."""

    n_seq: int
    seq_len: int
    n_head: int
    head: int
    group: int = 1
    steep: float = 1.0
    documents: tuple[int, ...] = ()  # lengths of packed documents in each sequence
    window: int = 0

    def inputs(self, k):
        n, c = self.n_seq * self.seq_len, self.n_head * self.head
        qkv = random(k, n, c + 2 * c // self.group, seed=self.seq_len, scale=self.steep)
        return qkv, random(k, n, c, seed=2)

    def wanted(self, k):
        return self.computed(REFERENCE, inputs=self.inputs(k))

    def computed(self, k, back=None, inputs=None):
        """Compute with these kernels; `back`: kernels for the gradient."""
        qkv, dy = (stored(k, each) for each in inputs or self.inputs(k))
        (n, wide), c = qkv.shape, self.n_head * self.head
        y, dqkv, lse = poisoned(k, n, c), poisoned(k, n, wide), poisoned(k, n, self.n_head, wide=True)
        of_each = np.concatenate([np.arange(n) for n in self.documents or [0]])
        positions = k.integers(np.tile(of_each, self.n_seq)) if self.documents else None
        mask, db = AttentionMask(self.seq_len, positions, self.window), np.arange(wide, dtype=float)
        k.attention(y, lse, qkv, mask)
        if k is REFERENCE:  # stores them in another order
            found = values(k, lse).reshape(self.n_seq, self.seq_len, self.n_head).swapaxes(1, 2)
        else:
            found = values(k, lse).reshape(self.n_seq, self.n_head, self.seq_len)
        parts, arrays = [values(k, y), found], [dqkv, dy, y, lse, qkv]
        if back is not None:
            arrays, k = [stored(back, k.to_host(array), array is lse) for array in arrays], back
        sums = stored(k, db, wide=True)
        k.attention_backward(*arrays, mask, BiasGradient(sums, True))
        parts += [*np.split(values(k, arrays[0]), [c, c + c // self.group], axis=1), values(k, sums) - db]
        return dict(zip(("y", "lse", "dq", "dk", "dv", "db"), parts, strict=True))

    def check(self, k, storage, back=None):
        self.compare(self.computed(k, back), self.wanted(k), storage)

    def compare(self, got, wanted, storage):
        for name, found in got.items():
            tolerance = 1e-5 if name == "lse" and storage == "bfloat16" else TOLERANCE[storage]
            assert distance(found, wanted[name]) < tolerance, (self, storage, name)


def distance(got, wanted):
    if not np.isfinite(got).all():
        return math.inf
    return float(np.linalg.norm(got - wanted) / max(np.linalg.norm(wanted), 1e-300))


# n_seq, seq_len, n_head, head, heads of q for one of k and v
TENSOR_CORES = [
    *((2, 7, 3, 16), (1, 64, 1, 16), (2, 65, 2, 64), (1, 130, 1, 64), (1, 65, 1, 80), (1, 130, 1, 128)),
    *((2, 7, 6, 16, 3), (2, 130, 2, 64, 2), (1, 65, 4, 80, 2)),
    *([(1, 200, 2, head) for head in range(16, 129, 16)] * ON_GPU),
]
CASES = [
    *(("bfloat16", Case(*sizes)) for sizes in TENSOR_CORES),
    *(("float64", Case(*sizes)) for sizes in [(3, 7, 5, 5), (1, 5, 1, 256), (2, 37, 6, 5, 3)]),
    *(("float32", Case(*sizes)) for sizes in [(3, 65, 3, 1), (1, 130, 1, 80), (2, 65, 3, 12, 3)]),
    *(
        (storage, Case(2, sum(lengths), 4, head, 2, documents=lengths))
        for lengths in [(1, 70, 3, 66, 20), (65, 1)]
        for storage, head in [("float64", 5), ("bfloat16", 64), ("bfloat16", 80)]
    ),
    *(
        (storage, Case(2, seq_len, 4, head, 2, documents=documents, window=window))
        for seq_len, window, documents in [(70, 5, ()), (130, 64, ()), (66, 5, ()), (90, 40, (66, 24))]
        for storage, head in [("float64", 5), ("bfloat16", 64)]
    ),
]


@pytest.mark.parametrize(("storage", "case"), CASES, ids=str)
def test_attention_matches_reference(storage, case):
    case.check(kernels(storage), storage)


@needs_the_processor
def test_attention_without_tensor_cores_matches_reference():
    for sizes in [(3, 33, 1, 5), (2, 33, 4, 5, 2)]:
        Case(*sizes).check(kernels("bfloat16", older()), "bfloat16")


@needs_the_processor
def test_gradient_accepts_forward_pass_of_other_source():
    able, lesser = kernels("bfloat16", HostDevice()), kernels("bfloat16", older())
    Case(1, 65, 2, 64).check(able, "bfloat16", lesser)
    Case(1, 65, 2, 64).check(lesser, "bfloat16", able)


@pytest.mark.parametrize(("storage", "head", "most"), [("float64", 16, 1e-14), ("bfloat16", 64, 1e-2)])
def test_single_position_attends_to_itself(storage, head, most):
    case, k = Case(3, 1, 3, head), kernels(storage)
    got = case.computed(k)
    assert np.abs(got["dq"]).max() < most and np.abs(got["dk"]).max() < most
    qkv, dy = case.inputs(k)
    assert np.array_equal(got["y"], qkv[:, 2 * 3 * head :]) and np.array_equal(got["dv"], dy)


def test_extreme_scores_stay_finite():
    case, k = Case(1, 65, 1, 16, steep=30.0), kernels("float32")
    got, wanted = case.computed(k), case.wanted(k)
    for name, found in got.items():
        assert distance(found, wanted[name]) < 1e-3, name
    k, case = kernels("bfloat16"), Case(1, 65, 1, 64, steep=3.0)
    assert np.abs(case.wanted(k)["lse"]).max() > 25
    case.check(k, "bfloat16")
    # All weight is on one or two positions. Score gradients have no significant digits, since they are differences
    # of almost equal numbers; value gradients are accurate.
    case = Case(1, 65, 1, 64, steep=100.0)
    got, wanted = case.computed(k), case.wanted(k)
    assert np.isfinite(got["dq"]).all() and np.isfinite(got["dk"]).all()
    case.compare({name: got[name] for name in ("y", "lse", "dv")}, wanted, "bfloat16")


@needs_the_processor
@pytest.mark.parametrize(("storage", "sizes"), [("float32", (1, 65, 2, 16, 2)), ("bfloat16", (1, 65, 2, 64, 2))])
def test_thread_order_changes_no_bit_of_attention(storage, sizes):
    ahead, *others = (Case(*sizes).computed(kernels(storage, HostDevice(order=order))) for order in ORDERS)
    for name, found in ahead.items():
        assert all(np.array_equal(found, other[name]) for other in others), name


@needs_the_processor
@pytest.mark.parametrize(("kind", "storage", "head", "source"), [
    (HostDevice, "bfloat16", 64, "attention_mma"),
    *((HostDevice, *other, "attention") for other in [("float32", 64), ("bfloat16", 5), ("bfloat16", 144)]),
    (older, "bfloat16", 64, "attention"),
])  # fmt: skip
def test_tensor_cores_are_used_if_supported(kind, storage, head, source):
    on = kind()
    Case(1, 2, 1, head).computed(kernels(storage, on))
    on.synchronize()
    used = {each.source for each in on.xp.launches if each.kernel != "attention_delta"}
    assert used - {"reduce"} == {source}


def test_tiles_of_every_head_size_fit_shared_memory():
    for real_bytes in (4, 8):
        for head in range(1, 257):
            shape = attention_shape(head, real_bytes, 1)
            for tile, shared in (shape.forward, shape.backward):
                assert tile in TILES and 0 < shared <= SHARED_LIMIT, (head, real_bytes)


@pytest.mark.parametrize(("storage", "prompt", "sizes", "n_parts", "window"), [
    ("float64", 7, (3, 1, 1, 5), 1, 0), ("float64", 7, (3, 6, 2, 5), 1, 3), ("float32", 33, (1, 3, 3, 80), 5, 0),
    ("float32", 33, (2, 3, 1, 12), 2, 34), ("bfloat16", 33, (1, 2, 1, 64), 3, 9),
])  # fmt: skip
def test_cached_attention_matches_reference(storage, prompt, sizes, n_parts, window, monkeypatch):
    monkeypatch.setattr(attention, "cached_parts", lambda *_: n_parts)
    n_seq, n_head, kv_heads, head = sizes
    k, steps, c = kernels(storage), 3, n_head * head
    shape = (2, n_seq, kv_heads, prompt + steps + 2, head)
    cache, cache64 = poisoned(k, *shape), np.full(shape, np.nan)
    position = 0
    for new in (prompt, *[1] * steps):
        qkv, y = random(k, n_seq * new, c + 2 * kv_heads * head, seed=position), poisoned(k, n_seq * new, c)
        y64, start = np.empty(y.shape), np.array([position], np.int32)
        k.attention_cached(y, cache, stored(k, qkv), k.integers(start), window)
        REFERENCE.attention_cached(y64, cache64, qkv, start, window)
        assert distance(values(k, y), y64) < TOLERANCE[storage], position
        position += new
    found = values(k, cache)
    assert distance(found[:, :, :, :position], cache64[:, :, :, :position]) < TOLERANCE[storage]
    assert np.isnan(found[:, :, :, position:]).all()


def test_decoding_is_split_only_on_idle_devices():
    assert cached_parts(12, 1024, 132) == 4  # 256 keys each
    assert cached_parts(12, 100_000, 132) == 22  # two blocks for each multiprocessor
    assert cached_parts(12 * 500, 1024, 132) == 1  # a prompt
    assert cached_parts(1, 1, 132) == 1


COPIES = """
extern "C" __global__ void copies(unsigned* early, unsigned* late, const unsigned* from) {
    __shared__ __align__(16) unsigned to[32 * 4];
    start_copy<16>(shared_address(to + threadIdx.x * 4), from + threadIdx.x * 4, threadIdx.x % 2);
    for (int i = 0; i < 4; i++) early[threadIdx.x * 4 + i] = to[threadIdx.x * 4 + i];
    wait_for_copies();
    for (int i = 0; i < 4; i++) late[threadIdx.x * 4 + i] = to[threadIdx.x * 4 + i];
}
"""


@needs_the_processor
def test_copies_arrive_after_waiting():
    on, numbers = HostDevice(texts={"copies": COPIES}), np.arange(128, dtype=np.uint32)
    given = [on.array(each) for each in (np.zeros_like(numbers), np.zeros_like(numbers), numbers)]
    on.launch("copies", "copies", (), (1,), (32,), given)
    early, late, _ = map(on.download, given)
    assert (early == 0xFFFFFFFF).all()
    wanted = numbers.reshape(32, 4) * (np.arange(32) % 2)[:, None]
    assert np.array_equal(late.reshape(32, 4), wanted)
