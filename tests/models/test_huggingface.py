"""Import and export of models: nothing is lost on the way, and nothing is written over or left half."""

import json
import shutil
import signal
import time
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from distgpt.core.base.errors import DataError, StorageError, UsageError
from distgpt.core.config.presets import preset
from distgpt.core.data.tokenizers import fingerprint, load_tokenizer
from distgpt.core.saved.modelfile import read_description
from distgpt.core.saved.tensors import read_header, write_tensors
from distgpt.corpora.tokenizers.bpe import GPT2_FINGERPRINT
from distgpt.models.formats.families import EXPORTABLE, FAMILIES, family_for
from distgpt.models.formats.gguf.transfer import family_in_gguf
from distgpt.models.formats.huggingface import export_model, import_model
from foreignmodels import (
    MODERN,
    QWEN3,
    SHAPES,
    SMALL,
    change_json,
    exported,  # noqa: F401
    exported_model,
    in_parts,
    llama,  # noqa: F401
    random_model,
    rewritten,
    same,
    tensors_in,
)
from tokenizing import GPT2, needs_gpt2

from conftest import distgpt, popen, refused


def brought_in(source, *more):
    out = Path(source).parent / "back.safetensors"
    import_model(str(source), out, *(more or [None]))
    return out


# Round trips


@pytest.mark.parametrize("name", SHAPES)
def test_export_and_import_give_the_same_bits(tmp_path, name):
    ours = exported_model(tmp_path / "theirs", SHAPES[name])
    back = brought_in(tmp_path / "theirs")
    assert same(tensors_in(back), ours)
    before, after = (read_description(path) for path in (tmp_path / "ours.safetensors", back))
    assert after.run.model == before.run.model
    kept = [each.tokenizer and each.tokenizer.to_json() for each in (before, after)]
    assert kept[0] == kept[1]
    export_model(back, tmp_path / "again", "float32")
    for file in (tmp_path / "theirs").iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name


def test_half_precision_survives_a_round_trip(tmp_path):
    random_model(tmp_path / "ours.safetensors", SMALL)
    for dtype, stored in (("float16", "F16"), ("bfloat16", "BF16")):
        first, again = (tmp_path / dtype / name for name in ("theirs", "again"))
        export_model(tmp_path / "ours.safetensors", first, dtype)
        export_model(brought_in(first), again, dtype)
        file = first / "model.safetensors"
        assert file.read_bytes() == (again / "model.safetensors").read_bytes()
        assert {entry.dtype for entry in read_header(file).tensors.values()} == {stored}
        assert json.loads((first / "config.json").read_text())["torch_dtype"] == dtype


def test_numbers_are_rounded_to_the_nearest_even_and_too_large_ones_refused(tmp_path):
    path = tmp_path / "ours.safetensors"
    ours = random_model(path, SMALL)
    metadata = read_header(path).metadata
    gains = {1.0: 1.0, 1 + 2**-8: 1.0, 1 + 3 * 2**-8: 1 + 2**-6, 1 + 2**-8 + 2**-20: 1 + 2**-7, -0.0: -0.0}
    ours["final_norm.w"][: len(gains)] = list(gains)
    write_tensors(path, ours, metadata)
    export_model(path, tmp_path / "bfloat16", "bfloat16")
    found = tensors_in(tmp_path / "bfloat16" / "model.safetensors")["transformer.ln_f.weight"]
    assert found[: len(gains)].tobytes() == np.array(list(gains.values()), np.float32).tobytes()
    for dtype, value in (("float16", 7e4), ("bfloat16", 3.4e38), ("float32", 1e39)):
        large = in_float64(ours) if dtype == "float32" else dict(ours)
        large["wpe"][3, 3] = value
        write_tensors(path, large, metadata)
        too_large = pytest.raises(DataError, match="wpe holds values too large")
        with warnings.catch_warnings(action="error"), too_large:
            export_model(path, tmp_path / "theirs", dtype)
        assert not list(tmp_path.glob("*theirs*"))


def in_float64(tensors):
    return {name: array.astype(np.float64) for name, array in tensors.items()}


def test_float64_is_kept_on_the_way_in(exported):
    rewritten(exported, in_float64)
    assert {entry.dtype for entry in read_header(brought_in(exported)).tensors.values()} == {"F64"}


# What transformers writes in several ways


