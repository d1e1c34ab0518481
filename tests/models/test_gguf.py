"""Models in GGUF: what goes out comes back, and what it cannot hold is named."""

import numpy as np
import pytest
from distgpt.core.base.errors import DataError, UsageError
from distgpt.core.data.tokenizers import load_tokenizer
from distgpt.core.saved.modelfile import read_description
from distgpt.models.formats.gguf.container import read_container
from distgpt.models.formats.gguf.transfer import export_gguf, import_gguf
from foreignmodels import SHAPES, random_model, same, tensors_in
from gguffiles import LLAMA, tokenizer_like, with_tokenizer
from tokenizing import STORY, TEXT, small

from conftest import inside, refused

HELD = [name for name in SHAPES if name != "relu" and "window" not in SHAPES[name]]


def there_and_back(path, dtype="float32"):
    out, back = path.with_suffix(".gguf"), path.with_name("back.safetensors")
    export_gguf(path, out, dtype)
    import_gguf(out, back, None)
    return back


@pytest.mark.parametrize("name", HELD)
def test_a_model_comes_back_as_it_was(tmp_path, name):
    path = tmp_path / "ours.safetensors"
    arrays = random_model(path, SHAPES[name])
    back = there_and_back(path)
    assert same(tensors_in(back), arrays)
    before, after = (read_description(each) for each in (path, back))
    assert after.run.model == before.run.model
    kept = [each.tokenizer and each.tokenizer.to_json() for each in (before, after)]
    assert kept[0] == kept[1]


# Half a step of the largest element of a block, at most; in four bits a whole one where it is cut off.
@pytest.mark.parametrize(
    ("dtype", "error"), [("float16", 2**-11), ("bfloat16", 2**-8), ("q8_0", 0.57 / 127), ("q4_0", 1.01 / 8)]
)
def test_smaller_types_round_by_no_more_than_they_must(tmp_path, dtype, error):
    path = tmp_path / "ours.safetensors"
    arrays = random_model(path, LLAMA)
    found = tensors_in(there_and_back(path, dtype))
    rounded = {name for name in arrays if not np.array_equal(found[name], arrays[name])}
    assert rounded == {name for name in arrays if arrays[name].ndim == 2}
    for name in rounded:
        rows = arrays[name].reshape(-1, 32)
        assert (np.abs(found[name].reshape(-1, 32) - rows) <= error * np.abs(rows).max(1, keepdims=True)).all()
    kinds = {name: entry.kind.name for name, entry in read_container(path.with_suffix(".gguf")).tensors.items()}
    assert kinds["token_embd.weight"] == ("Q8_0" if dtype == "q4_0" else kinds["blk.0.attn_q.weight"])


def test_rows_that_are_no_blocks_stay_in_float32(tmp_path):
    path = tmp_path / "ours.safetensors"
    random_model(path, {**LLAMA, "mlp_width": 90})
    export_gguf(path, tmp_path / "m.gguf", "q4_0")
    kinds = {name: entry.kind.name for name, entry in read_container(tmp_path / "m.gguf").tensors.items()}
    assert kinds["blk.1.ffn_down.weight"] == "F32" and kinds["blk.1.ffn_up.weight"] == "Q4_0"


def test_scales_too_large_for_their_type_are_refused(tmp_path):
    path = tmp_path / "ours.safetensors"
    from distgpt.core.saved.tensors import read_header, write_tensors

    arrays = random_model(path, LLAMA)
    arrays["blocks.0.attn.proj.w"][0, 0] = 1e9
    header = read_header(path)
    write_tensors(path, arrays, {k: v for k, v in header.metadata.items() if not k.endswith("sha256")})
    with pytest.raises(DataError, match="too large for Q8_0"):
        export_gguf(path, tmp_path / "m.gguf", "q8_0")
    assert not [each for each in tmp_path.iterdir() if "m.gguf" in each.name]


# -- tokenizers


