from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from decoding import SHAPES, build, distance, marked, plain_scores, quantise4, round_alike, sequences
from distgpt import api
from distgpt.core.base.errors import DataError, UsageError
from distgpt.core.base.files import bundled
from distgpt.core.comm.api import SerialComm
from distgpt.core.config import RunConfig
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.generate.plain_slots import PlainSlots
from distgpt.core.generate.slots import Feed
from distgpt.core.saved.modelfile import Description, load_model, open_model, save_model
from distgpt.core.saved.tensors import read_header, read_rows, write_tensors
from distgpt.inference.decoding.compiled import CompiledSlots
from distgpt.inference.quantized.integers import LEVELS, restored
from distgpt.inference.quantized.kernels import Int8Kernels
from distgpt.models.quantized.packed import calibrated, moved, round_for
from distgpt.models.quantized.rounded import quantize

COMM = SerialComm()


def opened_in(path, asked, on_gpu=False):
    def kernels(dtype, matmul):
        return Int8Kernels(1, dtype) if dtype in ("int8", "int4") else CpuKernels(dtype, 1)

    return open_model(SimpleNamespace(comm=COMM, on_gpu=on_gpu, kernels=kernels), path, asked)[3]


def description(model):
    return Description(replace(RunConfig(), model=model.config), None)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, model = tmp_path_factory.mktemp("files"), build("llama", CpuKernels("float32", 1))
    wide, narrow, four = (folder / f"{name}.safetensors" for name in ("wide", "int8", "int4"))
    save_model(wide, model, description(model))
    assert "int8, blocks of 64" in quantize(wide, narrow)
    quantize(wide, four, "int4")
    return model, wide, narrow, four


@pytest.mark.parametrize("shape", ["llama", "odd", "wide", "value embeddings", "heads of eleven"])
@pytest.mark.parametrize("dtype", marked("int8", "int4"))
def test_rounded_passes_match_exact_and_compiled(shape, dtype):
    """Activations are also rounded, to 1/127 of the largest value in a block."""
    rounded, near = build(shape, Int8Kernels(2, dtype)), build(shape, CpuKernels("float32", 2))
    for spec in near.layout.specs:
        near.params[spec.name][:] = round_alike(near.params[spec.name], spec, dtype)
    for text in sequences(shape)[1::2]:
        exact, found = plain_scores(near, text), plain_scores(rounded, text)
        assert distance(found, exact) < 6e-2
        scores = CompiledSlots(rounded, 1).feed([Feed(0, 0, text, len(text))])
        assert distance(scores, found) < 6e-2  # their keys and values are bfloat16
    assert distance(PlainSlots(rounded, 1).feed([Feed(0, 0, text, 1)]), found[-1:]) < 1e-5


@pytest.mark.parametrize("dtype", marked("int8", "int4"))
def test_file_equals_rounding_on_load(files, dtype):
    model, wide, *others = files
    path = others[dtype == "int4"]
    assert path.stat().st_size < wide.stat().st_size / (3 if dtype == "int4" else 2)
    header, text = read_header(path), sequences("llama")[3]
    kinds = {entry.dtype for entry in header.tensors.values()}
    assert kinds == {"I8", "BF16", "F32"} | ({"U8"} if dtype == "int4" else set())
    assert header.metadata["format_version"] == "3"

    def scores(path, dtype):
        found, _ = load_model(path, Int8Kernels(1, dtype), COMM)
        return CompiledSlots(found, 1).feed([Feed(0, 0, text, len(text))])

    own = scores(path, dtype)
    np.testing.assert_array_equal(own, scores(wide, dtype))
    if dtype == "int4":
        assert distance(scores(path, "int8"), own) < 0.05  # rounded twice, and other blocks
        assert distance(scores(others[0], "int4"), own) < 0.3  # rounded twice
    widened, about = load_model(path, CpuKernels("float32", 1), COMM)
    assert about.rounded == dtype == opened_in(path, "auto")
    for spec in model.layout.specs:
        exact, found = model.params[spec.name], widened.params[spec.name]
        expected = round_alike(exact, spec, dtype)
        # The summation order decides between equally good scales.
        assert np.isclose(found, expected, atol=1e-6).mean() > (0.99 if dtype == "int4" else 1 - 1e-9)
        assert np.square(found - exact).sum() == pytest.approx(np.square(expected - exact).sum(), rel=1e-3)
    assert dtype in repr(api.load(path)) and dtype in repr(api.init(SHAPES["odd"], dtype=dtype))


