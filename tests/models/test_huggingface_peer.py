import atexit
import functools
import json
import os
import subprocess
import tempfile
from select import select

import distgpt
import numpy as np
import pytest
from distgpt.core.base.files import bundled
from distgpt.core.comm.api import SerialComm
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.model.passes import Pass
from distgpt.core.saved.modelfile import load_model
from distgpt.models.formats.huggingface import Foreign, export_model, import_model
from foreignmodels import OF_RECIPES, SHAPES, exported_model, random_model
from peers import peer_with
from tokenizing import GPT2, gpt2, needs_gpt2

from conftest import TESTS

ORACLE = TESTS / "oracles" / "transformers_models.py"
PEER, pytestmark = peer_with("DISTGPT_PEER_PYTHON", "torch", "transformers")

ANSWERS_WITHIN = 250  # seconds; less than pytest-timeout
V, T = 99, 20
OLD = {"model_type": "gpt2", "n_layer": 2, "n_head": 3, "n_embd": 24, "vocab_size": V, "n_positions": T}
NEW = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 3, "hidden_size": 24}
NEW |= {"intermediate_size": 50, "vocab_size": V, "max_position_embeddings": T}
UNTIED = {**OLD, "activation_function": "relu", "tie_word_embeddings": False}
IN_GROUPS = {**NEW, "num_attention_heads": 6, "num_key_value_heads": 2, "rope_parameters": {"rope_theta": 5e5}}
LONG = 220  # tokens, more than Llama 3's original context
WRITTEN = 80  # tokens, more than that context and every window
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 40}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}
GROUPED = {**NEW, "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": LONG}
WINDOWS = {"use_sliding_window": True, "sliding_window": 7}
WINDOWS |= {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
FAMILIES = {
    "gpt2": ({**OLD, "n_positions": LONG}, "1GB"),
    "llama 2": ({**NEW, "max_position_embeddings": LONG}, "1GB"),
    "llama 3": ({**GROUPED, "rope_parameters": LLAMA3, "tie_word_embeddings": True}, "8KB"),
    "smollm": ({**GROUPED, "head_dim": 10, "rms_norm_eps": 1e-3, "dtype": "bfloat16"}, "8KB"),
    "linear": ({**NEW, "max_position_embeddings": LONG, "rope_parameters": LINEAR}, "1GB"),
    "mistral": ({**GROUPED, "model_type": "mistral", "sliding_window": None, "head_dim": 6}, "1GB"),
    "mistral of windows": ({**GROUPED, "model_type": "mistral", "sliding_window": 50}, "1GB"),
    "qwen2": ({**GROUPED, "model_type": "qwen2", "intermediate_size": 37}, "8KB"),
    "qwen2 tied": ({**GROUPED, "model_type": "qwen2", "tie_word_embeddings": True}, "1GB"),
    "qwen3": ({**GROUPED, "model_type": "qwen3", "head_dim": 16, "intermediate_size": 37}, "8KB"),
    "qwen3 of windows": ({**GROUPED, "model_type": "qwen3", "num_hidden_layers": 3, **WINDOWS}, "1GB"),
}


@functools.cache
def oracle():
    """Start this worker's process, which takes five seconds; return it and its messages."""
    messages = tempfile.TemporaryFile("w+")  # noqa: SIM115
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}  # the models are small
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": messages}
    process = subprocess.Popen([PEER, str(ORACLE)], env=env, text=True, **pipes)
    atexit.register(process.kill)
    return process, messages


def transformers(*jobs):
    process, messages = oracle()
    try:
        print(json.dumps(jobs), file=process.stdin, flush=True)
        is_ready, _, _ = select([process.stdout], [], [], ANSWERS_WITHIN)
        if not is_ready or not (answer := process.stdout.readline()):
            messages.seek(0)
            pytest.fail(messages.read() or f"no answer within {ANSWERS_WITHIN} s")
        return json.loads(answer)
    except BaseException:  # also pytest-timeout's, so that no other test reads this answer
        process.kill()
        oracle.cache_clear()
        raise


def check_scores(ours, theirs, tokens):
    found, expected = distgpt.load(ours).logits(np.load(tokens)), np.load(theirs)
    assert found.shape == expected.shape
    spread, worst = expected.std(), np.abs(found - expected).max() / max(1, np.abs(expected).max())
    assert spread > 0.2 and worst < 1e-5


def some_tokens(path, vocab_size, length):
    np.save(path, np.random.default_rng(3).integers(0, vocab_size, (2, length)))
    return str(path)


