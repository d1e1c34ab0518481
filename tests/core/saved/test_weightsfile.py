"""Weights files: round trips, the safetensors library, corruption and `weights info`."""

import hashlib
import json
import os
import pickle
import re
import shutil
import tracemalloc
import zipfile
from pathlib import Path

import distgpt
import numpy as np
import pytest
from complaints import complains, done
from distgpt.core.base.errors import DataError, command_line
from distgpt.core.base.files import bundled
from distgpt.core.config import ModelConfig
from distgpt.core.saved import tensors as weightsfile
from distgpt.core.saved.modelfile import read_description
from distgpt.core.saved.tensors import HEADER_SUM, LazyTensors, read_header, read_into, verify_whole, write_tensors
from distgpt.models.formats.huggingface import import_model
from distgpt.show.weightspage import inspect, page
from foreignmodels import SHAPES, change_json, exported, in_parts, random_model, tensors_in  # noqa: F401

from conftest import SMALL, inside
from conftest import refused as command_refused


def some_tensors():
    rng = np.random.default_rng(3)
    flat = rng.standard_normal(40).astype(np.float32)
    return {
        "wte": flat[:15].reshape(5, 3), "bias": flat[15:18], "wide": rng.standard_normal((2, 3)),
        "turned": rng.standard_normal((4, 6)).astype(np.float32).T, "none": np.zeros((0, 7), np.float32),
        "one": np.array(2.5, np.float32),
    }  # fmt: skip


def blank(tensors, dtype=None):
    return {name: np.full(array.shape, -1.0, dtype or array.dtype) for name, array in tensors.items()}


def same(left, right):
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


def raw_file(path, header, data=b""):
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
    monkeypatch.setattr(weightsfile, "PIECE_ELEMENTS", request.param)


def test_weights_round_trip(path, piece):
    tensors, metadata = some_tensors(), {"note": "naïve café ☕", "empty": ""}
    header_sum = write_tensors(path, tensors, metadata)
    header, whole = read_header(path), hashlib.sha256(path.read_bytes()).hexdigest()
    assert header.metadata[HEADER_SUM] == header_sum and metadata.items() < header.metadata.items()
    assert {name: e.shape for name, e in header.tensors.items()} == {n: a.shape for n, a in tensors.items()}
    strided = {name: np.full((*array.shape, 2), -1.0)[..., 0] for name, array in tensors.items()}
    for loaded, sums in ((blank(tensors), ()), (blank(tensors), (header_sum,)), (strided, ())):
        read_into(path, loaded, *sums)
        assert same(loaded, tensors)
    for wrong in ((whole,), ("0",)):
        with pytest.raises(DataError, match="checksum"):
            read_into(path, blank(tensors), *wrong)


def test_read_into_converts_float_types(path, piece):
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


def test_weights_files_are_deterministic_and_aligned(path, tmp_path):
    tensors, metadata = some_tensors(), {"a": "1", "b": "2"}
    write_tensors(path, tensors, metadata)
    other = tmp_path / "other"
    write_tensors(other, dict(reversed(tensors.items())), dict(reversed(metadata.items())))
    assert path.read_bytes() == other.read_bytes()
    for length in range(8):
        write_tensors(path, {"a": np.zeros(3, np.float32), "b": np.zeros(2)}, {"note": "x" * length})
        header = read_header(path)
        assert header.data_start % 8 == 0 and (header.tensors["b"].start, header.tensors["a"].start) == (0, 16)


def test_tensors_are_not_copied_whole(path):
    big = np.zeros((1 << 10, 1 << 12), np.float32)  # 16 MiB
    into = {"straight": np.ones_like(big), "turned": np.ones_like(big).T}
    tracemalloc.start()
    write_tensors(path, {"straight": big, "turned": big.T}, {})
    read_into(path, into)
    assert tracemalloc.get_traced_memory()[1] < 12 << 20
    tracemalloc.stop()
    assert not into["straight"].any() and not into["turned"].any()


def test_safetensors_library_is_compatible(path):
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


def refused(path, destination):
    before = {name: array.copy() for name, array in destination.items()}
    try:
        read_into(path, destination)
    except DataError as error:
        assert str(path) in str(error) and "\n" not in str(error) and len(str(error)) < 600
        assert str(error).encode() and same(destination, before)
        return True
    return False


SMALLEST = {"n_layer": 1, "n_head": 1, "n_embd": 2, "vocab_size": 3, "seq_len": 2}


