"""Import and export of models: nothing is lost on the way, and nothing foreign is believed."""

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import distgpt, refused
from foreignmodels import (
    MODERN,
    SHAPES,
    SMALL,
    change_json,
    exported,  # noqa: F401
    in_parts,
    random_model,
    rewritten,
    same,
    tensors_in,
)

from distgpt.data.tokenizers.naming import GPT2_FINGERPRINT, fingerprint, load_tokenizer
from distgpt.errors import DataError, StorageError, UsageError
from distgpt.saved.huggingface.exporting import export_model
from distgpt.saved.huggingface.importing import import_model
from distgpt.saved.modelfile import read_description
from distgpt.saved.tensors import read_header, write_tensors

GPT2_FILES = Path(__file__).parents[2] / "shared" / "data" / "gpt2"


def brought_in(source, *more):
    out = Path(source).parent / "back.safetensors"
    import_model(str(source), out, *(more or [None]))
    return out


# Round trips


@pytest.mark.parametrize("name", SHAPES)
def test_export_and_import_give_the_same_bits(tmp_path, name):
    ours = random_model(tmp_path / "ours.safetensors", SHAPES[name])
    export_model(tmp_path / "ours.safetensors", tmp_path / "theirs", "float32")
    back = brought_in(tmp_path / "theirs")
    assert same(tensors_in(back), ours)
    before, after = (read_description(path) for path in (tmp_path / "ours.safetensors", back))
    assert after.run.model == before.run.model
    assert (after.tokenizer and after.tokenizer.to_json()) == (
        before.tokenizer and before.tokenizer.to_json()
    )
    export_model(back, tmp_path / "again", "float32")
    for file in (tmp_path / "theirs").iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_survives_a_round_trip(tmp_path, dtype):
    random_model(tmp_path / "ours.safetensors", SMALL)
    export_model(tmp_path / "ours.safetensors", tmp_path / "theirs", dtype)
    export_model(brought_in(tmp_path / "theirs"), tmp_path / "again", dtype)
    first, second = (tmp_path / name / "model.safetensors" for name in ("theirs", "again"))
    assert first.read_bytes() == second.read_bytes()
    assert {entry.dtype for entry in read_header(first).tensors.values()} == {
        {"float16": "F16"}.get(dtype, "BF16")
    }
    assert json.loads((first.parent / "config.json").read_text())["torch_dtype"] == dtype


def test_bfloat16_is_rounded_to_the_nearest_even(tmp_path):
    ours = random_model(tmp_path / "ours.safetensors", SMALL)
    gains = {1.0: 1.0, 1 + 2**-8: 1.0, 1 + 3 * 2**-8: 1 + 2**-6, 1 + 2**-8 + 2**-20: 1 + 2**-7, -0.0: -0.0}
    ours["final_norm.w"][: len(gains)] = list(gains)
    write_tensors(tmp_path / "ours.safetensors", ours, read_header(tmp_path / "ours.safetensors").metadata)
    export_model(tmp_path / "ours.safetensors", tmp_path / "theirs", "bfloat16")
    found = tensors_in(tmp_path / "theirs" / "model.safetensors")["transformer.ln_f.weight"]
    assert found[: len(gains)].tobytes() == np.array(list(gains.values()), np.float32).tobytes()


@pytest.mark.parametrize(("dtype", "value"), [("float16", 7e4), ("bfloat16", 3.4e38)])
def test_numbers_too_large_for_the_type_are_refused(tmp_path, dtype, value):
    ours = random_model(tmp_path / "ours.safetensors", SMALL)
    ours["wpe"][3, 3] = value
    write_tensors(tmp_path / "ours.safetensors", ours, read_header(tmp_path / "ours.safetensors").metadata)
    with pytest.raises(DataError, match=f"wpe holds numbers too large for {dtype}"):
        export_model(tmp_path / "ours.safetensors", tmp_path / "theirs", dtype)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours.safetensors"]


def test_float64_is_kept_on_the_way_in(exported):
    rewritten(exported, lambda tensors: {name: array.astype(np.float64) for name, array in tensors.items()})
    assert {entry.dtype for entry in read_header(brought_in(exported)).tensors.values()} == {"F64"}