def test_exports_match_in_transformers(tmp_path):
    jobs = []
    for name, shape in {**SHAPES, **OF_RECIPES}.items():
        random_model(tmp_path / f"{name}.safetensors", shape)
        export_model(tmp_path / f"{name}.safetensors", tmp_path / name, "float32")
        tokens = some_tokens(tmp_path / f"{name}.npy", shape["vocab_size"], shape["seq_len"])
        jobs.append(["logits", str(tmp_path / name), tokens, str(tmp_path / f"{name}.theirs.npy")])
    transformers(*jobs)
    for _, directory, tokens, theirs in jobs:
        check_scores(f"{directory}.safetensors", theirs, tokens)


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """Import a model of each family; return its directory and transformers' text."""
    folder, jobs = tmp_path_factory.mktemp("families"), []
    tokens = some_tokens(folder / "tokens.npy", V, LONG)
    for name, (config, shard) in FAMILIES.items():
        directory = str(folder / name)
        jobs += [["make", directory, shard, config], ["logits", directory, tokens, f"{directory}.npy"]]
        jobs += [["gradients", directory, tokens, f"{directory}.npz"]]
        jobs += [["tokens_after", directory, [[1, 2, 3], [5]], WRITTEN]]
    texts = dict(zip(FAMILIES, transformers(*jobs)[3::4], strict=True))
    for name in FAMILIES:
        import_model(str(folder / name), folder / f"{name}.safetensors", None)
    return folder, texts


@pytest.mark.parametrize("name", FAMILIES)
def test_families_match_in_transformers(name, families):
    folder, texts = families
    ours = folder / f"{name}.safetensors"
    check_scores(ours, folder / f"{name}.npy", folder / "tokens.npy")
    expected, tokens = np.load(folder / f"{name}.npz"), np.load(folder / "tokens.npy").astype(np.int32)
    model, _ = load_model(ours, CpuKernels("float32", 2), SerialComm())
    work = Pass(model, len(tokens), LONG - 1, training=True)
    work.loss_and_gradients(*(side.flatten() for side in (tokens[:, :-1], tokens[:, 1:])), 1.0, False)
    family = Foreign(folder / name).family
    for mapping in family.all_mappings(model.config):
        theirs = expected[family.full_name(mapping.theirs)]
        found = model.grads[mapping.ours][mapping.first : mapping.first + mapping.rows]
        worst = np.abs((found.T if mapping.transposed else found) - theirs).max() / np.abs(theirs).max()
        assert worst < 1e-4, mapping.theirs
    assert distgpt.load(ours).generate([[1, 2, 3], [5]], WRITTEN, temperature=0) == texts[name]


@pytest.mark.xdist_group("greedy")  # the other worker takes it, since this file takes longest
def test_greedy_tokens_match_transformers(tmp_path):
    random, jobs, found = np.random.default_rng(0), [], []
    prompts = [random.integers(0, V, size).tolist() for size in (1, 2, 5, 7, 11)]
    models = {"gpt2 untied": UNTIED, "llama in groups": IN_GROUPS}
    for name, config in models.items():
        directory = str(tmp_path / name)
        jobs += [["make", directory, "1GB", config], ["tokens_after", directory, prompts, 9]]
    sample = distgpt.load(bundled("weights", "sample.safetensors"))
    export_model(bundled("weights", "sample.safetensors"), tmp_path / "sample", "float32")
    texts = ["The harbour ", "A", "In the morning the keeper of the lamp ", "boats, boats, boats, boats, "]
    ids = [sample.tokenizer.encode(text).tolist() for text in texts]
    _, first, _, second, third = transformers(*jobs, ["tokens_after", str(tmp_path / "sample"), ids, 90])
    for name in models:
        import_model(str(tmp_path / name), tmp_path / f"{name}.safetensors", None)
        found.append((distgpt.load(tmp_path / f"{name}.safetensors"), prompts, 9))
    found.append((sample, ids, 90))
    for theirs, (model, asked, count) in zip((first, second, third), found, strict=True):
        assert [model.generate(each, count, temperature=0) for each in asked] == theirs
        for lookup in (0, 3, 9):
            assert model.generate(asked, count, temperature=0, lookup=lookup) == theirs, lookup


@needs_gpt2
def test_transformers_reads_exported_tokenizers(tmp_path):
    exported_model(tmp_path / "theirs", {**SHAPES["odd"], "vocab_size": 50257}, str(GPT2))
    texts = ["Hello  world's\n\n 1234 ünïcode, 漢字 🎉 <|endof", " .", "don't , . !  x\t"]
    ids, decoded, special = transformers(["tokens", str(tmp_path / "theirs"), texts])[0]
    assert ids == [gpt2().encode(text).tolist() for text in texts] and decoded == texts
    assert special == [50256, 50256]
