import os
import struct
import tracemalloc
from dataclasses import replace

import foreignmodels
import numpy as np
import pytest
from complaints import complains
from distgpt.core.base.errors import DataError
from distgpt.core.saved.modelfile import read_description
from distgpt.core.saved.tensors import write_tensors
from distgpt.models.formats.families import Settings, recognised
from distgpt.models.formats.gguf.container import read_container
from distgpt.models.formats.gguf.transfer import export_gguf, import_gguf
from distgpt.models.formats.huggingface import import_model
from foreignmodels import SHAPES, change_json, in_parts, random_model, rewritten, tensors_in, write_index
from gguffiles import LLAMA, front, rewritten_gguf, tensor, text
from hypothesis import given
from hypothesis import strategies as st

from conftest import inside

exported, llama = foreignmodels.exported, foreignmodels.llama  # fixtures


def check_refused(source, *words):
    directory = source if source.is_dir() else source.parent
    with complains(*words):
        import_model(str(source), directory.parent / "back.safetensors", None)
    assert not list(directory.parent.glob("*back*"))


# Changes of config.json, and words of the error.
OF_GPT2 = [
    ({"model_type": "opt"}, "'opt'", "'gpt2', 'llama', 'mistral', 'qwen2' and 'qwen3'"),
    ({"activation_function": "gelu"}, "'gelu'", "gelu_new"),
    ({"scale_attn_weights": False}, "scale_attn_weights must"),
    ({"add_cross_attention": True}, "add_cross_attention must"),
    ({"quantization_config": {"bits": 4}}, "quantized"),
    ({"n_layer": 10**6}, "n_layer", "at most 1000"),
    ({"n_layer": 999}, "999 layers"),
    ({"n_layer": 1}, "unexpected: 'h.1."),
    ({"vocab_size": 0}, "vocab_size must"),
    ({"vocab_size": 78}, "wte.weight is (77, 15), not (78, 15)"),
    ({"n_positions": "13"}, "n_positions", "whole number"),
    ({"n_head": 4}, "n_head (4)"),
    ({"layer_norm_epsilon": "small"}, "layer_norm_epsilon"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ({"tie_word_embeddings": False}, "missing: lm_head.weight"),
    ({"bias": False}, "must be zero", "bias"),
]
OF_LLAMA = [
    ({"num_key_value_heads": 2}, "num_attention_heads (3)", "num_key_value_heads (2)"),
    ({"num_key_value_heads": 0}, "num_key_value_heads", "at least 1"),
    ({"num_key_value_heads": 1}, "k_proj.weight is (18, 18), not (6, 18)"),
    ({"num_attention_heads": 0}, "num_attention_heads must"),
    ({"head_dim": 12}, "q_proj.weight is (18, 18), not (36, 18)"),
    ({"head_dim": -6}, "head_dim must"),
    ({"head_dim": 7}, "an even head_dim, not 7"),
    ({"attention_bias": True}, "attention_bias must"),
    ({"hidden_act": "gelu"}, "hidden_act", "'silu'"),
    ({"rope_scaling": {"factor": 8.0}, "rope_parameters": None}, "factor"),
    ({"rope_scaling": {"type": "yarn"}, "rope_parameters": None}, "'yarn'", "linear, llama3"),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 0.5}}, "rope_factor"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor must"),
    ({"rope_scaling": [1]}, "not an object"),
    ({"rope_parameters": {"rope_theta": "1e4"}}, "rope_theta"),
    ({"rope_theta": 0, "rope_parameters": {}}, "rope_theta must"),
    ({"intermediate_size": 0}, "intermediate_size must"),
]


@pytest.mark.parametrize(("model", "refusals"), [("exported", OF_GPT2), ("llama", OF_LLAMA)])
def test_unsupported_config_is_rejected(model, refusals, request):
    directory = request.getfixturevalue(model)
    intact = (directory / "config.json").read_text()
    for changes, *words in refusals:
        change_json(directory / "config.json", **changes)
        check_refused(directory, *words)
        (directory / "config.json").write_text(intact)
    import_model(str(directory), directory.parent / f"{directory.name} unchanged", None)
    for damaged in ("", "[]"):
        (directory / "config.json").write_text(damaged)
        check_refused(directory, "config.json is corrupt")


def of_types(*types, window=5):
    kinds = [f"{name}_attention" for name in types]
    return "qwen3", {"use_sliding_window": True, "sliding_window": window, "layer_types": kinds}


