import json
import os
import signal
import time
import warnings
from dataclasses import replace
from pathlib import Path

import distgpt
import foreignmodels
import numpy as np
import pytest
from chattemplates import ENDS
from complaints import complains, done
from distgpt.core.base.caches import CACHE
from distgpt.core.base.errors import StorageError, UsageError
from distgpt.core.config import ModelConfig
from distgpt.core.config.presets import preset
from distgpt.core.data.tokenizers import fingerprint, load_tokenizer
from distgpt.core.saved.modelfile import read_description
from distgpt.core.saved.tensors import read_header, write_tensors
from distgpt.core.saved.weights import weights_of
from distgpt.corpora.tokenizers.bpe import GPT2_FINGERPRINT
from distgpt.corpora.tokenizers.third_party import from_document
from distgpt.models.formats.families import Settings, family_for, recognised
from distgpt.models.formats.gguf.container import read_container
from distgpt.models.formats.gguf.transfer import export_gguf, family_in_gguf, import_gguf
from distgpt.models.formats.huggingface import export_model, import_model
from distgpt.models.quantized.rounded import quantize
from families import FAMILIES as TOKENIZERS
from families import write_family
from foreignmodels import (
    MODERN,
    OF_RECIPES,
    SHAPES,
    SMALL,
    change_json,
    exported_model,
    random_model,
    rewritten,
    shape,
    tensors_in,
)
from gguffiles import LLAMA, of_sentencepiece, tokenizer_like, with_tokenizer
from tokenizing import GPT2, STORY, TEXT, needs_gpt2, small

from conftest import inside, popen, refused
from models import plain_logits

exported, llama = foreignmodels.exported, foreignmodels.llama  # fixtures

EXPORT = {"transformers": export_model, "gguf": export_gguf}
HELD = [("transformers", name) for name in SHAPES]
HELD += [("gguf", name) for name in SHAPES if name != "relu" and "window" not in SHAPES[name]]
CHATTY = shape(1000, 64, 1, 2, 16, **MODERN)
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"


def brought_in(source, *more):
    out = Path(source).parent / "back.safetensors"
    bring = import_gguf if Path(source).is_file() and Path(source).read_bytes()[:4] == b"GGUF" else import_model
    bring(Path(source) if bring is import_gguf else str(source), out, *(more or [None]))
    return out


def there_and_back(ours, dtype="float32"):
    export_gguf(ours, ours.with_suffix(".gguf"), dtype)
    return brought_in(ours.with_suffix(".gguf"))


def kinds_in(path):
    return {name: entry.kind.name for name, entry in read_container(path).tensors.items()}


@pytest.mark.parametrize(("form", "name"), HELD)
def test_round_trip(form, name, tmp_path):
    ours, theirs, again = (tmp_path / name for name in ("ours.safetensors", "theirs", "again"))
    arrays = random_model(ours, SHAPES[name])
    EXPORT[form](ours, theirs, "float32")
    back = brought_in(theirs)
    assert foreignmodels.same(tensors_in(back), arrays)
    before, after = map(read_description, (ours, back))
    assert after.run.model == before.run.model
    first, second = (each.tokenizer and each.tokenizer.to_json() for each in (before, after))
    assert first == second
    EXPORT[form](back, again, "float32")
    for file in theirs.iterdir() if theirs.is_dir() else ():
        assert (again / file.name).read_bytes() == file.read_bytes(), file.name


def test_half_precision_survives_round_trip(tmp_path):
    random_model(tmp_path / "ours.safetensors", SMALL)
    for dtype, stored in (("float16", "F16"), ("bfloat16", "BF16")):
        first, again = (tmp_path / dtype / name for name in ("theirs", "again"))
        export_model(tmp_path / "ours.safetensors", first, dtype)
        export_model(brought_in(first), again, dtype)
        file = first / "model.safetensors"
        assert file.read_bytes() == (again / "model.safetensors").read_bytes()
        assert {entry.dtype for entry in read_header(file).tensors.values()} == {stored}
        assert json.loads((first / "config.json").read_text())["torch_dtype"] == dtype


