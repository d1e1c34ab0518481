"""Matmuls that read float8: rounding and products against NumPy, training, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
from conftest import losses
from devices import ON_GPU, cuda_kernels, device, gpu, gpu_train, needs_device, poisoning  # noqa: F401
from float8 import E4M3, E5M2, from_float8, power_for, rounded, through_float8
from hostgpu import host_lt

from distgpt.core.comm.serial import SerialComm
from distgpt.core.config import GpuConfig, ModelConfig
from distgpt.core.model.model import Architecture, Model
from distgpt.core.model.passes import Pass
from distgpt.core.ops.api import Affine
from distgpt.core.ops.low_precision import from_bfloat16, to_bfloat16
from distgpt.core.train.assessment import Scorer, Span
from distgpt.evaluation.likelihoods import likelihoods
from distgpt.gpu import accelerator
from distgpt.gpu.api import Matmul
from distgpt.gpu.cublaslt import LtError
from distgpt.gpu.kernels import CudaKernels
from distgpt.gpu.matmul import LtMatmul
from distgpt.gpu.stage import GpuStage

KINDS = {"e4m3": E4M3, "e5m2": E5M2, "turned": E4M3}
pytestmark = needs_device


@pytest.fixture
def kernels():
    """Kernels that take float8 wherever it is possible, without timing anything."""
    on = device(deterministic=True)
    if ON_GPU:
        if on.capability < (8, 9):
            pytest.skip("this GPU has no float8")
        options = GpuConfig(deterministic=True, float8=True)
        return poisoning(accelerator.kernels_on(on, "bfloat16", options, print))
    return poisoning(CudaKernels(on, LtMatmul(host_lt(on.xp), on), "bfloat16", float8=True))


def put(kernels, values):
    array = kernels.zeros(*np.shape(values))
    kernels.put(array, np.asarray(values, np.float32))
    return array


def in_float8(kernels, values, how):
    """Return what the device makes of them: bytes, and the scale."""
    scale = kernels.wide_zeros(1)
    codes = kernels.linears._rounded("test", put(kernels, values), how, scale)
    return kernels.to_host(codes), float(kernels.to_host(scale)[0])


def skip_if_impossible(kernels):
    """A library may have no algorithm in float8 for small sizes: they are computed in bfloat16 then."""
    impossible = [kind for kind, is_able in kernels.linears._possible.items() if not is_able]
    if ON_GPU and impossible:
        pytest.skip(f"cuBLASLt here has no float8 for {impossible[0]}")
    assert not impossible


def test_the_format_is_what_its_standard_says():
    assert (E4M3.most, E5M2.most) == (448, 57344)
    assert from_float8([0x01, 0x38, 0xC0, 0x7F], E4M3).tolist()[:3] == [2**-9, 1, -2]
    assert from_float8([0x01, 0x3C, 0xC0], E5M2).tolist() == [2**-16, 1, -2]
    assert rounded([17, 19, 448.1, 1e9, -(2**-10), 3 * 2**-11], E4M3).tolist() == [16, 20, 448, 448, 0, 2**-9]
    assert [power_for(x, E4M3) for x in (0, 448, 449, 1, 1e-40)] == [0, 0, -1, 8, 126]


@pytest.mark.peer
def test_the_format_is_what_pytorch_has():
    torch = pytest.importorskip("torch")
    codes = np.arange(256, dtype=np.uint8)
    for kind, name in ((E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)):
        right = torch.from_numpy(codes).view(name).double().numpy()
        finite = np.isfinite(right)
        np.testing.assert_array_equal(from_float8(codes, kind)[finite], right[finite])
        x = np.random.default_rng(1).standard_normal(10_000) * 2.0 ** np.arange(-20, 5).repeat(400)
        np.testing.assert_array_equal(rounded(x, kind), torch.from_numpy(x).to(name).double().numpy())


@pytest.mark.parametrize("top", [0, 1, 8, 9, 15, 16, 63, 127, 200, 254])
@pytest.mark.parametrize("how", KINDS)
def test_numbers_are_rounded_as_numpy_does(how, top, kernels):
    """The greatest decides about the scale: by its exponent, `top`, and by how it compares with 1.75."""
    for fraction in (0x60, 0x61, 0x7F):
        most = top << 7 | fraction
        bits = np.arange(most - (24 << 7), most).clip(0)  # what is smaller vanishes, in E4M3
        bits[0] = most
        values = from_bfloat16(np.random.default_rng(top).permutation(bits)).reshape(32, 96)
        values[::2] *= -1
        codes, scale = in_float8(kernels, values, how)
        found = from_float8(codes.T if how == "turned" else codes, KINDS[how]) * scale
        np.testing.assert_array_equal(found, through_float8(values, KINDS[how]), err_msg=hex(most))


@pytest.mark.parametrize("shape", [(16, 16), (16, 208), (304, 16), (80, 64)])
def test_any_multiple_of_16_is_turned(shape, kernels):
    values = np.random.default_rng(3).standard_normal(shape)
    codes, scale = in_float8(kernels, values, "turned")
    kept = from_bfloat16(to_bfloat16(values))
    np.testing.assert_array_equal(from_float8(codes, E4M3).T * scale, through_float8(kept, E4M3))


def test_zeros_stay_zeros_and_what_is_no_number_spoils_all(kernels):
    codes, scale = in_float8(kernels, np.zeros((16, 16)), "e4m3")
    assert not codes.any() and np.isfinite(scale)
    for bad in (np.nan, np.inf, -np.inf):
        values = np.ones((16, 32))
        values[3, 4] = bad
        codes, scale = in_float8(kernels, values, "e5m2")
        assert np.isnan(scale) and (codes & 0x7F == 0x7F).all(), bad


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("onto", [False, True])
def test_a_linear_layer_is_the_product_of_what_float8_leaves(bias, onto, kernels):
    random = np.random.default_rng(1)
    x, w, b, r, dy = (
        from_bfloat16(to_bfloat16(random.standard_normal(shape) * size))
        for shape, size in (((48, 80), 3), ((112, 80), 0.02), ((112,), 1), ((48, 112), 1), ((48, 112), 1e-5))
    )
    y, dx = kernels.zeros(48, 112), kernels.zeros(48, 80)
    on_device = put(kernels, w)
    wb = Affine(on_device, put(kernels, b) if bias else None)
    kernels.linear(y, put(kernels, x), wb, put(kernels, r) if onto else None)
    skip_if_impossible(kernels)
    right = through_float8(x, E4M3) @ through_float8(w, E4M3).T + (b if bias else 0) + (r if onto else 0)
    assert ON_GPU or kernels.linears.matmuls._lt._library.fast_sums == 1
    # A GPU's sums of float8 have few bits beyond those of the result.
    np.testing.assert_allclose(kernels.to_host(y), right, rtol=2**-8, atol=2**-9 * np.abs(right).max())
    assert np.abs(right - x @ w.T - (b if bias else 0) - (r if onto else 0)).max() > 0.02  # than without
    kernels.linear_backward(dx, put(kernels, dy), on_device)
    skip_if_impossible(kernels)
    assert ON_GPU or kernels.linears.matmuls._lt._library.fast_sums == 0
    right = through_float8(dy, E5M2) @ through_float8(w, E4M3)
    np.testing.assert_allclose(kernels.to_host(dx), right, rtol=2**-8, atol=2**-10 * np.abs(right).max())
    assert np.abs(right - dy @ w).max() > 0.02 * np.abs(right).max()


def test_sizes_that_the_library_cannot_have_stay_in_bfloat16(kernels):
    random = np.random.default_rng(2)
    for n, c, o in ((40, 32, 48), (48, 40, 32), (48, 32, 40)):
        x, w = (from_bfloat16(to_bfloat16(random.standard_normal(shape))) for shape in ((n, c), (o, c)))
        y = kernels.zeros(n, o)
        kernels.linear(y, put(kernels, x), Affine(put(kernels, w), None))
        np.testing.assert_allclose(kernels.to_host(y), x @ w.T, rtol=2**-8, atol=1e-5)


def test_arrays_at_odd_addresses_stay_in_bfloat16(kernels):
    x = from_bfloat16(to_bfloat16(np.random.default_rng(4).standard_normal((16, 32))))
    y, room = kernels.zeros(16, 16), kernels.zeros(16 * 32 + 4)
    w = room[4:].reshape(16, 32)
    kernels.put(w, x)
    kernels.linear(y, put(kernels, x), Affine(w, None))
    np.testing.assert_allclose(kernels.to_host(y), x @ x.T, rtol=2**-8, atol=1e-5)


def test_what_the_library_offers_and_cannot_start_is_computed_in_bfloat16(kernels, monkeypatch):
    x = from_bfloat16(to_bfloat16(np.random.default_rng(5).standard_normal((16, 32))))
    y, run = kernels.zeros(16, 16), kernels.linears.matmuls.run

    def broken(kind, *args, **more):
        if kind.in_type == "e4m3":
            raise LtError("cublasLtMatmul gave NOT_SUPPORTED", 15)
        run(kind, *args, **more)

    monkeypatch.setattr(kernels.linears.matmuls, "run", broken)
    monkeypatch.setattr(kernels.linears, "_possible", {})
    for _ in range(2):
        kernels.linear(y, put(kernels, x), Affine(put(kernels, x), None))
        np.testing.assert_allclose(kernels.to_host(y), x @ x.T, rtol=2**-8, atol=1e-5)


def test_each_matmul_takes_what_was_faster(kernels, monkeypatch):
    x = from_bfloat16(to_bfloat16(np.random.default_rng(6).standard_normal((16, 32))))
    y, kind = kernels.zeros(16, 16), Matmul(16, 16, 32, False, True, "e4m3", "bfloat16")
    for choice, is_near in ((0, False), (1, True)):
        monkeypatch.setattr(kernels._device, "choices", {kind: choice})
        kernels.linear(y, put(kernels, x), Affine(put(kernels, x), None))
        assert (np.abs(kernels.to_host(y) - x @ x.T).max() < 0.2) == is_near, choice


GPT2 = {"qkv": (2304, 768), "proj": (768, 768), "fc": (3072, 768), "fc2": (768, 3072), "head": (50304, 768)}


def test_the_matmuls_of_gpt2_that_are_possible_are_printed(kernels, capsys):
    """A record of a run on a device: which layers, forward and backward, the library has in float8."""
    can, found = kernels.linears.matmuls.can, {}
    for name, (outputs, inputs) in GPT2.items():
        for rows in (8192, 65536):
            y = Matmul(rows, outputs, inputs, False, True, "e4m3", "bfloat16")
            dx = Matmul(rows, inputs, outputs, False, True, "e5m2", "bfloat16")
            ways = {"y": y, "y + bias": replace(y, epilogue="bias"), "y + residual": replace(y, onto=True)}
            found[name, rows] = {way: can(kind) for way, kind in {**ways, "dx": dx}.items()}
    with capsys.disabled():
        for (name, rows), able in found.items() if ON_GPU else ():
            print(f"\nfloat8 {name}, {rows} rows: {', '.join(w for w, is_able in able.items() if is_able)}")
    assert ON_GPU or all(all(able.values()) for able in found.values())


@pytest.mark.parametrize("mlp", ["gelu", "relu2"])
def test_training_in_float8_stays_near_bfloat16_and_is_not_the_same(mlp, gpu, tmp_path, kernels):
    steps = ("--steps", "4", "--n-layer", "1", "--seq-len", "8", "--mlp", mlp, "--dtype", "bfloat16")
    for name, more in (("plain", ()), ("float8", ("--float8",))):
        gpu_train(gpu, tmp_path / name, *steps, "--deterministic", *more)
    found, plain = losses(tmp_path / "float8"), losses(tmp_path / "plain")
    assert found != plain
    np.testing.assert_allclose(found, plain, rtol=1e-2)


def test_an_evaluation_stays_in_bfloat16(kernels):
    """Its losses have the same bits with --float8, which the passes of training do not take for it."""
    found = {}
    plain = type(kernels)(kernels._device, kernels.linears.matmuls, "bfloat16")
    config = ModelConfig(n_layer=2, n_head=2, n_embd=32, seq_len=32, vocab_size=64)
    ids = np.random.default_rng(7).integers(0, 64, 32)
    for name, k in (("plain", plain), ("float8", kernels)):
        model = Model(Architecture(config), k)
        model.initialise(3)
        scorer = Scorer(model, SerialComm())
        found[name] = [scorer.sums([Span(ids)]), likelihoods(scorer, [Span(ids, 20)])]
        # The same pass without the scorer: what training would compute.
        work, end = Pass(model, 1, 32, training=False), k.zeros(32, 64)
        work.logits(end, work.hidden(k.integers(ids)))
        found[f"{name}, as training"] = [k.to_host(end)]
    assert not kernels.linears._is_precise
    for a, b in zip(found["plain"], found["float8"], strict=True):
        np.testing.assert_array_equal(a, b)
    assert (found["plain, as training"][0] != found["float8, as training"][0]).any()


def test_an_evaluation_and_training_choose_between_fused_and_apart_each_for_itself(kernels, monkeypatch):
    """In training the steps apart are in float8; an evaluation has the choice of a run without it."""
    monkeypatch.setattr(kernels._device, "deterministic", False)
    keys, plain = [], type(kernels)(kernels._device, kernels.linears.matmuls, "bfloat16")
    monkeypatch.setattr(type(kernels._device), "fastest", lambda device, key, ways: keys.append(key))
    x, w, y = (plain.zeros(16, 32), plain.zeros(16, 32), plain.zeros(16, 16))

    def activated(k):
        k.linears.activated(y, plain.zeros(16, 16), x, Affine(w, None), "gelu")

    activated(plain)
    activated(kernels)
    kernels.precisely(lambda: kernels.precisely(lambda: None) or activated(kernels))
    without, training, evaluating = keys
    assert without == evaluating != training and str(without) != str(training)


def test_float8_needs_bfloat16_and_a_gpu_that_has_it(kernels):
    one = kernels._device
    stage = GpuStage("cuda", None, 1, device=one, gpu=GpuConfig(float8=True))
    assert stage._trouble_with("bfloat16") == ""
    assert "goes with --dtype bfloat16" in stage._trouble_with("float32")
    old = type("Old", (), {"name": "An A100", "capability": (8, 0)})
    stage = GpuStage("cuda", None, 1, device=old, gpu=GpuConfig(float8=True))
    assert stage._trouble_with("bfloat16") == (
        "--float8 needs compute capability 8.9, An A100 has 8.0: leave it out"
    )
