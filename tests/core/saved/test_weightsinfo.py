"""`distgpt weights info`: what is in a file or directory, and that damage is never called anything else."""

import shutil
from pathlib import Path

import pytest
from distgpt.core.base.errors import DataError, command_line
from distgpt.core.saved.tensors import read_header, write_tensors
from distgpt.models.formats.huggingface import import_model
from distgpt.show.weightspage import inspect, page
from foreignmodels import SHAPES, change_json, exported, in_parts, random_model, tensors_in  # noqa: F401

from conftest import inside, refused


def test_a_trained_model_is_described(trained, tmp_path):
    path = tmp_path / "without a suffix"
    shutil.copy(trained / "weights.safetensors", path)
    found = inspect(path)
    assert found["kind"] == "weights" and found["checksum"] == "verified"
    assert found["config"]["n_layer"] == 2 and found["types"] == ["F32"]
    assert found["trained"].startswith("on story, 30 steps of 128 tokens, seed")
    assert found["bytes"] == path.stat().st_size
    assert "word, " in found["tokenizer"] and "2 layers, 2 heads, width 16" in page(found)


def test_windows_of_attention_are_named(tmp_path):
    for name, said in (("mistral", "windows of 4 tokens in 2 layers"), ("llama", "no biases, tied")):
        random_model(tmp_path / "w.safetensors", SHAPES[name])
        found = page(inspect(tmp_path / "w.safetensors"))
        assert said in found and ("windows" in said) == ("windows" in found)


def test_an_imported_model_says_where_it_is_from_and_is_counted_without_padding(exported):
    path = exported.parent / "w.safetensors"
    import_model(str(exported), path, None)
    found, arrays = inspect(path), tensors_in(path)
    assert found["origin"] == "GPT-2 model imported from gpt2" and "trained" not in found
    padding = (len(arrays["wte"]) - 77) * 15
    assert found["parameters"] == sum(array.size for array in arrays.values()) - padding


def test_a_model_of_transformers_is_described(exported):
    for divided in (False, True):
        if divided:
            in_parts(exported)
        found = inspect(exported)
        assert found["what"] == "a GPT2LMHeadModel of transformers" + " in 3 files" * divided
        assert found["imports"] == f"yes: {command_line('weights', 'import', exported, '--out', 'FILE')}"
        assert found["config"]["seq_len"] == 13
        alone = inspect(exported / ("model.safetensors.index.json" if divided else "model.safetensors"))
        assert alone["config"] == found["config"]


def test_what_cannot_be_imported_says_why(exported):
    change_json(exported / "config.json", activation_function="gelu")
    found = inspect(exported)
    assert found["imports"].startswith("no: ") and "gelu_new" in found["imports"] and "config" not in found
    change_json(exported / "config.json", model_type="bert", architectures=["BertModel"])
    assert "a BertModel of transformers" in page(inspect(exported))
    change_json(exported / "config.json", architectures=["\x1b[2J\nGPT2"])  # no command to the terminal
    assert page(inspect(exported)).startswith(r"what         a \x1b[2J\nGPT2 of transformers" + "\n")
    (exported / "config.json").unlink()
    found = inspect(exported / "model.safetensors")
    assert found["kind"] == "tensors" and "config.json" in found["imports"]


def test_a_checkpoint_is_described_and_a_damaged_one_refused(trained, tmp_path):
    whole = trained / "checkpoints" / "step-00000030"
    found = inspect(whole)
    assert found["kind"] == "checkpoint" and found["step"] == 30 and found["world_size"] == 1
    assert "verified" in found["checksum"] and "after step 30" in page(found)
    for name in ("weights.safetensors", "optimizer.safetensors", "state.json"):
        path = tmp_path / name / whole.name
        shutil.copytree(whole, path)
        content = bytearray((path / name).read_bytes())
        content[-3] ^= 1
        (path / name).write_bytes(content)
        with pytest.raises(DataError, match=f"{name} is damaged"):
            inspect(path)


def test_a_damaged_file_or_one_that_claims_another_model_is_refused(tmp_path):
    path = tmp_path / "w.safetensors"
    arrays = random_model(path, SHAPES["odd"])
    intact, metadata = path.read_bytes(), read_header(path).metadata
    path.write_bytes(intact[:-1])
    refused(inside("weights", "info", path), 65, path)
    config = metadata["config"].replace("n_layer = 2", "n_layer = 3")
    write_tensors(path, arrays, metadata | {"config": config})
    with pytest.raises(DataError, match="missing: blocks"):
        inspect(path)


def test_a_run_is_described_by_its_weights_and_an_empty_directory_refused(trained, tmp_path):
    weights = trained / "weights.safetensors"
    assert inspect(trained) == {"file": str(weights), **inspect(weights)}
    assert str(weights) in page(inspect(trained))
    (pickled := tmp_path / "model.bin").write_bytes(b"PK")
    for path, error, words in (
        (tmp_path, DataError, r"has no config\.json"),
        (Path("/dev/null"), DataError, "neither a file nor a directory"),
        (pickled, DataError, "save_pretrained"),
    ):
        with pytest.raises(error, match=words):
            inspect(path)