# Half a step of a block's largest element; a whole step if q4_0 clips it.
@pytest.mark.parametrize(
    ("dtype", "error"), [("float16", 2**-11), ("bfloat16", 2**-8), ("q8_0", 0.57 / 127), ("q4_0", 1.01 / 8)]
)
def test_gguf_types_round_within_bound(tmp_path, dtype, error):
    """Rows that are not a multiple of 32 stay in float32."""
    path = tmp_path / "ours.safetensors"
    arrays = random_model(path, LLAMA)
    found = tensors_in(there_and_back(path, dtype))
    rounded = {name for name in arrays if not np.array_equal(found[name], arrays[name])}
    assert rounded == {name for name in arrays if arrays[name].ndim == 2}
    for name in rounded:
        rows = arrays[name].reshape(-1, 32)
        assert (np.abs(found[name].reshape(-1, 32) - rows) <= error * np.abs(rows).max(1, keepdims=True)).all()
    kinds = kinds_in(path.with_suffix(".gguf"))
    assert kinds["token_embd.weight"] == ("Q8_0" if dtype == "q4_0" else kinds["blk.0.attn_q.weight"])
    if dtype == "q4_0":
        random_model(path, {**LLAMA, "mlp_width": 90})
        export_gguf(path, tmp_path / "m.gguf", dtype)
        kinds = kinds_in(tmp_path / "m.gguf")
        assert kinds["blk.1.ffn_down.weight"] == "F32" and kinds["blk.1.ffn_up.weight"] == "Q4_0"


def test_rounding_is_to_even_and_overflow_rejected(tmp_path):
    path = tmp_path / "ours.safetensors"
    ours = random_model(path, SMALL)
    metadata = {k: v for k, v in read_header(path).metadata.items() if not k.endswith("sha256")}
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
        with warnings.catch_warnings(action="error"), complains("wpe has values too large"):
            export_model(path, tmp_path / "theirs", dtype)
    ours = random_model(path, LLAMA)
    ours["blocks.0.attn.proj.w"][0, 0] = 1e9
    write_tensors(path, ours, {**metadata, "config": read_header(path).metadata["config"]})
    with complains("too large for Q8_0"):
        export_gguf(path, tmp_path / "theirs.gguf", "q8_0")
    assert not list(tmp_path.glob("*theirs*"))


def in_float64(tensors):
    return {name: array.astype(np.float64) for name, array in tensors.items()}


def test_float64_is_kept_by_import(exported):
    rewritten(exported, in_float64)
    assert {entry.dtype for entry in read_header(brought_in(exported)).tensors.values()} == {"F64"}


def test_missing_settings_use_transformers_defaults(llama):
    for kind, *expected in (
        ("gpt2", 50257, 1024, 768, 12, 12, 3072, 1e-5),
        ("llama", 32000, 2048, 4096, 32, 32, 11008, 1e-6),
        ("mistral", 32000, 131072, 4096, 32, 32, 14336, 1e-6),
        ("qwen2", 151936, 32768, 4096, 32, 32, 22016, 1e-6),
        ("qwen3", 151936, 32768, 4096, 32, 32, 22016, 1e-6),
    ):
        found = recognised(Settings({"model_type": kind}, "there"))[1]
        sizes = (found.vocab_size, found.seq_len, found.n_embd, found.n_layer, found.n_head, found.hidden)
        assert [*sizes, found.norm_eps] == expected, kind
    for absent in ("rope_theta", "rope_parameters", "head_dim", "num_key_value_heads"):
        change_json(llama / "config.json", **{absent: None})
        import_model(str(llama), llama.with_name(f"{absent}.safetensors"), None)


def test_rope_scaling_is_read_in_all_layouts(tmp_path):
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
        ({"rope_parameters": None, "rope_scaling": without}, 13),  # max_position_embeddings by default
    ):
        change_json(path, **changes)
        (tmp_path / "back.safetensors").unlink()
        found = read_description(brought_in(tmp_path / "theirs")).run.model
        assert found == replace(expected, rope_context=context)


def with_buffers(tensors):
    masks = {f"transformer.h.{i}.attn.bias": np.ones((1, 1, 13, 13), np.float32) for i in range(2)}
    return tensors | masks | {"transformer.h.0.attn.masked_bias": np.array(-1e4, np.float32)}


