"""Models from anywhere: whatever is wrong with one is said in one line, before anything is written."""

import os
from dataclasses import replace

import numpy as np
import pytest
from distgpt.core.base.errors import DataError
from distgpt.core.saved.tensors import write_tensors
from distgpt.models.formats.families import Settings, recognised
from distgpt.models.formats.huggingface import import_model
from foreignmodels import (
    change_json,
    exported,  # noqa: F401
    in_parts,
    llama,  # noqa: F401
    rewritten,
    tensors_in,
    write_index,
)


def check_refused(source, words):
    directory = source if source.is_dir() else source.parent
    with pytest.raises(DataError, match=words) as caught:
        import_model(str(source), directory.parent / "back.safetensors", None)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700
    assert not list(directory.parent.glob("*back*"))


# Changes of config.json, and what is said of them.
GPT2_REFUSALS = [
    ({"model_type": "opt"}, "'opt'; 'gpt2', 'llama', 'mistral', 'qwen2' and 'qwen3' can be imported"),
    ({"activation_function": "gelu"}, "'gelu': distgpt has gelu_new"),
    ({"scale_attn_weights": False}, "scale_attn_weights is False"),
    ({"add_cross_attention": True}, "add_cross_attention is True"),
    ({"quantization_config": {"bits": 4}}, "quantized"),
    ({"n_layer": 10**6}, "n_layer is 1000000: it must be at most 1000"),
    ({"n_layer": 999}, "asks for 999 layers, which it does not hold"),
    ({"n_layer": 1}, "unexpected: 'h.1."),
    ({"vocab_size": 0}, "vocab_size is 0"),
    ({"vocab_size": 78}, r"wte.weight is \(77, 15\), not \(78, 15\)"),
    ({"n_positions": "13"}, "n_positions is '13': it must be a whole number"),
    ({"n_head": 4}, "cannot be divided among n_head 4"),
    ({"layer_norm_epsilon": "small"}, "layer_norm_epsilon is 'small': it must be a number"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes': it must be true or false"),
    ({"tie_word_embeddings": False}, "missing: lm_head.weight"),
    ({"bias": False}, "is not zero, but its configuration has no bias"),
]
LLAMA_REFUSALS = [
    ({"num_key_value_heads": 2}, "num_attention_heads 3 is no multiple of num_key_value_heads 2"),
    ({"num_key_value_heads": 0}, "num_key_value_heads is 0: it must be at least 1"),
    ({"num_key_value_heads": 1}, r"k_proj.weight is \(18, 18\), not \(6, 18\)"),
    ({"num_attention_heads": 0}, "num_attention_heads is 0"),
    ({"head_dim": 12}, r"q_proj.weight is \(18, 18\), not \(36, 18\)"),
    ({"head_dim": -6}, "head_dim is -6"),
    ({"head_dim": 7}, "head_dim = 7 is odd"),
    ({"attention_bias": True}, "attention_bias is True"),
    ({"hidden_act": "gelu"}, "distgpt has .silu. alone"),
    ({"rope_scaling": {"factor": 8.0}, "rope_parameters": None}, "factor is 8.0"),
    ({"rope_scaling": {"type": "yarn"}, "rope_parameters": None}, "'yarn'.*, linear, llama3"),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 0.5}}, "rope_factor is 0.5: it must be at least"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
    ({"rope_scaling": [1]}, "not an object"),
    ({"rope_parameters": {"rope_theta": "1e4"}}, "rope_theta is '1e4': it must be a number"),
    ({"rope_theta": 0, "rope_parameters": {}}, "rope_theta is 0"),
    ({"intermediate_size": 0}, "intermediate_size is 0"),
]


WINDOWS = [
    ("mistral", {}, [4096, 4096, 4096]),  # by default
    ("mistral", {"sliding_window": None}, [0, 0, 0]),
    ("mistral", {"sliding_window": 8191}, [8191, 8191, 8191]),
    ("mistral", {"sliding_window": "all"}, "sliding_window is 'all'"),
    ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
    ("qwen2", {}, [0, 0, 0]),
    ("qwen2", {"sliding_window": 13, "use_sliding_window": False}, [0, 0, 0]),
    ("qwen2", {"sliding_window": 13, "use_sliding_window": True}, [0, 0, 0]),  # from layer 28 on
    ("qwen2", {"sliding_window": 13, "use_sliding_window": True, "max_window_layers": 0}, [13, 13, 13]),
    ("qwen2", {"sliding_window": 13, "use_sliding_window": True, "max_window_layers": 1}, "counted back"),
    ("qwen2", {"sliding_window": 9000, "use_sliding_window": True, "max_window_layers": 1}, [0, 0, 0]),
    ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "no sliding_window is used"),
    (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": None, "layer_types": ["sliding_attention"] * 3},
        "no sliding_window is used",
    ),
    *(
        ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "layer_types": types}, expected)
        for types, expected in (
            (["full_attention"] * 3, [0, 0, 0]),
            (["sliding_attention"] * 3, [5, 5, 5]),
            (["full_attention", "sliding_attention", "full_attention"], [0, 5, 0]),
            (["sliding_attention", "sliding_attention", "full_attention"], [5, 5, 0]),
            (["full_attention", "full_attention", "sliding_attention"], "counted back from the last"),
            (["sliding_attention"] * 2, "of each layer"),
            (["linear_attention"] * 3, "layer_types is"),
            ("sliding_attention", "layer_types is"),
        )
    ),
]