def test_float64_is_rounded_on_the_way_out_which_is_said(tmp_path):
    ours, notes = tmp_path / "ours.safetensors", []
    arrays = random_model(ours, SMALL, dtype=np.float64)
    export_model(ours, tmp_path / "theirs", "float32", notes.append)
    assert "float64, are rounded to float32" in notes[-1]
    arrays["wpe"][3, 3] = 1e39
    write_tensors(ours, arrays, read_header(ours).metadata)
    result = distgpt("weights", "export", ours, "--out", tmp_path / "no")
    assert result.returncode == 65 and "Warning" not in result.stderr
    assert "wpe holds numbers too large for float32" in result.stderr.splitlines()[-1]
    random_model(ours, SMALL)
    export_model(ours, tmp_path / "exact", "float32", notes.append)
    assert "rounded" not in notes[-1]


def test_an_output_layer_is_compared_in_full(exported):
    """Not as it would be after rounding to float32."""
    rewritten(exported, lambda tensors: {name: array.astype(np.float64) for name, array in tensors.items()})
    rewritten(exported, lambda t: t | {"lm_head.weight": t["transformer.wte.weight"] + 1e-12})
    with pytest.raises(DataError, match="differs from its embedding"):
        brought_in(exported)


def test_tensors_lie_where_transformers_looks_for_them(tmp_path):
    """As comparing scores with its own has shown; here where it is not installed."""
    for name in ("odd", "llama", "no bias"):
        ours = random_model(tmp_path / f"{name}.safetensors", SHAPES[name])
        export_model(tmp_path / f"{name}.safetensors", tmp_path / name, "float32")
        theirs = tensors_in(tmp_path / name / "model.safetensors")
        block = {key.removeprefix("blocks.1."): array for key, array in ours.items()}
        if name == "llama":
            layer = {key.removeprefix("model.layers.1."): array for key, array in theirs.items()}
            parts = np.concatenate([layer[f"self_attn.{part}_proj.weight"] for part in "qkv"])
            assert np.array_equal(parts, block["attn.qkv.w"])
            parts = np.concatenate([layer[f"mlp.{part}_proj.weight"] for part in ("gate", "up")])
            assert np.array_equal(parts, block["mlp.fc.w"])
            assert np.array_equal(layer["post_attention_layernorm.weight"], block["norm2.w"])
            assert np.array_equal(theirs["model.embed_tokens.weight"], ours["wte"][:77])
        else:
            layer = {key.removeprefix("transformer.h.1."): array for key, array in theirs.items()}
            assert np.array_equal(layer["attn.c_attn.weight"].T, block["attn.qkv.w"])
            assert np.array_equal(layer["mlp.c_proj.weight"].T, block["mlp.proj.w"])
            assert np.array_equal(layer["ln_2.weight"], block["norm2.w"])
            if name == "odd":
                assert np.array_equal(layer["mlp.c_fc.bias"], block["mlp.fc.b"])
            else:
                assert not layer["mlp.c_fc.bias"].any() and len(layer["mlp.c_fc.bias"]) == 48


# What transformers writes in several ways


def by_the_file(directory):
    return directory / "model.safetensors"


def without_prefix(directory):
    rewritten(directory, lambda t: {name.removeprefix("transformer."): array for name, array in t.items()})


def with_buffers(directory):
    def add(tensors):
        for i in range(2):
            tensors[f"transformer.h.{i}.attn.bias"] = np.ones((1, 1, 13, 13), np.float32)
            tensors[f"transformer.h.{i}.attn.masked_bias"] = np.array(-1e4, np.float32)

    rewritten(directory, add)


def with_a_copy_of_the_embedding(directory):
    rewritten(directory, lambda t: t | {"lm_head.weight": t["transformer.wte.weight"]})


def with_parts(directory):
    in_parts(directory)


def by_the_index(directory):
    in_parts(directory)
    return directory / "model.safetensors.index.json"


WAYS = [by_the_file, without_prefix, with_buffers, with_a_copy_of_the_embedding, with_parts, by_the_index]


@pytest.mark.parametrize("way", WAYS)
def test_all_ways_to_store_a_model_are_read(exported, way):
    source = way(exported) or exported
    out = exported.parent / "back.safetensors"
    import_model(str(source), out, None)
    assert same(tensors_in(out), tensors_in(exported.parent / "ours.safetensors"))