def test_corrupt_weights_are_rejected(path):
    arrays, intact = random_model(path, SMALLEST), path.read_bytes()
    assert read_description(path).run.model == ModelConfig(**SMALLEST)
    for place in range(0, len(intact), 3):
        path.write_bytes(intact[:place] + bytes([intact[place] ^ 1 << place % 8]) + intact[place + 1 :])
        with pytest.raises(DataError):
            read_into(path, arrays)
            read_description(path)
        os.truncate(path, place)
        assert refused(path, arrays), place
    for content in (intact[:-1], intact + b"\0"):
        path.write_bytes(content)
        assert refused(path, arrays)


def test_missing_header_checksum_is_valid_only_in_version_1(path):
    random_model(path, SMALLEST)
    text = json.loads(path.read_bytes()[8 : (start := read_header(path).data_start)])
    del text["__metadata__"]["header_sha256"]
    data = path.read_bytes()[start:]
    with complains("its checksum header_sha256 is missing"):
        read_description(raw_file(path, text, data))
    text["__metadata__"]["format_version"] = "1"
    assert read_description(raw_file(path, text, data)).run.model.n_embd == 2


def test_files_without_model_are_rejected(path):
    ours, whole = {"format": "distgpt-weights"}, {"config": "", "tokenizer": ""}
    for metadata in ({}, {"format": "pt"}, ours, {**ours, "format_version": "9", **whole}):
        write_tensors(path, some_tensors(), metadata)
        with complains("version '9'" if "config" in metadata else f"{path} was not written by distgpt"):
            read_description(path)