def with_buffers(tensors):
    masks = {f"transformer.h.{i}.attn.bias": np.ones((1, 1, 13, 13), np.float32) for i in range(2)}
    return tensors | masks | {"transformer.h.0.attn.masked_bias": np.array(-1e4, np.float32)}


def test_newer_and_older_llamas_say_their_angles_differently(llama):
    for absent in ("rope_theta", "rope_parameters", "head_dim", "num_key_value_heads"):
        change_json(llama / "config.json", **{absent: None})
        import_model(str(llama), llama.with_name(f"{absent}.safetensors"), None)


def test_older_and_newer_llamas_say_their_scaling_differently(tmp_path):
    exported_model(tmp_path / "theirs", SHAPES["llama 3"])
    expected = read_description(brought_in(tmp_path / "theirs")).run.model
    path, old = tmp_path / "theirs" / "config.json", "original_max_position_embeddings"
    parameters = json.loads(path.read_text())["rope_parameters"]
    scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
    named = {"type" if key == "rope_type" else key: value for key, value in scaling.items()}
    without = {key: value for key, value in scaling.items() if key != old}
    for changes, context in (
        ({"rope_parameters": None, "rope_scaling": scaling}, 6),
        ({"rope_parameters": None, "rope_scaling": named}, 6),
        ({"rope_parameters": parameters, "rope_scaling": None, "rope_theta": None}, 6),
        ({"rope_parameters": None, "rope_scaling": without}, 13),  # the context is the one before
    ):
        change_json(path, **changes)
        (tmp_path / "back.safetensors").unlink()
        found = read_description(brought_in(tmp_path / "theirs")).run.model
        assert found == replace(expected, rope_context=context)


WAYS = {
    "by the file": lambda directory: directory / "model.safetensors",
    "without the prefix": lambda directory: rewritten(
        directory, lambda t: {name.removeprefix("transformer."): array for name, array in t.items()}
    ),
    "with buffers": lambda directory: rewritten(directory, with_buffers),
    "with a copy of the embedding": lambda directory: rewritten(
        directory, lambda t: t | {"lm_head.weight": t["transformer.wte.weight"]}
    ),
    "in parts": lambda directory: in_parts(directory) and directory,
    "by the index": lambda directory: in_parts(directory) and directory / "model.safetensors.index.json",
}


def test_all_ways_to_store_a_model_are_read(exported):
    ours = tensors_in(exported.parent / "ours.safetensors")
    for name, way in WAYS.items():
        directory = Path(shutil.copytree(exported, exported.parent / name))
        out = directory.with_suffix(".safetensors")
        import_model(str(way(directory) or directory), out, None)
        assert same(tensors_in(out), ours), name


# Tokenizers


@pytest.mark.ci
@needs_gpt2
def test_the_tokenizer_of_gpt2_survives(tmp_path):
    theirs = tmp_path / "theirs"
    exported_model(theirs, {**SMALL, "vocab_size": 50257}, str(GPT2))
    config = json.loads((theirs / "config.json").read_text())
    assert config["eos_token_id"] == config["bos_token_id"] == 50256
    assert fingerprint(read_description(brought_in(theirs)).tokenizer) == GPT2_FINGERPRINT
    assert fingerprint(load_tokenizer(str(theirs / "vocab.json"))) == GPT2_FINGERPRINT


def test_tokenizers_that_transformers_lacks_come_back_to_us(tmp_path):
    """None at all can be replaced by one that is named."""
    for kind, *named in (("char",), ("word",), (None, "byte")):
        (theirs := tmp_path / str(kind) / "theirs").parent.mkdir()
        exported_model(theirs, {**SMALL, "vocab_size": 256}, kind)
        assert not (theirs / "tokenizer.json").exists()
        assert read_description(brought_in(theirs, *named)).tokenizer.kind == (kind or "byte")


def test_tokenizers_that_do_not_fit_or_are_foreign(exported):
    with pytest.raises(DataError, match=r"vocabulary of 77, too small for its tokenizer of 256 entries"):
        brought_in(exported, "byte")
    (exported / "tokenizer.json").write_text('{"model": {"type": "Unigram", "vocab": []}}')
    notes = []
    assert read_description(brought_in(exported, None, notes.append)).tokenizer is None
    assert "without a tokenizer" in notes[0] and "Unigram" in notes[0]


# What transformers has no model for