WAYS = {
    "by the file": lambda directory: directory / "model.safetensors",
    "without the prefix": lambda directory: rewritten(
        directory, lambda t: {name.removeprefix("transformer."): array for name, array in t.items()}
    ),
    "with buffers": lambda directory: rewritten(directory, with_buffers),
    "with a copy of the embedding": lambda directory: rewritten(
        directory, lambda t: t | {"lm_head.weight": t["transformer.wte.weight"]}
    ),
    "in parts": lambda directory: foreignmodels.in_parts(directory) and directory,
    "by the index": lambda directory: foreignmodels.in_parts(directory) and directory / "model.safetensors.index.json",
}


@pytest.mark.parametrize("way", WAYS)
def test_every_storage_layout_is_read(exported, way):
    ours = tensors_in(exported.parent / "ours.safetensors")
    assert foreignmodels.same(tensors_in(brought_in(WAYS[way](exported) or exported)), ours)


@pytest.mark.ci
@needs_gpt2
def test_gpt2_tokenizer_survives_round_trip(tmp_path):
    theirs = tmp_path / "theirs"
    exported_model(theirs, {**SMALL, "vocab_size": 50257}, str(GPT2))
    config = json.loads((theirs / "config.json").read_text())
    assert config["eos_token_id"] == config["bos_token_id"] == 50256
    assert fingerprint(read_description(brought_in(theirs)).tokenizer) == GPT2_FINGERPRINT
    assert fingerprint(load_tokenizer(str(theirs / "vocab.json"))) == GPT2_FINGERPRINT


def test_own_tokenizers_survive_round_trip(tmp_path):
    for kind, *named in (("char",), ("word",), (None, "byte")):
        (theirs := tmp_path / str(kind) / "theirs").parent.mkdir()
        exported_model(theirs, {**SMALL, "vocab_size": 256}, kind)
        assert not (theirs / "tokenizer.json").exists()
        assert read_description(brought_in(theirs, *named)).tokenizer.kind == (kind or "byte")


def test_unusable_tokenizers_are_reported(exported):
    with complains("vocabulary of 77, too small for its tokenizer of 256 entries"):
        brought_in(exported, "byte")
    (exported / "tokenizer.json").write_text('{"model": {"type": "Unigram", "vocab": []}}')
    notes = []
    assert read_description(brought_in(exported, None, notes.append)).tokenizer is None
    assert "without a tokenizer" in notes[0] and "Unigram" in notes[0]


@pytest.mark.parametrize("family", TOKENIZERS)
def test_tokenizer_and_template_survive_exports(family, tmp_path):
    folder, ours, again = tmp_path / "theirs", tmp_path / "imported.safetensors", tmp_path / "exported"
    exported_model(folder, CHATTY, tokenizer=None)
    known = write_family(folder, family, chat_template=TEMPLATE, eos_token=(end := ENDS[family]))
    change_json(folder / "generation_config.json", eos_token_id=[known.specials[end]])
    done("weights", "import", folder, "--out", ours)
    kept = read_description(ours).tokenizer
    assert kept.chat.source == TEMPLATE and kept.chat.tokens == {"eos_token": end}
    assert kept.chat.ends == (known.specials[end],)
    done("weights", "export", ours, "--out", again)
    generation = json.loads((again / "generation_config.json").read_text())
    assert generation["bos_token_id"] == (known.first[0] if known.first else known.separator)
    quantize(ours, tmp_path / "int8.safetensors")
    for path in (brought_in(again), tmp_path / "int8.safetensors"):
        assert read_description(path).tokenizer.to_json() == kept.to_json()
    if family == "tinyllama":  # its tokenizer adds a start token
        how = ("infer", "--weights", ours, "--max-new-tokens", "4", "--json", "--prompt", "The lamp")
        found = json.loads(done(*how, "--logprobs", "0", "--prompt-logprobs"))
        assert found["prompt"] == "The lamp" and kept.first == (1,)
        assert len(found["prompt_logprobs"]) == 1 + len(kept.encode("The lamp"))


