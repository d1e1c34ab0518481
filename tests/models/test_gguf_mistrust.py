"""Files in GGUF that lie: one line says what is wrong, nothing is left half-written, memory stays small."""

import struct
import tracemalloc

import numpy as np
import pytest
from distgpt.core.base.errors import DataError
from distgpt.core.saved.modelfile import read_description
from distgpt.models.formats.gguf.container import read_container
from distgpt.models.formats.gguf.transfer import export_gguf, import_gguf
from foreignmodels import SHAPES, random_model
from gguffiles import LLAMA, front, rewritten_gguf, tensor, text

from conftest import inside

ALIGNED = text(b"general.alignment") + struct.pack("<II", 4, 0)
HUGE = 1 << 40
FRONTS = {
    "nothing": (b"", "cut short"),
    "another file": (b"PK\3\4 and more", "begin"),
    "cut short in its front": (front()[:15], "cut short"),
    "a version of the future": (front(4), "version is 4"),
    "a big-endian machine": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "tensors that are not there": (front(tensors=HUGE), "cut short"),
    "a text of 2^40 bytes": (front(values=1) + struct.pack("<Q", HUGE) + b"abc", "cut short"),
    "a list of 2^40 texts": (front(values=1) + text(b"k") + struct.pack("<IIQ", 9, 8, HUGE), "cut short"),
    "a list of 2^61 numbers": (front(values=1) + text(b"k") + struct.pack("<IIQ", 9, 12, 1 << 61), "cut short"),
    "a list of lists": (front(values=1) + text(b"k") + struct.pack("<IIQ", 9, 9, 1), "unknown kind 9"),
    "a kind of value that is none": (front(values=1) + text(b"k") + struct.pack("<I", 13), "unknown kind 13"),
    "a key twice": (front(values=2) + (text(b"k") + struct.pack("<IB", 0, 1)) * 2, "twice"),
    "a text that is not UTF-8": (front(values=1) + text(b"\xff"), "UTF-8"),
    "an alignment of 0": (front(values=1) + ALIGNED, "alignment is 0"),
    "a tensor twice": (front(tensors=2) + tensor() * 2, "twice"),
    "a tensor of no dimensions": (front(tensors=1) + tensor(shape=()), "0 dimensions"),
    "a row that is no block": (front(tensors=1) + tensor(shape=(33,), kind=2), "Q4_0 cannot have"),
    "a tensor of 2^124 elements": (front(tensors=1) + tensor(shape=(1 << 62, 1 << 62)), "behind the file's end"),
    "a type that is not read": (front(tensors=1) + tensor(kind=20), "of type 20"),
    "a place between two": (front(tensors=1) + tensor(at=4), "multiple"),
    "a place behind the end": (front(tensors=1) + tensor(at=1 << 50), "behind the file's end"),
    "tensors that overlap": (
        front(tensors=2) + tensor(b"x", (64,)) + tensor(b"y", at=32) + bytes(1000),
        "'y' overlaps",
    ),
}


@pytest.mark.parametrize("name", FRONTS)
def test_what_a_file_claims_is_held_against_its_size(tmp_path, name):
    content, complaint = FRONTS[name]
    (tmp_path / "m.gguf").write_bytes(content)
    tracemalloc.start()
    with pytest.raises(DataError, match=complaint) as refused:
        read_container(tmp_path / "m.gguf")
    assert tracemalloc.get_traced_memory()[1] < 1 << 22
    tracemalloc.stop()
    assert str(tmp_path / "m.gguf") in str(refused.value) and len(str(refused.value)) < 300 + len(str(tmp_path))


@pytest.fixture
def model(tmp_path):
    random_model(tmp_path / "ours.safetensors", {**LLAMA, "tied": False})
    export_gguf(tmp_path / "ours.safetensors", tmp_path / "m.gguf", "float32")
    return tmp_path / "m.gguf"


def is_refused(path, *words):
    out = path.with_name("o.safetensors")
    result = inside("weights", "import", str(path), "--out", str(out))
    assert result.returncode == 65, (result.stdout, result.stderr)
    last = result.stderr.splitlines()[-1]
    assert all(word in last for word in words), last
    assert len(last) < 600 and not [other for other in path.parent.iterdir() if "o.safe" in other.name]