def test_what_no_family_has_is_named(tmp_path):
    modern = {**MODERN, "n_embd": 12}
    for shape, words in (
        ({"mlp": "swiglu"}, "GPT-2, .* has no mlp=swiglu"),
        ({"positions": "none"}, "GPT-2, .* has no positions=none"),
        (modern | {"bias": True}, "Llama, .* has no bias=True"),
        (modern | {"mlp": "relu"}, "Llama, .* has no mlp=relu"),
        ({"norm_gain": False}, "GPT-2, .* has no norm_gain=False"),
        ({"embed_norm": True}, "GPT-2, .* has no embed_norm"),
        ({"n_kv_head": 1}, "GPT-2, .* has no n_kv_head"),
        (modern | {"qk_norm": True}, "has no qk_norm"),
        (QWEN3 | {"n_embd": 12, "qkv_bias": True}, "Qwen 3, .* has no qkv_bias=True"),
        ({"head_dim": 4}, "GPT-2, .* has no head_dim"),
        ({"bias": False, "qkv_bias": True}, "GPT-2, .* has no qkv_bias=True"),
        (modern | {"value_embeddings": True}, "Llama, .* has no value_embeddings"),
        ({"window": 5}, "GPT-2, .* has no window"),
        (modern | {"window": 5}, "Llama, .* has no window|Mistral, .* has no full_every"),
        ({"final_norm": False}, "GPT-2, .* has no final_norm=False"),
    ):
        random_model(tmp_path / "ours.safetensors", {**SMALL, **shape})
        with pytest.raises(UsageError, match=words):
            export_model(tmp_path / "ours.safetensors", tmp_path / "theirs", "float32")
        assert not (tmp_path / "theirs").exists()


# Without a network


@pytest.mark.peer
def test_the_hub_without_a_network_is_one_line(tmp_path):
    pytest.importorskip("huggingface_hub")
    where = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    result = distgpt("weights", "import", "hub:nobody/nothing", "--out", tmp_path / "w", env=where)
    refused(result, 65, "nobody/nothing cannot be fetched", "give a directory")


# Where they write: never over anything, never half, and found out before the work


def test_an_export_needs_an_empty_place_and_an_intact_model(exported):
    ours, empty, new = (exported.parent / name for name in ("ours.safetensors", "empty", "new"))
    before = {path: path.read_bytes() for path in exported.iterdir()}
    with pytest.raises(UsageError, match=f"{exported} .*not an empty directory"):
        export_model(ours, exported, "float32")
    assert {path: path.read_bytes() for path in exported.iterdir()} == before
    empty.mkdir()
    export_model(ours, empty, "float32")
    assert (empty / "config.json").exists()
    with pytest.raises(UsageError, match="not a name for a new directory"):
        export_model(ours, Path(), "float32")
    content = ours.read_bytes()
    ours.write_bytes(content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])
    with pytest.raises(DataError, match=f"{ours} is damaged"):
        export_model(ours, new, "float32")
    assert not new.exists()


def test_where_an_import_cannot_be_written_is_found_out_before_anything_is_read(tmp_path):
    file, nothing = tmp_path / "file", str(tmp_path / "no model")
    file.touch()
    with pytest.raises(StorageError, match=r"cannot read .*no model: No such file"):
        import_model(nothing, tmp_path / "w.safetensors", None)
    for out, kind, words in (
        (file, UsageError, "exists already"),
        (tmp_path, UsageError, "exists already"),
        (tmp_path / "no" / "w", StorageError, "cannot write .*no files can be made in"),
        (file / "w", StorageError, "cannot write .*file/w"),
    ):
        with pytest.raises(kind, match=words):
            import_model(nothing, out, None)


@pytest.mark.ci
def test_a_killed_export_leaves_no_directory(tmp_path):
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs"
    random_model(ours, {**SMALL, "vocab_size": 60_000, "n_embd": 90})
    process = popen("weights", "export", ours, "--out", theirs)
    while not (found := list(tmp_path.glob(".theirs.*.tmp"))) and process.poll() is None:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL and not theirs.exists()
    assert found[0].exists() and not (found[0] / "config.json").exists()
    export_model(ours, theirs, "float32")
    assert not found[0].exists()


def test_a_refused_export_names_presets_that_can_be_exported():
    for name in EXPORTABLE:
        assert family_in_gguf(preset(name).model, name) in FAMILIES
    for family in (family_for, family_in_gguf):
        with pytest.raises(UsageError, match=f"exported: .*--preset {' or '.join(EXPORTABLE)};.*no "):
            family(preset("tiny").model, "tiny")