BIG = 2**62
BAD_HEADERS = {
    "not JSON": b"{nonsense}",
    "not an object": b"[1, 2]",
    "same tensor twice": b'{"x":%s,"x":%s}' % ((json.dumps(entry()).encode(),) * 2),
    "metadata not text": {"__metadata__": {"a": 1}, "x": entry()},
    "unknown dtype": {"x": entry("F8")},
    "no whole block": {"x": entry("Q8_0")},
    "a block without a dimension": {"x": entry("Q4_0", shape=())},
    "block not for offsets": {"x": entry("Q8_0", shape=(32,))},
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


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_invalid_headers_are_rejected(path, name):
    raw_file(path, BAD_HEADERS[name], bytes(8))
    with complains("not a valid safetensors file"):
        read_header(path)
    assert refused(path, {"x": np.ones(2, np.float32)})
    raw_file(path, {"x": entry()}, bytes(8))
    assert not refused(path, {"x": np.ones(2, np.float32)})


def test_lazy_tensors_are_made_once(path):
    made = []

    def make(name):
        made.append(name)
        return np.full((2, 3), len(name), np.float32)

    write_tensors(path, LazyTensors(dict.fromkeys(("a", "bb"), (np.dtype(np.float32), (2, 3))), make), {"k": "v"})
    eager = write_tensors(path.with_suffix(".eager"), {"bb": make("bb"), "a": make("a")}, {"k": "v"})
    assert made == ["a", "bb", "bb", "a"] and path.read_bytes() == path.with_suffix(".eager").read_bytes()
    verify_whole(path, eager)


def test_invalid_header_lengths_are_rejected(path):
    for length in (100_000_001, 2**63, 2**64 - 1, 200):
        path.write_bytes(length.to_bytes(8, "little") + b"{")
        os.truncate(path, 300_000_000 if length == 100_000_001 else 100)  # sparse: takes no room
        with complains(f"header has {length}"):
            read_header(path)
    # No header, and data that look like one.
    path.write_bytes(bytes(8) + json.dumps({"x": entry(shape=(25,), offsets=(0, 100))}).encode().ljust(100))
    with complains("no header"):
        read_header(path)


def test_pickles_get_a_hint(path, tmp_path):
    bare, zipped = tmp_path / "model.bin", tmp_path / "model.pt"
    bare.write_bytes(pickle.dumps({"weights": [1.0] * 100}))
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("data.pkl", bare.read_bytes())
    for file in (bare, zipped):
        with complains("pickle file"):
            read_header(file)
    for length in (0x80, int.from_bytes(b"PK", "little")):
        raw_file(path, json.dumps({"x": entry()}).encode().ljust(length), bytes(8))
        assert path.read_bytes().startswith((b"\x80", b"PK")) and read_header(path).tensors["x"].shape == (2,)


def test_misfits_are_listed_before_reading(path):
    write_tensors(path, {f"t{i}": np.zeros(2, np.float32) for i in range(6)}, {})
    destination = {"t0": np.ones((2, 1), np.float32), "other": np.ones(2, np.float32)}
    with complains(path, "missing: other", "unexpected: 't1', 't2', 't3' and 2 more", "t0 is (2,), not (2, 1)"):
        read_into(path, destination)
    assert destination["t0"].all() and destination["other"].all()


def test_info_describes_trained_model(trained, tmp_path):
    path = tmp_path / "without a suffix"
    shutil.copy(trained / "weights.safetensors", path)
    found = inspect(path)
    assert found["kind"] == "weights" and found["checksum"] == "verified"
    assert found["config"]["n_layer"] == 2 and found["types"] == ["F32"]
    assert found["trained"].startswith("on story, 30 steps of 128 tokens, seed")
    assert found["bytes"] == path.stat().st_size
    assert "word, " in found["tokenizer"] and "2 layers, 2 heads, width 16" in page(found)
    weights = trained / "weights.safetensors"
    assert inspect(trained) == {"file": str(weights), **inspect(weights)} and str(weights) in page(inspect(trained))


def test_info_describes_imported_model(exported):
    path = exported.parent / "w.safetensors"
    import_model(str(exported), path, None)
    found, arrays = inspect(path), tensors_in(path)
    assert found["origin"] == "GPT-2 model imported from gpt2" and "trained" not in found
    padding = (len(arrays["wte"]) - 77) * 15
    assert found["parameters"] == sum(array.size for array in arrays.values()) - padding
    for name, said in (("mistral", "windows of 4 tokens in 2 layers"), ("llama", "no biases, tied")):
        random_model(path, SHAPES[name])
        shown = page(inspect(path))
        assert said in shown and ("windows" in said) == ("windows" in shown)


def test_info_describes_transformers_model(exported):
    for divided in (False, True):
        if divided:
            in_parts(exported)
        found = inspect(exported)
        assert found["what"] == "a GPT2LMHeadModel of transformers" + " in 3 files" * divided
        assert found["imports"] == f"yes: {command_line('weights', 'import', exported, '--out', 'FILE')}"
        assert found["config"]["seq_len"] == 13
        alone = inspect(exported / ("model.safetensors.index.json" if divided else "model.safetensors"))
        assert alone["config"] == found["config"]
    change_json(exported / "config.json", activation_function="gelu")
    found = inspect(exported)
    assert found["imports"].startswith("no: ") and "gelu_new" in found["imports"] and "config" not in found
    change_json(exported / "config.json", model_type="bert", architectures=["BertModel"])
    assert "a BertModel of transformers" in page(inspect(exported))
    change_json(exported / "config.json", architectures=["\x1b[2J\nGPT2"])  # no terminal command
    assert page(inspect(exported)).startswith(r"what         a \x1b[2J\nGPT2 of transformers in 3 files" + "\n")
    (exported / "config.json").unlink()
    found = inspect(next(exported.glob("model-00001*")))
    assert found["kind"] == "tensors" and "config.json" in found["imports"]


def test_info_describes_checkpoint(trained, tmp_path):
    whole = trained / "checkpoints" / "step-00000030"
    found = inspect(whole)
    assert found["kind"] == "checkpoint" and found["step"] == 30 and found["world_size"] == 1
    assert "verified" in found["checksum"] and "after step 30" in page(found)
    for name in ("weights.safetensors", "optimizer.safetensors", "state.json"):
        path = shutil.copytree(whole, tmp_path / name / whole.name)
        content = bytearray((path / name).read_bytes())
        content[-3] ^= 1
        (path / name).write_bytes(content)
        with complains(f"{name} is corrupt"):
            inspect(path)


def test_info_rejects_invalid_files(path, tmp_path):
    for place, words in ((tmp_path, "has no config.json"), (Path("/dev/null"), "not a file or a directory")):
        with complains(words):
            inspect(place)
    path.write_bytes(b"PK")
    with complains("save_pretrained"):
        inspect(path.rename(tmp_path / "model.bin"))
    arrays = random_model(path, SHAPES["odd"])
    intact, metadata = path.read_bytes(), read_header(path).metadata
    path.write_bytes(intact[:-1])
    command_refused(inside("weights", "info", path), 65, path)
    config = metadata["config"].replace("n_layer = 2", "n_layer = 3")
    write_tensors(path, arrays, metadata | {"config": config})
    with complains("missing: blocks"):
        inspect(path)
    # Removed settings are ignored.
    header = read_header(bundled("weights", "sample.safetensors"))
    tensors = {name: np.zeros(tensor.shape, np.float32) for name, tensor in header.tensors.items()}
    config = header.metadata["config"] + "recheck_every = 3\n"  # the last table is [train]
    write_tensors(path, tensors, header.metadata | {"config": config})
    assert read_description(path).run == read_description(bundled("weights", "sample.safetensors")).run


ESCAPE = "\x1b]0;owned\x07\x1b[2J\u202e"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
LABELLED = {"ctx": "the lamp", "endings": ["was lit", "was old", "the sea", "the boat"]}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    out = tmp_path_factory.mktemp("hostile") / "run"
    done("train", *SMALL, "--tokenizer", "byte", "--steps", "1", "--out", out, "--progress", "plain")
    return out / "weights.safetensors"


def changed(weights, path, change=None, **metadata):
    model = distgpt.load(weights)
    tensors = {name: np.array(values) for name, values in model.parameters().items()}
    if change:
        for values in tensors.values():
            change(values)
    write_tensors(path, tensors, read_header(weights).metadata | metadata)
    return path


DOTTED = "a." * 100_000 + "a"


def test_hostile_settings_are_one_line_errors(weights, tmp_path):
    """The TOML parser would take gigabytes for a key of many parts."""
    config, path = read_header(weights).metadata["config"], tmp_path / "w.safetensors"
    for value in ("[" * 3000 + "]" * 3000, "9" * 5000, "1e400", "1979-99-99"):
        changed(weights, path, config=re.sub(r"(?m)^n_embd = .*$", f"n_embd = {value}", config))
        command_refused(result := inside("weights", "info", path), 65, "w.safetensors")
        assert len(result.stderr) < 2000 and "Traceback" not in result.stderr
    (tmp_path / "x.toml").write_text(f"[model]\n{DOTTED} = 1\n")
    command_refused(inside("train", "--config", tmp_path / "x.toml", "--out", tmp_path / "no"), 2, "dots")
    changed(weights, path, config=f"n_embd.{DOTTED} = 1")
    command_refused(inside("infer", "--weights", path), 65, "w.safetensors", "dots")


def test_overflowing_weights_exit_with_76(weights, tmp_path):
    path = changed(weights, tmp_path / "w.safetensors", lambda values: values.fill(1e15))
    (tmp_path / "h.jsonl").write_text(json.dumps({**LABELLED, "label": 1}))
    for words in (
        ["infer", "--prompt", "x", "--max-new-tokens", "3", "--json"],
        ["eval", "--val", "names", "--val-tokens", "64", "--json"],
        ["eval", "--hellaswag", tmp_path / "h.jsonl", "--json"],
    ):
        result = inside(*words, "--weights", path, "--threads", "1")
        assert result.returncode == 76 and "\0" not in result.stdout and "{" not in result.stdout
        assert [line for line in result.stderr.splitlines() if line.startswith("distgpt: ")], result.stderr


def test_output_has_no_terminal_commands(weights, tmp_path):
    evil = tmp_path / f"a{ESCAPE}"
    evil.mkdir()
    own = changed(weights, evil / "w.safetensors", origin=f"from {ESCAPE}\nforged")
    (evil / "h.jsonl").write_text(json.dumps({**LABELLED, "label": ESCAPE}))
    (evil / "c.toml").write_text('"\\u001b[2J" = 1')
    curves = evil / "run"
    curves.mkdir()
    (curves / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    nothing = evil / "nothing"
    for words in (
        ["weights", "info", own],
        ["weights", "export", own, "--out", evil / "hf"],
        ["weights", "import", evil / "hf", "--out", evil / "back"],
        ["weights", "info", evil / "hf"],
        ["eval", "--weights", own, "--val", "story", "--val-tokens", "64"],
        ["eval", "--weights", own, "--hellaswag", evil / "h.jsonl"],
        ["estimate", "--config", evil / "c.toml"],
        ["plot", curves, "--title", ESCAPE, "--out", evil / "p.svg"],
        ["tokenizer", "info", "byte", "--text", ESCAPE],
        ["infer", "--weights", nothing],
        ["infer", f"--{ESCAPE}"],
        ["infer", "--top-k", ESCAPE],
        ["infer", "--stage", ESCAPE],
        ["train", "--data", nothing, "--out", evil / "run2"],
        ["train", "--preset", ESCAPE],
        [ESCAPE],
        ["bench", ESCAPE],
        ["bench", "stages", "--stages", ESCAPE],
    ):
        result = inside(*words, env={"OPENBLAS_CORETYPE": ESCAPE})
        found = CONTROL.search(result.stdout + result.stderr)
        assert not found, (words, found, result.stdout + result.stderr)
        assert len(result.stderr) < 2500 and "Traceback" not in result.stderr, (words, result.stderr)
        assert not re.search("^forged", result.stdout, re.MULTILINE)