WINDOWS = [
    (("mistral", {}), [4096, 4096, 4096]),  # by default
    (("mistral", {"sliding_window": None}), [0, 0, 0]),
    (("mistral", {"sliding_window": 8191}), [8191, 8191, 8191]),
    (("mistral", {"sliding_window": "all"}), "sliding_window must"),
    (("mistral", {"sliding_window": 0}), "sliding_window must"),
    (("qwen2", {}), [0, 0, 0]),
    (("qwen2", {"sliding_window": 13, "use_sliding_window": False}), [0, 0, 0]),
    (("qwen2", {"sliding_window": 13, "use_sliding_window": True}), [0, 0, 0]),  # starts at layer 28
    (("qwen2", {"sliding_window": 13, "use_sliding_window": True, "max_window_layers": 0}), [13, 13, 13]),
    (("qwen2", {"sliding_window": 13, "use_sliding_window": True, "max_window_layers": 1}), "counted from the last"),
    (("qwen2", {"sliding_window": 9000, "use_sliding_window": True, "max_window_layers": 1}), [0, 0, 0]),
    (("qwen2", {"layer_types": ["sliding_attention"] * 3}), "sliding_window is not used"),
    (of_types("sliding", "sliding", "sliding", window=None), "sliding_window is not used"),
    (of_types("full", "full", "full"), [0, 0, 0]),
    (of_types("sliding", "sliding", "sliding"), [5, 5, 5]),
    (of_types("full", "sliding", "full"), [0, 5, 0]),
    (of_types("sliding", "sliding", "full"), [5, 5, 0]),
    (of_types("full", "full", "sliding"), "counted from the last"),
    (of_types("sliding", "sliding"), "per layer"),
    (of_types("linear", "linear", "linear"), "layer_types must"),
    (("qwen3", {**of_types()[1], "layer_types": "sliding_attention"}), "layer_types must"),
]


@pytest.mark.parametrize(("asked", "expected"), WINDOWS)
def test_attention_windows_are_read_or_rejected(asked, expected):
    values = {"model_type": asked[0], "max_position_embeddings": 8192, "num_hidden_layers": 3, **asked[1]}
    if isinstance(expected, str):
        with complains("there: ", expected):
            recognised(Settings(values, "there"))
    else:
        assert recognised(Settings(values, "there"))[1].windows == expected


def test_window_of_context_length_is_kept():
    values = {"model_type": "mistral", "max_position_embeddings": 8192, "sliding_window": 8192}
    config = recognised(Settings(values, "there"))[1]
    assert not any(config.windows) and all(replace(config, seq_len=16384).windows)


def test_missing_model_is_reported_with_a_fix(exported):
    (exported / "model.safetensors").rename(exported / "other.safetensors")
    check_refused(exported, "has neither model.safetensors nor model.safetensors.index.json")
    for name in ("pytorch_model.bin", "model.pt"):
        (exported / name).write_bytes(b"\x80\x04.")
        for source in (exported, exported / name):
            check_refused(source, name, "save_pretrained")
        (exported / name).unlink()
    (exported / "config.json").unlink()
    check_refused(exported, "has no config.json")
    check_refused(exported / "other.safetensors", "has no config.json")
    os.mkfifo(exported / "pipe")
    check_refused(exported / "pipe", "is a pipe or a device")


def with_nan(tensors):
    tensors["transformer.h.1.attn.c_attn.weight"][3, 3] = np.nan


def test_invalid_tensors_are_rejected(exported):
    path = exported / "model.safetensors"
    intact, lost = path.read_bytes(), "h.1.mlp.c_proj.bias"
    for change, *words in (
        (lambda t: t | {"ln_f.weight": t["transformer.ln_f.weight"]}, "'ln_f.weight'", "duplicate"),
        (lambda t: t | {"score.weight": np.zeros((2, 15), np.float32)}, "unexpected: 'score.weight'"),
        (with_nan, "blocks.1.attn.qkv.w has values that are not finite"),
        (lambda t: {name: array for name, array in t.items() if not name.endswith(lost)}, f"missing: {lost}"),
    ):
        rewritten(exported, change)
        check_refused(exported, *words)
        path.write_bytes(intact)
    path.write_bytes(intact[:-7] + bytes([intact[-7] ^ 4]) + intact[-6:])
    check_refused(exported, "corrupt")
    path.write_bytes(intact[:-1])
    check_refused(exported, "not a valid safetensors file")
    path.write_bytes(intact)
    numpy_files, tensors = pytest.importorskip("safetensors.numpy"), tensors_in(path)
    tensors["transformer.wpe.weight"] = tensors["transformer.wpe.weight"].astype(np.int32)
    numpy_files.save_file(tensors, path)
    check_refused(exported, "wpe.weight is I32")