@pytest.mark.parametrize("family", TOKENIZERS)
def test_gguf_keeps_tokenizers_and_templates(tmp_path, family):
    ours = tokenizer_like(family)
    found = read_description(there_and_back(with_tokenizer(tmp_path / "ours.safetensors", ours))).tokenizer
    spelled = "".join(ours.specials) + " <think> Ünïcode 1234567\n\n\t" + TEXT
    for text in (TEXT, STORY, spelled, " a", "a", "", *ours.contents()["document"]["model"]["vocab"]):
        ids = ours.encode(text)
        assert np.array_equal(found.encode(text), ids) and found.decode(ids) == ours.decode(ids)
    assert (found.chat, found.first, found.separator) == (ours.chat, ours.first, ours.separator)
    assert found.specials == ours.specials and found.size == ours.size


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_gguf_keeps_own_tokenizers(tmp_path, kind):
    """A byte that no text has ends text, because llama.cpp defaults to token 11."""
    ours = small() if kind == "bpe" else load_tokenizer("byte", "")
    path = with_tokenizer(tmp_path / "ours.safetensors", ours)
    assert read_description(there_and_back(path)).tokenizer.to_json() == ours.to_json()
    metadata = read_container(path.with_suffix(".gguf")).metadata
    ends = {metadata[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "bos")}
    assert ends == {0xFF if kind == "byte" else ours.separator}


