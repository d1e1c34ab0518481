"""The weights file: round trips, the official library, and everything that must be refused or survive."""

import hashlib
import json
import os
import pickle
import tracemalloc
import zipfile

import numpy as np
import pytest
from distgpt.core.base.errors import DataError
from distgpt.core.base.files import bundled
from distgpt.core.config import ModelConfig
from distgpt.core.saved import tensors as weightsfile
from distgpt.core.saved.modelfile import read_description
from distgpt.core.saved.tensors import HEADER_SUM, read_header, read_into, write_tensors
from foreignmodels import random_model


def some_tensors():
    rng = np.random.default_rng(3)
    flat = rng.standard_normal(40).astype(np.float32)
    return {
        "wte": flat[:15].reshape(5, 3),
        "bias": flat[15:18],
        "wide": rng.standard_normal((2, 3)),
        "turned": rng.standard_normal((4, 6)).astype(np.float32).T,
        "none": np.zeros((0, 7), np.float32),
        "one": np.array(2.5, np.float32),
    }


def blank(tensors, dtype=None):
    return {name: np.full(array.shape, -1.0, dtype or array.dtype) for name, array in tensors.items()}


def same(left, right):
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


def raw_file(path, header, data=b""):
    """A file with exactly this header (a JSON value or bytes) and these data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "weights.safetensors"


@pytest.fixture(params=[1 << 20, 7], ids=["whole", "pieces"])
def piece(request, monkeypatch):
    """Run with tensors that fit in one piece, and with tensors that need several."""
    monkeypatch.setattr(weightsfile, "_PIECE_ELEMENTS", request.param)


# Round trips


def test_round_trip(path, piece):
    tensors, metadata = some_tensors(), {"note": "naïve café ☕", "empty": ""}
    header_sum = write_tensors(path, tensors, metadata)
    header, whole = read_header(path), hashlib.sha256(path.read_bytes()).hexdigest()
    assert header.metadata[HEADER_SUM] == header_sum
    assert metadata.items() < header.metadata.items()
    assert {name: e.shape for name, e in header.tensors.items()} == {n: a.shape for n, a in tensors.items()}
    strided = {name: np.full((*array.shape, 2), -1.0)[..., 0] for name, array in tensors.items()}
    for loaded, sums in ((blank(tensors), ()), (blank(tensors), (header_sum,)), (strided, ())):
        read_into(path, loaded, *sums)
        assert same(loaded, tensors)
    for wrong in ((whole,), ("0",)):
        with pytest.raises(DataError, match="checksum"):
            read_into(path, blank(tensors), *wrong)


def test_converts_between_float_types(path, piece):
    values = np.array([1.0, -2.5, 0.0, 3.140625] * 8, np.float32).reshape(8, 4)
    for stored in (np.float32, np.float64):
        write_tensors(path, {"x": values.astype(stored)}, {})
        for wanted in (np.float32, np.float64):
            loaded = {"x": np.full((8, 4), -1.0, wanted)}
            read_into(path, loaded)
            assert same(loaded, {"x": values.astype(wanted)}), (stored, wanted)
    halves, tops = values.astype("<f2").tobytes(), (values.view("<u4") >> 16).astype("<u2").tobytes()
    header = {"h": entry("F16", (32,), (0, 64)), "b": entry("BF16", (8, 4), (64, 128))}
    raw_file(path, header, halves + tops)
    loaded = {"h": np.zeros(32, np.float32), "b": np.zeros((8, 4), np.float32)}
    read_into(path, loaded)
    assert same(loaded, {"h": values.reshape(-1), "b": values})


def test_equal_input_gives_equal_bytes_and_data_are_aligned(path, tmp_path):
    tensors, metadata = some_tensors(), {"a": "1", "b": "2"}
    write_tensors(path, tensors, metadata)
    other = tmp_path / "other"
    write_tensors(other, dict(reversed(tensors.items())), dict(reversed(metadata.items())))
    assert path.read_bytes() == other.read_bytes()
    for length in range(8):
        write_tensors(path, {"a": np.zeros(3, np.float32), "b": np.zeros(2)}, {"note": "x" * length})
        header = read_header(path)
        assert header.data_start % 8 == 0
        assert (header.tensors["b"].start, header.tensors["a"].start) == (0, 16)


def test_no_tensor_is_copied_whole(path):
    big = np.zeros((1 << 10, 1 << 12), np.float32)  # 16 MiB
    into = {"straight": np.ones_like(big), "turned": np.ones_like(big).T}
    tracemalloc.start()
    write_tensors(path, {"straight": big, "turned": big.T}, {})
    read_into(path, into)
    assert tracemalloc.get_traced_memory()[1] < 12 << 20
    tracemalloc.stop()
    assert not into["straight"].any() and not into["turned"].any()


def test_the_official_library_reads_ours_and_ours_reads_its(path):
    official, files = pytest.importorskip("safetensors"), pytest.importorskip("safetensors.numpy")
    tensors = some_tensors()
    write_tensors(path, tensors, {"note": "naïve"})
    assert same(files.load_file(path), tensors)
    with official.safe_open(path, "numpy") as file:
        assert file.metadata()["note"] == "naïve"
    tensors = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    tensors["half"] = np.arange(5, dtype=np.float16)
    files.save_file(tensors, path, metadata={"note": "naïve"})
    assert read_header(path).metadata == {"note": "naïve"}
    loaded = blank(tensors, np.float32)
    read_into(path, loaded)
    assert same(loaded, {name: array.astype(np.float32) for name, array in tensors.items()})


# What a file says of itself


def test_a_file_that_does_not_describe_a_model_is_refused(path):
    ours, whole = {"format": "distgpt-weights"}, {"config": "", "tokenizer": ""}
    for metadata in ({}, {"format": "pt"}, ours, {**ours, "format_version": "9", **whole}):
        write_tensors(path, some_tensors(), metadata)
        words = "version '9'" if "config" in metadata else r"weights\.safetensors: not written by distgpt"
        with pytest.raises(DataError, match=words):
            read_description(path)


def test_weights_outlive_settings_that_were_removed(path):
    header = read_header(bundled("weights", "sample.safetensors"))
    tensors = {name: np.zeros(tensor.shape, np.float32) for name, tensor in header.tensors.items()}
    config = header.metadata["config"] + "recheck_every = 3\n"  # the last table is [train]
    write_tensors(path, tensors, header.metadata | {"config": config})
    assert read_description(path).run == read_description(bundled("weights", "sample.safetensors")).run


# Damage


def refused(path, destination):
    """Whether `read_into` refuses the file with one line that names it, its destination untouched."""
    before = {name: array.copy() for name, array in destination.items()}
    try:
        read_into(path, destination)
    except DataError as error:
        assert str(path) in str(error) and "\n" not in str(error) and len(str(error)) < 600
        assert str(error).encode()
        assert same(destination, before)
        return True
    return False


def test_every_truncation_is_refused(path):
    tensors = some_tensors()
    write_tensors(path, tensors, {})
    intact = path.read_bytes()
    for content in (*(intact[:length] for length in range(0, len(intact), 3)), intact[:-1], intact + b"\0"):
        path.write_bytes(content)
        assert refused(path, blank(tensors)), len(content)


SMALLEST = {"n_layer": 1, "n_head": 1, "n_embd": 2, "vocab_size": 3, "seq_len": 2}


def test_a_flipped_bit_in_any_byte_of_a_model_is_refused(path):
    """In its header too: its configuration, its tokenizer, the names of the checksums themselves."""
    arrays = random_model(path, SMALLEST)
    intact = path.read_bytes()
    assert read_description(path).run.model == ModelConfig(**SMALLEST)
    for place in range(0, len(intact), 3):
        path.write_bytes(intact[:place] + bytes([intact[place] ^ 1 << place % 8]) + intact[place + 1 :])
        with pytest.raises(DataError):
            read_into(path, arrays)
            read_description(path)


def test_files_of_the_first_version_may_lack_the_checksum_of_the_header(path):
    random_model(path, SMALLEST)
    text = json.loads(path.read_bytes()[8 : (start := read_header(path).data_start)])
    del text["__metadata__"]["header_sha256"]
    data = path.read_bytes()[start:]
    with pytest.raises(DataError, match="its checksum header_sha256 is missing"):
        read_description(raw_file(path, text, data))
    text["__metadata__"]["format_version"] = "1"
    assert read_description(raw_file(path, text, data)).run.model.n_embd == 2


BIG = 2**62
BAD_HEADERS = {
    "not JSON": b"{nonsense}",
    "not an object": b"[1, 2]",
    "same tensor twice": b'{"x":%s,"x":%s}' % ((json.dumps(entry()).encode(),) * 2),
    "metadata not text": {"__metadata__": {"a": 1}, "x": entry()},
    "unknown dtype": {"x": entry("F8")},
    "entry incomplete": {"x": {"dtype": "F32", "shape": [2]}},
    "negative shape": {"x": entry(shape=(-2,))},
    "shape overflows": {"x": entry(shape=(BIG, 4, 2))},
    "shape beyond 64 bits": {"x": entry(shape=(0, 2**70), offsets=(0, 0)), "y": entry()},
    "too many dimensions": {"x": entry(shape=[1] * 99 + [2])},
    "offsets negative": {"x": entry(offsets=(-8, 0))},
    "offsets not for shape": {"x": entry(shape=(1,))},
    "outside the file": {"x": entry(shape=(BIG,), offsets=(0, 4 * BIG))},
    "past the end": {"x": entry(shape=(4,), offsets=(0, 16))},
    "hole in front": {"x": entry(shape=(1,), offsets=(4, 8))},
    "hole between": {"x": entry(shape=(), offsets=(0, 4)), "y": entry(shape=(0,), offsets=(8, 8))},
    "overlap": {"x": entry(), "y": entry(shape=(1,), offsets=(4, 8))},
}


def test_bad_headers_are_refused(path):
    for name, header in BAD_HEADERS.items():
        raw_file(path, header, bytes(8))
        with pytest.raises(DataError, match="not an intact safetensors file"):
            read_header(path)
            pytest.fail(f"{name} was read")
        assert refused(path, {"x": np.ones(2, np.float32)}), name
    raw_file(path, {"x": entry()}, bytes(8))
    assert not refused(path, {"x": np.ones(2, np.float32)})


def test_absurd_header_lengths_are_refused(path):
    for length in (100_000_001, 2**63, 2**64 - 1, 200):
        path.write_bytes(length.to_bytes(8, "little") + b"{")
        os.truncate(path, 300_000_000 if length == 100_000_001 else 100)  # sparse: takes no room
        with pytest.raises(DataError, match=f"header of {length}"):
            read_header(path)
    # None, and data that look like a header which describes itself as one tensor.
    path.write_bytes(bytes(8) + json.dumps({"x": entry(shape=(25,), offsets=(0, 100))}).encode().ljust(100))
    with pytest.raises(DataError, match="no header"):
        read_header(path)


def test_pickles_get_their_own_hint_and_headers_that_look_like_one_are_read(path, tmp_path):
    bare, zipped = tmp_path / "model.bin", tmp_path / "model.pt"
    bare.write_bytes(pickle.dumps({"weights": [1.0] * 100}))
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("data.pkl", bare.read_bytes())
    for file in (bare, zipped):
        with pytest.raises(DataError, match="pickled file; distgpt reads safetensors only"):
            read_header(file)
    for length in (0x80, int.from_bytes(b"PK", "little")):
        raw_file(path, json.dumps({"x": entry()}).encode().ljust(length), bytes(8))
        assert path.read_bytes().startswith((b"\x80", b"PK"))
        assert read_header(path).tensors["x"].shape == (2,)


def test_misfits_are_listed_before_anything_is_read(path):
    write_tensors(path, {f"t{i}": np.zeros(2, np.float32) for i in range(6)}, {})
    destination = {"t0": np.ones((2, 1), np.float32), "other": np.ones(2, np.float32)}
    with pytest.raises(DataError) as caught:
        read_into(path, destination)
    assert str(caught.value) == (
        f"{path} holds other tensors than this model: missing: other; "
        "unexpected: 't1', 't2', 't3' and 2 more; wrong shape: t0 is (2,), not (2, 1)"
    )
    assert destination["t0"].all() and destination["other"].all()