def test_invalid_index_is_rejected(exported):
    mapping, name = in_parts(exported), "transformer.wte.weight"
    other = next(file for file in set(mapping.values()) if file != mapping[name])
    outside = ("../evil.safetensors", "/etc/passwd", "..", ".", "a\\b", "a\0b", 7, None)
    for wrong, words in (
        *((mapping | {name: place}, "not in the same directory") for place in outside),
        (mapping | {name: "gone.safetensors"}, "'gone.safetensors', which is missing"),
        ({}, "no weight_map"),
    ):
        write_index(exported, wrong)
        check_refused(exported, words)
    # A tensor in two files. The names differ by the prefix, so that the index can list both.
    tensors = tensors_in(exported / other) | {"wte.weight": np.zeros(15, np.float32)}
    write_tensors(exported / other, tensors, {"format": "pt"})
    write_index(exported, mapping | {"wte.weight": other})
    check_refused(exported, "'wte.weight'", "duplicate")


ALIGNED = text(b"general.alignment") + struct.pack("<II", 4, 0)
HUGE, ONE, KEY = 1 << 40, front(values=1), front(values=1) + text(b"k")
FRONTS = {
    "nothing": (b"", "truncated"),
    "another file": (b"PK\3\4 and more", "start with GGUF"),
    "cut short in its front": (front()[:15], "truncated"),
    "a version of the future": (front(4), "version"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "tensors that are not there": (front(tensors=HUGE), "truncated"),
    "a text of 2^40 bytes": (ONE + struct.pack("<Q", HUGE) + b"abc", "truncated"),
    "a list of 2^40 texts": (KEY + struct.pack("<IIQ", 9, 8, HUGE), "truncated"),
    "a list of 2^61 numbers": (KEY + struct.pack("<IIQ", 9, 12, 1 << 61), "truncated"),
    "a list of lists": (KEY + struct.pack("<IIQ", 9, 9, 1), "unknown type 9"),
    "a kind of value that is none": (KEY + struct.pack("<I", 13), "unknown type 13"),
    "a key twice": (front(values=2) + (text(b"k") + struct.pack("<IB", 0, 1)) * 2, "duplicate key"),
    "a text that is not UTF-8": (ONE + text(b"\xff"), "UTF-8"),
    "an alignment of 0": (ONE + ALIGNED, "alignment"),
    "a tensor twice": (front(tensors=2) + tensor() * 2, "duplicate tensor"),
    "a tensor of no dimensions": (front(tensors=1) + tensor(shape=()), "0 dimensions"),
    "a row that is no block": (front(tensors=1) + tensor(shape=(33,), kind=2), "Q4_0 does not support"),
    "a tensor of 2^124 elements": (front(tensors=1) + tensor(shape=(1 << 62, 1 << 62)), "after the file's end"),
    "a type that is not read": (front(tensors=1) + tensor(kind=20), "unknown type 20"),
    "a place between two": (front(tensors=1) + tensor(at=4), "multiple"),
    "a place behind the end": (front(tensors=1) + tensor(at=1 << 50), "after the file's end"),
    "tensors that overlap": (
        front(tensors=2) + tensor(b"x", (64,)) + tensor(b"y", at=32) + bytes(1000),
        "'y' overlaps",
    ),
}


@pytest.mark.parametrize("name", FRONTS)
def test_gguf_claims_are_checked_against_its_size(tmp_path, name):
    content, complaint = FRONTS[name]
    (path := tmp_path / "m.gguf").write_bytes(content)
    tracemalloc.start()
    with complains(path, complaint):
        read_container(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 22
    tracemalloc.stop()


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    random_model(folder / "ours.safetensors", {**LLAMA, "tied": False})
    export_gguf(folder / "ours.safetensors", folder / "m.gguf", "float32")
    return folder / "m.gguf"


@pytest.fixture
def model(sound, tmp_path):
    (path := tmp_path / "m.gguf").write_bytes(sound.read_bytes())
    return path


def is_refused(path, *words):
    out = path.with_name("o.safetensors")
    result = inside("weights", "import", str(path), "--out", str(out))
    assert result.returncode == 65, (result.stdout, result.stderr)
    last = result.stderr.splitlines()[-1]
    assert all(word in last for word in words), last
    assert len(last) < 600 and not [other for other in path.parent.iterdir() if "o.safe" in other.name]


@given(st.data())
def test_corrupt_gguf_fails_harmlessly(sound, data):
    """A truncated file is always rejected; a changed byte may be, with a short message."""
    content = bytearray(sound.read_bytes())
    begin = next(iter(sorted(entry.start for entry in read_container(sound).tensors.values())))
    (damaged := sound.with_name("damaged.gguf")).write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with complains(damaged):
        import_gguf(damaged, damaged.with_name("o.safetensors"), "byte")
    content[data.draw(st.integers(0, begin))] = data.draw(st.integers(0, 255))
    damaged.write_bytes(content)
    try:
        read_container(damaged)
    except DataError as error:
        assert str(damaged) in str(error) and "\n" not in str(error) and len(str(error)) < 700
    assert not damaged.with_name("o.safetensors").exists()


CHANGES = {
    "another architecture": ({"general.architecture": "gemma3"}, "'gemma3'", "llama"),
    "no architecture": ({"general.architecture": None}, "None"),
    "one part of many": ({"split.count": 3}, "merge"),
    "no context": ({"llama.context_length": None}, "lacks llama.context_length"),
    "a text for a number": ({"llama.block_count": "two"}, "num_hidden_layers"),
    "a layer too many": ({"llama.block_count": 3}, "blk.2"),
    "a million layers": ({"llama.block_count": 1_000_000}, "num_hidden_layers"),
    "no heads": ({"llama.attention.head_count": 0}, "num_attention_heads"),
    "heads for each layer": ({"llama.attention.head_count_kv": np.array([1, 2], np.int32)}, "the same for all layers"),
    "a base that is no number": ({"llama.rope.freq_base": float("nan")}, "rope_theta"),
    "yarn": ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, "'yarn'"),
    "a pattern of windows": (
        {"llama.attention.sliding_window": 8, "llama.attention.sliding_window_pattern": 4},
        "sliding_window_pattern",
    ),
    "a window that is no number": ({"llama.attention.sliding_window": "8"}, "sliding_window must be"),
    "a list for a text": ({"general.architecture": np.ones(3, np.int32)}, "known: "),
    "a list of scalings": ({"llama.rope.scaling.type": np.ones(3, np.int32)}, "rope_type"),
    "another width": ({"llama.embedding_length": 32}, "token_embd.weight must have the shape (300, 32)"),
    "a tensor less": ({"tensor output_norm.weight": None}, "output_norm.weight"),
    "a tensor more": ({"tensor blk.0.attn_q.bias": np.zeros(64, np.float32)}, "blk.0.attn_q.bias"),
    "infinity": ({"tensor blk.1.ffn_up.weight": np.full((96, 64), np.inf)}, "blocks.1.mlp.fc.w", "not finite"),
}


def changed(path, changes):
    """Set metadata or tensors; None removes them."""

    def change(metadata, tensors):
        for name, value in changes.items():
            found, key = (tensors, name[7:]) if name.startswith("tensor ") else (metadata, name)
            found[key] = value
            if value is None:
                del found[key]

    rewritten_gguf(path, change)


@pytest.mark.parametrize("name", CHANGES)
def test_unsupported_gguf_model_is_rejected(model, name):
    changes, *words = CHANGES[name]
    changed(model, changes)
    is_refused(model, *words)


def test_gguf_window_applies_to_all_layers(model):
    changed(model, {"llama.attention.sliding_window": 8})
    import_gguf(model, model.with_name("o.safetensors"), "byte")
    assert set(read_description(model.with_name("o.safetensors")).run.model.windows) == {8}


@pytest.mark.parametrize("dtype", ["q8_0", "q4_0", "bfloat16"])
def test_nonfinite_gguf_values_are_rejected(tmp_path, sound, dtype):
    export_gguf(sound.with_name("ours.safetensors"), path := tmp_path / "m.gguf", dtype)
    content = bytearray(path.read_bytes())
    start = read_container(path).tensors["blk.0.attn_v.weight"].start
    content[start : start + 2] = b"\xff\x7f"  # NaN, as scale or element
    path.write_bytes(content)
    is_refused(path, "blocks.0.attn.qkv.w", "not finite")


@pytest.mark.parametrize(
    "changes",
    [
        {"tensor rope_freqs.weight": np.array([8.5, 8, 8], np.float32)},
        {"tensor rope_freqs.weight": np.full((3, 1), 8, np.float32)},
        {"llama.rope.scaling.type": "linear"},  # conflicts with the factors
    ],
)
def test_rope_factors_must_match_llama_3(tmp_path, changes):
    random_model(tmp_path / "ours.safetensors", SHAPES["llama 3"])
    export_gguf(tmp_path / "ours.safetensors", tmp_path / "m.gguf", "float32")
    changed(tmp_path / "m.gguf", changes)
    is_refused(tmp_path / "m.gguf", "rope_freqs.weight")


TOKENIZERS = {
    "a kind that is not ours": {"model": "bert"},
    "no tokens": {"tokens": "abc"},
    "tokens twice": {"tokens": ["a"] * 300},
    "another way to cut": {"pre": "dbrx"},
    "merges of nothing": {"merges": ["a", "b c d"]},
    "no merges": {"merges": 3},
    "no scores": {"model": "llama"},
    "a list for a kind": {"model": np.ones(3, np.int32)},
    "a template that is a list": {"tokenizer.chat_template": np.ones(3, np.int32)},
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_unusable_gguf_tokenizer_is_dropped(model, name):
    changed(model, {k if "." in k else f"tokenizer.ggml.{k}": value for k, value in TOKENIZERS[name].items()})
    notes = []
    said = import_gguf(model, model.with_name("o.safetensors"), None, notes.append)
    assert "without a tokenizer" in notes[0] and "tokenizer  none" in said, (notes, said)