def test_int8_file_opens_in_int8_by_default(files):
    _, wide, narrow, _ = files
    assert opened_in(wide, "auto") == "float32" and opened_in(narrow, "auto", on_gpu=True) == "float32"
    assert opened_in(narrow, "float64") == "float64"
    model = api.load(narrow)
    assert "int8" not in repr(api.load(narrow, dtype="float32")) and model.parameters()["wte"].dtype == np.float32
    assert np.isfinite(model.loss([[1, 2, 3]], [[2, 3, 4]])) and len(model.generate([1, 2, 3], 5)) == 5


@pytest.mark.parametrize("error, words, act", [
    (UsageError, "cannot be trained", lambda path, out: api.load(path).gradients([[1]], [[2]])),
    (UsageError, "weights quantize", lambda path, out: api.load(path).save(out)),
    (UsageError, "cannot be trained further", lambda path, out: api.train("tiny", init=str(path), out=out)),
    (UsageError, "dtype", lambda path, out: api.train("tiny", dtype="int8", steps=1, out=out)),
    (DataError, "already in int8", lambda path, out: quantize(path, out)),
])  # fmt: skip
def test_int8_files_reject_training_and_quantizing(files, tmp_path, error, words, act):
    with pytest.raises(error, match=words):
        act(files[2], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_corrupt_quantized_files_are_rejected(files, tmp_path):
    model, _, narrow, _ = files
    damaged, body = tmp_path / "damaged.safetensors", bytearray(narrow.read_bytes())
    body[-1] ^= 1
    damaged.write_bytes(body)
    with pytest.raises(DataError, match="checksum"):
        load_model(damaged, Int8Kernels(1), COMM)
    known = description(model).to_metadata()
    for metadata, problem in (
        (known | {"format_version": "3"}, "an unsupported quantization; this distgpt reads int8, .* and int4, "),
        (known | {"format_version": "3", "quantised": "int8, blocks of 64"}, "missing: "),
    ):
        write_tensors(damaged, dict(model.params), metadata)
        with pytest.raises(DataError, match=problem):
            load_model(damaged, Int8Kernels(1), COMM)
    write_tensors(damaged, dict(model.params), known | {"quantised": "int8, blocks of 64"})
    for kernels in (Int8Kernels(1), CpuKernels("float32", 1)):
        with pytest.raises(DataError, match="which format version 2 does not support"):
            load_model(damaged, kernels, COMM)
    model = build("llama", CpuKernels("float32", 1))
    model.params["blocks.0.attn.qkv.w"][3, 3] = np.nan
    save_model(damaged, model, description(model))
    for act in (lambda: load_model(damaged, Int8Kernels(1), COMM), lambda: quantize(damaged, tmp_path / "out")):
        with pytest.raises(DataError, match="not finite"):
            act()


def stored(path):
    header, found = read_header(path), {}
    types = {"U8": np.uint8, "I8": np.int8, "BF16": np.uint16, "F32": np.float32}
    for name, entry in header.tensors.items():
        found[name] = np.empty(entry.shape, types[entry.dtype])
        read_rows(path, header, name, found[name])
    return found, {name: text for name, text in header.metadata.items() if not name.endswith("sha256")}


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_invalid_scales_are_rejected(files, tmp_path, dtype):
    """Infinite, NaN, too large to multiply by 127, too few, or negative in int8."""
    tensors, metadata = stored(files[2 if dtype == "int8" else 3])
    name, path = "blocks.0.attn.qkv.w", tmp_path / "w"
    scales = tensors[name + ".scales"]
    for bits in (0x7F80, 0x7FC0, 0xFF80, 0x7F7F, *[0xBF80] * (dtype == "int8")):
        changed = scales.copy()
        changed[1, 0] = bits
        write_tensors(path, tensors | {name + ".scales": changed}, metadata)
        for kernels in (Int8Kernels(1, dtype), CpuKernels("float32", 1)):
            with pytest.raises(DataError, match=rf"{name}\.scales has scales that"):
                load_model(path, kernels, COMM)
    for wrong, problem in (
        ({name + ".scales": scales[:, :-1]}, "wrong shape"),
        ({name: tensors[name][:, :-1]}, "wrong shape"),
        ({name: tensors[name].view(np.uint8 if dtype == "int8" else np.int8)}, rf"{name} .*I8.*U8|{name} .*U8.*I8"),
    ):
        write_tensors(path, tensors | wrong, metadata)
        with pytest.raises(DataError, match=problem):
            load_model(path, Int8Kernels(1, dtype), COMM)


def test_calibrated_rounding_has_half_the_error():
    random = np.random.default_rng(3)
    mixing = random.standard_normal((24, 130)) * np.exp(random.standard_normal(130))
    x = (random.standard_normal((600, 24)) @ mixing + 0.1 * random.standard_normal((600, 130))).astype(np.float32)
    w = random.standard_normal((70, 130)).astype(np.float32)
    moved = [np.square(x @ (restored(q) - w).T).sum() for q in (quantise4(w), round_for(w, x.T @ x))]
    assert moved[1] < 0.5 * moved[0] and set(np.unique(round_for(w, x.T @ x).q)) <= set(LEVELS)
    unused = round_for(w, np.zeros((130, 130), np.float32))  # no inputs: plain rounding
    np.testing.assert_allclose(restored(unused), restored(quantise4(w)), atol=0.5)
    assert (unused.q != quantise4(w).q).mean() < 0.01  # equally good scales


def test_moved_weights_compensate_for_rounded_inputs():
    random = np.random.default_rng(4)
    exact = (random.standard_normal((600, 24)) @ random.standard_normal((24, 60))).astype(np.float32)
    w = random.standard_normal((70, 60)).astype(np.float32)
    inputs = exact + 0.3 * random.standard_normal(exact.shape).astype(np.float32)
    better, h = moved(w, exact, inputs)
    np.testing.assert_allclose(h, inputs.T @ inputs, rtol=1e-4, atol=1e-2)
    off = [np.square(inputs @ matrix.T - exact @ w.T).sum() for matrix in (w, better)]
    assert off[1] < 0.7 * off[0]
    np.testing.assert_allclose(moved(w, exact, exact)[0], w, atol=1e-3)


def test_text_calibrates_an_int4_file(tmp_path):
    text, out = tmp_path / "text", tmp_path / "q.safetensors"
    text.write_text("The harbour lamp was lit, and the boats came home. " * 20)
    sample = bundled("weights", "sample.safetensors")
    assert "int4" in quantize(sample, out, "int4", calibrated(sample, text))
    plain_way = tmp_path / "plain.safetensors"
    quantize(sample, plain_way, "int4")
    found, plain_file = stored(out)[0], stored(plain_way)[0]
    differ = {name for name in found if not np.array_equal(found[name], plain_file[name])}
    kinds = {name: entry.dtype for name, entry in read_header(out).tensors.items()}
    assert {name for name, kind in kinds.items() if kind == "U8"} <= differ
    assert not any(name.startswith(("wte", "head")) for name in differ)
    text.write_text("short")
    with pytest.raises(DataError, match="at least 128 are required"):
        calibrated(sample, text)