CHANGES = {
    "another architecture": ({"general.architecture": "gemma3"}, "'gemma3'", "llama"),
    "no architecture": ({"general.architecture": None}, "None"),
    "one part of many": ({"split.count": 3}, "merge"),
    "no context": ({"llama.context_length": None}, "lacks llama.context_length"),
    "a text for a number": ({"llama.block_count": "two"}, "num_hidden_layers"),
    "a layer too many": ({"llama.block_count": 3}, "blk.2"),
    "a million layers": ({"llama.block_count": 1_000_000}, "num_hidden_layers"),
    "no heads": ({"llama.attention.head_count": 0}, "num_attention_heads"),
    "heads for each layer": ({"llama.attention.head_count_kv": np.array([1, 2], np.int32)}, "layer to layer"),
    "a base that is no number": ({"llama.rope.freq_base": float("nan")}, "rope_theta"),
    "yarn": ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, "'yarn'"),
    "a pattern of windows": (
        {"llama.attention.sliding_window": 8, "llama.attention.sliding_window_pattern": 4},
        "sliding_window_pattern",
    ),
    "a window that is no number": ({"llama.attention.sliding_window": "8"}, "sliding_window is '8'"),
    "a list for a text": ({"general.architecture": np.ones(3, np.int32)}, "known are"),
    "a list of scalings": ({"llama.rope.scaling.type": np.ones(3, np.int32)}, "rope_type"),
    "another width": ({"llama.embedding_length": 32}, "token_embd.weight is (300, 64), not (300, 32)"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_is_none_of_ours_is_named(model, name):
    changes, *words = CHANGES[name]

    def change(metadata, tensors):
        metadata |= changes
        for key in [key for key, value in metadata.items() if value is None]:
            del metadata[key]

    rewritten_gguf(model, change)
    is_refused(model, *words)


def test_a_window_of_attention_is_that_of_all_layers(model):
    rewritten_gguf(model, lambda metadata, tensors: metadata.update({"llama.attention.sliding_window": 8}))
    import_gguf(model, model.with_name("o.safetensors"), "byte")
    assert set(read_description(model.with_name("o.safetensors")).run.model.windows) == {8}


def test_values_that_are_not_finite_are_refused_in_every_type(tmp_path, model):
    def change(metadata, tensors):
        tensors["blk.1.ffn_up.weight"][3, 5] = np.inf

    rewritten_gguf(model, change)
    is_refused(model, "blocks.1.mlp.fc.w", "not finite")
    for dtype in ("q8_0", "q4_0", "bfloat16"):
        path = tmp_path / f"{dtype}.gguf"
        export_gguf(tmp_path / "ours.safetensors", path, dtype)
        content = bytearray(path.read_bytes())
        start = read_container(path).tensors["blk.0.attn_v.weight"].start
        content[start : start + 2] = b"\xff\x7f"  # NaN, as scale or element
        path.write_bytes(content)
        is_refused(path, "blocks.0.attn.qkv.w", "not finite")


@pytest.mark.parametrize("missing", [True, False])
def test_tensors_must_be_those_of_the_model(model, missing):
    def change(metadata, tensors):
        if missing:
            del tensors["output_norm.weight"]
        else:
            tensors["blk.0.attn_q.bias"] = np.zeros(64, np.float32)

    rewritten_gguf(model, change)
    is_refused(model, "output_norm.weight" if missing else "blk.0.attn_q.bias")


def test_a_file_that_was_cut_short_is_refused_before_anything_is_written(model):
    content = model.read_bytes()
    for end in range(0, len(content), len(content) // 60):
        model.write_bytes(content[:end])
        with pytest.raises(DataError):
            import_gguf(model, model.with_name("o.safetensors"), "byte")
    assert {path.name for path in model.parent.iterdir()} == {"m.gguf", "ours.safetensors"}


def test_factors_of_rope_must_be_those_of_llama_3(tmp_path):
    random_model(tmp_path / "ours.safetensors", SHAPES["llama 3"])
    export_gguf(tmp_path / "ours.safetensors", tmp_path / "m.gguf", "float32")

    def change(metadata, tensors):
        tensors["rope_freqs.weight"][0] += 0.5

    rewritten_gguf(tmp_path / "m.gguf", change)
    is_refused(tmp_path / "m.gguf", "rope_freqs.weight")


TOKENIZERS = {
    "a kind that is not ours": {"tokenizer.ggml.model": "bert"},
    "no tokens": {"tokenizer.ggml.tokens": "abc"},
    "tokens twice": {"tokenizer.ggml.tokens": ["a"] * 300},
    "another way to cut": {"tokenizer.ggml.pre": "dbrx"},
    "merges of nothing": {"tokenizer.ggml.merges": ["a", "b c d"]},
    "no merges": {"tokenizer.ggml.merges": 3},
    "no scores": {"tokenizer.ggml.model": "llama"},
    "a list for a kind": {"tokenizer.ggml.model": np.ones(3, np.int32)},
    "a template that is a list": {"tokenizer.chat_template": np.ones(3, np.int32)},
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_model_comes_without_a_tokenizer_that_cannot_be_used(model, name):
    rewritten_gguf(model, lambda metadata, tensors: metadata.update(TOKENIZERS[name]))
    notes = []
    said = import_gguf(model, model.with_name("o.safetensors"), None, notes.append)
    assert "without a tokenizer" in notes[0] and "tokenizer  none" in said, (notes, said)