def test_buffers_of_other_types_are_passed_over(exported):
    """Masks of truth values, which some versions have stored, through the official library."""
    numpy_files = pytest.importorskip("safetensors.numpy")
    tensors = tensors_in(exported / "model.safetensors")
    tensors["transformer.h.0.attn.bias"] = np.tril(np.ones((1, 1, 13, 13), bool))
    numpy_files.save_file(tensors, exported / "model.safetensors")
    assert same(tensors_in(brought_in(exported)), tensors_in(exported.parent / "ours.safetensors"))


def test_newer_and_older_llamas_say_their_angles_differently(tmp_path):
    random_model(tmp_path / "ours.safetensors", SHAPES["llama"])
    export_model(tmp_path / "ours.safetensors", tmp_path / "llama", "float32")
    for number, absent in enumerate(("rope_theta", "rope_parameters", "head_dim", "num_key_value_heads")):
        change_json(tmp_path / "llama" / "config.json", **{absent: None})
        import_model(str(tmp_path / "llama"), tmp_path / f"{number}.safetensors", None)


# Tokenizers


def test_the_tokenizer_of_gpt2_survives(tmp_path):
    if not GPT2_FILES.is_dir():
        pytest.skip("needs GPT-2's vocab.json and merges.txt")
    shape = {**SMALL, "vocab_size": 50257}
    random_model(tmp_path / "ours.safetensors", shape, str(GPT2_FILES))
    export_model(tmp_path / "ours.safetensors", tmp_path / "theirs", "float32")
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert config["eos_token_id"] == config["bos_token_id"] == 50256
    assert fingerprint(read_description(brought_in(tmp_path / "theirs")).tokenizer) == GPT2_FINGERPRINT
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_bytes((tmp_path / "theirs" / name).read_bytes())
    assert fingerprint(load_tokenizer(str(tmp_path / "vocab.json"))) == GPT2_FINGERPRINT


@pytest.mark.parametrize("kind", ["char", "word"])
def test_tokenizers_that_transformers_lacks_come_back_to_us(tmp_path, kind):
    random_model(tmp_path / "ours.safetensors", {**SMALL, "vocab_size": 256}, kind)
    export_model(tmp_path / "ours.safetensors", tmp_path / "theirs", "float32")
    assert not (tmp_path / "theirs" / "tokenizer.json").exists()
    assert read_description(brought_in(tmp_path / "theirs")).tokenizer.kind == kind


def test_a_tokenizer_can_be_named(tmp_path):
    random_model(tmp_path / "ours.safetensors", {**SMALL, "vocab_size": 256}, None)
    export_model(tmp_path / "ours.safetensors", tmp_path / "theirs", "float32")
    assert read_description(brought_in(tmp_path / "theirs", "byte")).tokenizer.kind == "byte"


def test_a_tokenizer_too_large_for_the_model_is_refused(exported):
    with pytest.raises(DataError, match=r"vocabulary of 77, too small for its tokenizer of 256 entries"):
        brought_in(exported, "byte")


def test_a_foreign_tokenizer_is_left_out_with_a_note(exported):
    (exported / "tokenizer.json").write_text('{"model": {"type": "Unigram", "vocab": []}}')
    notes = []
    import_model(str(exported), exported.parent / "back.safetensors", None, notes.append)
    assert "without a tokenizer" in notes[0] and "Unigram" in notes[0]
    assert read_description(exported.parent / "back.safetensors").tokenizer is None


# What transformers has no model for


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"mlp": "swiglu"}, "GPT-2 has no SwiGLU; Llama has no LayerNorm"),
        ({"positions": "none"}, "GPT-2 has no model without positions; Llama has no LayerNorm, no GELU"),
        (
            {**MODERN, "n_embd": 12, "bias": True},
            "GPT-2 has no RMSNorm, no SwiGLU, no RoPE; Llama has no bias",
        ),
        ({**MODERN, "n_embd": 12, "mlp": "relu"}, "Llama has no ReLU"),
        ({"norm_gain": False}, "GPT-2 has no norm without gain"),
        ({"embed_norm": True}, "GPT-2 has no norm after the embedding"),
        ({"final_norm": False}, "GPT-2 has no output layer without a norm in front"),
    ],
)
def test_what_neither_family_has_is_named(tmp_path, shape, words):
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


def test_a_missing_directory_is_one_line(tmp_path):
    with pytest.raises(StorageError, match=r"cannot read .*nowhere: No such file"):
        import_model(str(tmp_path / "nowhere"), tmp_path / "w.safetensors", None)