_MODERN = {**MODERN, "n_embd": 12}
UNHELD = [
    *(("transformers", SMALL | change, words) for change, *words in (
        ({"mlp": "swiglu"}, "GPT-2", "mlp=swiglu"),
        ({"positions": "none"}, "GPT-2", "positions=none"),
        (_MODERN | {"bias": True}, "Llama", "bias=True"),
        (_MODERN | {"mlp": "relu"}, "Llama", "mlp=relu"),
        ({"embed_norm": True}, "GPT-2", "embed_norm"),
        ({"n_kv_head": 1}, "GPT-2", "n_kv_head"),
        (foreignmodels.QWEN3 | {"n_embd": 12, "qkv_bias": True}, "Qwen 3", "qkv_bias=True"),
        ({"head_dim": 4}, "GPT-2", "head_dim"),
        ({"bias": False, "qkv_bias": True}, "GPT-2", "qkv_bias=True"),
        (_MODERN | {"value_embeddings": True}, "Llama", "value_embeddings"),
        ({"window": 5}, "GPT-2", "window"),
        (_MODERN | {"window": 5}, "Llama", "has no window"),
        ({"final_norm": False}, "GPT-2", "final_norm=False"),
    )),
    *(("gguf", change if "n_embd" in change else LLAMA | change, words) for change, *words in (
        ({"value_embeddings": True}, "value_embeddings"),
        ({"mlp": "relu2"}, "mlp=relu2"),
        ({"positions": "none"}, "positions=none"),
        ({"final_norm": False}, "final_norm=False"),
        ({"window": 3, "full_every": 0}, "(window)"),
        (SHAPES["relu"], "no ReLU in GGUF"),
        ({**SHAPES["qwen 3"], "rope_scaling": "llama3"}, "rope_scaling"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("form", "of", "words"), UNHELD)
def test_unsupported_settings_are_named(form, of, words, tmp_path):
    random_model(tmp_path / "ours.safetensors", of)
    with complains(*words, kind=UsageError):
        EXPORT[form](tmp_path / "ours.safetensors", tmp_path / "theirs", "float32")
    assert not (tmp_path / "theirs").exists()


def test_tokenizers_unsupported_by_gguf_are_named(tmp_path):
    learned = of_sentencepiece()
    learned["model"]["merges"].pop(7)
    for tokenizer, words in (
        *((load_tokenizer(kind, "a b c"), f"kind {kind}") for kind in ("char", "word")),
        (from_document(learned, "it"), "differ from SentencePiece's"),
    ):
        path = with_tokenizer(tmp_path / "ours.safetensors", tokenizer)
        with complains(words, kind=UsageError):
            export_gguf(path, tmp_path / "m.gguf", "float32")


def test_weights_commands_check_their_files(tmp_path):
    ours, path = tmp_path / "ours.safetensors", tmp_path / "m.gguf"
    random_model(ours, LLAMA)
    export = ["weights", "export", ours, "--out"]
    assert inside(*export, path, "--dtype", "q8_0").returncode == 0 and path.is_file()
    assert "a llama in GGUF" in inside("weights", "info", path).stdout
    refused(inside(*export, tmp_path / "d", "--dtype", "q4_0"), 2, "--format gguf")
    refused(inside(*export, path), 2, "already exists")


def test_export_needs_empty_directory_and_valid_model(exported):
    ours, empty, new = (exported.parent / name for name in ("ours.safetensors", "empty", "new"))
    before = {path: path.read_bytes() for path in exported.iterdir()}
    with complains(exported, "not an empty directory", kind=UsageError):
        export_model(ours, exported, "float32")
    assert {path: path.read_bytes() for path in exported.iterdir()} == before
    empty.mkdir()
    export_model(ours, empty, "float32")
    assert (empty / "config.json").exists()
    with complains("not a name for a new directory", kind=UsageError):
        export_model(ours, Path(), "float32")
    content = ours.read_bytes()
    ours.write_bytes(content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])
    with complains(f"{ours} is corrupt"):
        export_model(ours, new, "float32")
    assert not new.exists()


def test_import_checks_its_output_first(tmp_path):
    (file := tmp_path / "file").touch()
    for out, kind, words in (
        (tmp_path / "w.safetensors", StorageError, "no model: No such file"),
        (file, UsageError, "already exists"),
        (tmp_path, UsageError, "already exists"),
        (tmp_path / "no" / "w", StorageError, "not writable"),
        (file / "w", StorageError, "file/w"),
    ):
        with complains(words, kind=kind):
            import_model(str(tmp_path / "no model"), out, None)


@pytest.mark.ci
def test_killed_export_leaves_no_directory(tmp_path):
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


def test_export_error_names_families():
    for family in (family_for, family_in_gguf):
        with complains("--family qwen3 or llama or gpt2. The closest one, Qwen 3, has no", kind=UsageError):
            family(preset("fast").model, "fast")
    for other in ({"tied": True}, {"norm_gain": True}, {"norm": "layernorm"}):
        with complains("embed_norm", kind=UsageError):
            family_for(ModelConfig(**{**OF_RECIPES["llama"], **other}), "mine")


@pytest.mark.parametrize("form", EXPORT)
@pytest.mark.parametrize("name", OF_RECIPES)
def test_architectures_of_recipes_are_exported(form, name, tmp_path):
    ours = tmp_path / "ours.safetensors"
    random_model(ours, OF_RECIPES[name])
    EXPORT[form](ours, tmp_path / "theirs", "float32")
    back = brought_in(tmp_path / "theirs")
    tokens = np.random.default_rng(3).integers(0, 77, (2, 13))
    expected = distgpt.load(ours).logits(tokens)
    assert expected.std() > 0.2
    np.testing.assert_allclose(distgpt.load(back).logits(tokens), expected, atol=2e-5)
    assert family_for(read_description(back).run.model, back).model_type == name


def test_models_in_other_formats_are_imported_once(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    exported_model(tmp_path / "theirs", CHATTY)
    export_gguf(tmp_path / "ours.safetensors", tmp_path / "theirs.gguf", "float32")
    tokens = np.random.default_rng(3).integers(0, 1000, (1, 9))
    expected = distgpt.load(tmp_path / "ours.safetensors").logits(tokens)
    for path in (tmp_path / "theirs", tmp_path / "theirs.gguf"):
        found = weights_of(path)
        written = found.stat().st_mtime_ns
        assert np.array_equal(distgpt.load(path).logits(tokens), expected)
        assert (weights_of(path), found.stat().st_mtime_ns) == (found, written)
        with complains("import it first", kind=UsageError):
            weights_of(path, fetches=False)
        os.utime(path if path.is_file() else path / "config.json", (1, 1))
        assert weights_of(path) != found
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    with complains("not a valid GGUF file"):
        weights_of(tmp_path / "bad.gguf")
    assert len(list((tmp_path / "cache" / "models").iterdir())) == 4


V, T, L, H, C, F = 37, 9, 2, 3, 12, 20  # F is not a multiple of C
GPT2_JSON = {"model_type": "gpt2", "n_layer": L, "n_head": H, "n_embd": C, "vocab_size": V, "n_positions": T}
GPT2_JSON |= {"n_inner": F, "layer_norm_epsilon": 1e-3, "activation_function": "gelu_new"}
LLAMA_JSON = {"model_type": "llama", "num_hidden_layers": L, "num_attention_heads": H, "hidden_size": C}
LLAMA_JSON |= {"intermediate_size": F, "vocab_size": V, "max_position_embeddings": T, "rms_norm_eps": 1e-3}
LLAMA_JSON |= {"tie_word_embeddings": False, "hidden_act": "silu"}
OURS = ModelConfig(vocab_size=V, seq_len=T, n_layer=L, n_head=H, n_embd=C, mlp_width=F, norm_eps=1e-3)
MODERN_CHANGES = {"norm": "rmsnorm", "mlp": "swiglu", "positions": "rope", "bias": False, "tied": False}

LAYER = {  # our tensors, stored shapes, published names
    "gpt2": (
        *((f"norm{i}", (C,), f"ln_{i}") for i in (1, 2)),
        *(("attn.qkv", (C, 3 * C), "attn.c_attn"), ("attn.proj", (C, C), "attn.c_proj")),
        *(("mlp.fc", (C, F), "mlp.c_fc"), ("mlp.proj", (F, C), "mlp.c_proj")),
    ),
    "llama": (
        *(("norm1", (C,), "input_layernorm"), ("norm2", (C,), "post_attention_layernorm")),
        ("attn.qkv", (C, C), *(f"self_attn.{which}_proj" for which in "qkv")),
        *(("attn.proj", (C, C), "self_attn.o_proj"), ("mlp.fc", (F, C), "mlp.gate_proj", "mlp.up_proj")),
        ("mlp.proj", (C, F), "mlp.down_proj"),
    ),
}
AROUND = {
    "gpt2": (("wte", (V, C), "wte"), ("wpe", (T, C), "wpe"), ("final_norm.", (C,), "ln_f")),
    "llama": (("wte", (V, C), "embed_tokens"), ("final_norm.", (C,), "norm"), ("head.", (V, C), "lm_head")),
}


def tensors(kind, random):
    """Return theirs and ours. GPT-2 stores linear layers as (inputs, outputs); Llama splits some of ours."""
    prefix, blocks = {"gpt2": ("transformer.", "h"), "llama": ("model.", "layers")}[kind]
    layers = [*AROUND[kind]]
    for i in range(L):
        layers += [(f"blocks.{i}.{own}.", dims, *(f"{blocks}.{i}.{name}" for name in names))
                   for own, dims, *names in LAYER[kind]]  # fmt: skip
    theirs, ours = {}, {}
    for own, dims, *names in layers:
        parts = [random.normal(len(dims) == 1, 0.4, dims).astype(np.float32) for _ in names]
        theirs |= {prefix * (name != "lm_head") + f"{name}.weight": x for name, x in zip(names, parts, strict=True)}
        is_layer = own.endswith(".")
        ours[own + "w" * is_layer] = np.concatenate(parts).T if kind == "gpt2" and is_layer else np.concatenate(parts)
        if kind == "gpt2" and is_layer:
            ours[f"{own}b"] = theirs[f"{prefix}{names[0]}.bias"] = random.normal(1, 0.4, dims[-1]).astype(np.float32)
    return theirs, ours


@pytest.mark.parametrize("settings, different", [(GPT2_JSON, {}), (LLAMA_JSON, MODERN_CHANGES)], ids=["gpt2", "llama"])
def test_published_weights_match_formulas(settings, different, tmp_path):
    random = np.random.default_rng(3)
    theirs, ours = tensors(settings["model_type"], random)
    write_tensors(tmp_path / "model.safetensors", theirs, {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(settings))
    import_model(str(tmp_path), tmp_path / "ours.safetensors", None)
    model, ids = distgpt.load(tmp_path / "ours.safetensors", dtype="float64"), random.integers(0, V, T)
    config = replace(OURS, **different)
    assert model.config == config
    expected = plain_logits(config, ours, ids)
    np.testing.assert_allclose(model.logits(ids[None])[0], expected, rtol=0, atol=1e-9)
    assert expected.std() > 0.2