@pytest.mark.parametrize("family", ["llama3", "qwen", "smollm2", "tinyllama", "mistral"])
def test_tokenizers_come_back_with_their_chat_templates(tmp_path, family):
    ours = tokenizer_like(family)
    path = with_tokenizer(tmp_path / "ours.safetensors", ours)
    found = read_description(there_and_back(path)).tokenizer
    spelled = "".join(ours.specials) + " <think> Ünïcode 1234567\n\n\t" + TEXT
    for text in (TEXT, STORY, spelled, " a", "a", "", *ours.contents()["document"]["model"]["vocab"]):
        ids = ours.encode(text)
        assert np.array_equal(found.encode(text), ids)
        assert found.decode(ids) == ours.decode(ids)
    assert (found.chat, found.first, found.separator) == (ours.chat, ours.first, ours.separator)
    assert found.specials == ours.specials and found.size == ours.size


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_our_own_tokenizers_come_back(tmp_path, kind):
    ours = small() if kind == "bpe" else load_tokenizer("byte", "")
    path = with_tokenizer(tmp_path / "ours.safetensors", ours)
    assert read_description(there_and_back(path)).tokenizer.to_json() == ours.to_json()


def test_bytes_that_no_text_has_stand_for_ends_that_are_not_there(tmp_path):
    """llama.cpp takes token 11 for the end of a text where a file names none."""
    path = with_tokenizer(tmp_path / "ours.safetensors", load_tokenizer("byte", ""))
    export_gguf(path, tmp_path / "m.gguf", "float32")
    metadata = read_container(tmp_path / "m.gguf").metadata
    assert metadata["tokenizer.ggml.eos_token_id"] == metadata["tokenizer.ggml.bos_token_id"] == 0xFF


# -- what GGUF cannot hold


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"value_embeddings": True}, "value_embeddings"),
        ({"mlp": "relu2"}, "mlp=relu2"),
        ({"positions": "none"}, "positions=none"),
        ({"final_norm": False}, "final_norm=False"),
        ({"window": 3, "full_every": 0}, r"windows of attention out \(window\)"),
        ({**SHAPES["relu"]}, "no ReLU in GGUF"),
        ({**SHAPES["qwen 3"], "rope_scaling": "llama3"}, "Llama 3's rope_scaling"),
    ],
)
def test_what_gguf_cannot_hold_is_named(tmp_path, change, words):
    random_model(tmp_path / "ours.safetensors", {**LLAMA, **change} if "n_embd" not in change else change)
    with pytest.raises(UsageError, match=words):
        export_gguf(tmp_path / "ours.safetensors", tmp_path / "m.gguf", "float32")
    assert not (tmp_path / "m.gguf").exists()


@pytest.mark.parametrize("kind", ["char", "word"])
def test_tokenizers_that_cannot_encode_every_text_are_refused(tmp_path, kind):
    path = with_tokenizer(tmp_path / "ours.safetensors", load_tokenizer(kind, "a b c"))
    with pytest.raises(UsageError, match=f"of kind {kind}"):
        export_gguf(path, tmp_path / "m.gguf", "float32")


def test_merges_that_scores_cannot_say_are_refused(tmp_path):
    from distgpt.corpora.tokenizers.foreign import from_document
    from gguffiles import of_sentencepiece

    learned = of_sentencepiece()
    learned["model"]["merges"].pop(7)
    path = with_tokenizer(tmp_path / "ours.safetensors", from_document(learned, "it"))
    with pytest.raises(UsageError, match="not SentencePiece's"):
        export_gguf(path, tmp_path / "m.gguf", "float32")


# -- as others write it


def test_commands_say_what_to_type(tmp_path):
    ours, path = tmp_path / "ours.safetensors", tmp_path / "m.gguf"
    random_model(ours, LLAMA)
    export = ["weights", "export", ours, "--out"]
    assert inside(*export, path, "--dtype", "q8_0").returncode == 0 and path.is_file()
    for command in (["infer"], ["eval", "--val", "story"], ["serve"], ["chat"]):
        refused(inside(*command, "--weights", path), 2, f"weights import {path}")
    assert "a llama in GGUF" in inside("weights", "info", path).stdout
    refused(inside(*export, tmp_path / "d", "--dtype", "q4_0"), 2, "--format gguf")
    refused(inside(*export, path), 2, "exists already")