@pytest.mark.parametrize(("kind", "changes", "expected"), WINDOWS)
def test_windows_of_attention_are_read_or_refused(kind, changes, expected):
    values = {"model_type": kind, "max_position_embeddings": 8192, "num_hidden_layers": 3, **changes}
    if isinstance(expected, str):
        with pytest.raises(DataError, match=f"there: .*{expected}"):
            recognised(Settings(values, "there"))
    else:
        config = recognised(Settings(values, "there"))[1]
        assert config.windows == expected


def test_a_window_as_long_as_the_context_is_kept_for_longer_ones():
    values = {"model_type": "mistral", "max_position_embeddings": 8192, "sliding_window": 8192}
    config = recognised(Settings(values, "there"))[1]
    assert not any(config.windows) and all(replace(config, seq_len=16384).windows)


def test_a_configuration_that_is_not_ours_is_refused(exported, llama):
    for directory, refusals in ((exported, GPT2_REFUSALS), (llama, LLAMA_REFUSALS)):
        intact = (directory / "config.json").read_text()
        for changes, words in refusals:
            change_json(directory / "config.json", **changes)
            check_refused(directory, words)
            (directory / "config.json").write_text(intact)
        import_model(str(directory), directory.parent / f"{directory.name} unchanged", None)


def test_a_damaged_configuration_is_refused(exported):
    for text in ("", "[]"):
        (exported / "config.json").write_text(text)
        check_refused(exported, "config.json is damaged")


def test_a_directory_without_what_belongs_there_is_refused_with_the_way_out(exported):
    (exported / "model.safetensors").rename(exported / "other.safetensors")
    check_refused(exported, "has neither model.safetensors nor model.safetensors.index.json")
    for name in ("pytorch_model.bin", "model.pt"):
        (exported / name).write_bytes(b"\x80\x04.")
        for source in (exported, exported / name):
            check_refused(source, f"{name} is not read, .*save_pretrained")
        (exported / name).unlink()
    (exported / "config.json").unlink()
    check_refused(exported, "has no config.json")
    check_refused(exported / "other.safetensors", r"has no config\.json, which says")
    os.mkfifo(exported / "pipe")
    check_refused(exported / "pipe", "is a pipe or a device")


def with_nan(tensors):
    tensors["transformer.h.1.attn.c_attn.weight"][3, 3] = np.nan


def without(name):
    return lambda tensors: {other: array for other, array in tensors.items() if other != name}


# What is done to the tensors, and what is said of them.
OTHER_TENSORS = [
    (lambda t: t | {"ln_f.weight": t["transformer.ln_f.weight"]}, "holds 'ln_f.weight' twice"),
    (lambda t: t | {"score.weight": np.zeros((2, 15), np.float32)}, "unexpected: 'score.weight'"),
    (with_nan, "blocks.1.attn.qkv.w holds values that are not finite"),
    (without("transformer.h.1.mlp.c_proj.bias"), "missing: h.1.mlp.c_proj.bias"),
]


def test_other_and_damaged_tensors_are_refused(exported):
    path = exported / "model.safetensors"
    intact = path.read_bytes()
    for change, words in OTHER_TENSORS:
        rewritten(exported, change)
        check_refused(exported, words)
        path.write_bytes(intact)
    path.write_bytes(intact[:-7] + bytes([intact[-7] ^ 4]) + intact[-6:])
    check_refused(exported, "damaged")
    path.write_bytes(intact[:-1])
    check_refused(exported, "not an intact safetensors file")


def test_tensors_that_are_no_floats_are_refused(exported):
    numpy_files = pytest.importorskip("safetensors.numpy")
    tensors = tensors_in(exported / "model.safetensors")
    tensors["transformer.wpe.weight"] = tensors["transformer.wpe.weight"].astype(np.int32)
    numpy_files.save_file(tensors, exported / "model.safetensors")
    check_refused(exported, "not of floats: wpe.weight is I32")


def test_an_index_that_does_not_fit_its_files_or_leads_outside_is_refused(exported):
    mapping = in_parts(exported)
    name = "transformer.wte.weight"
    other = next(file for file in set(mapping.values()) if file != mapping[name])
    outside = ("../evil.safetensors", "/etc/passwd", "..", ".", "a\\b", "a\0b", 7, None)
    for wrong, words in (
        *((mapping | {name: place}, "which is not a file beside it") for place in outside),
        (mapping | {name: "gone.safetensors"}, "lists 'gone.safetensors', which is missing"),
        ({}, "has no weight_map"),
    ):
        write_index(exported, wrong)
        check_refused(exported, words)
    # A tensor in two files, under names that differ by the prefix, so that the index can list both.
    tensors = tensors_in(exported / other) | {"wte.weight": np.zeros(15, np.float32)}
    write_tensors(exported / other, tensors, {"format": "pt"})
    write_index(exported, mapping | {"wte.weight": other})
    check_refused(exported, "holds 'wte.weight' twice")
