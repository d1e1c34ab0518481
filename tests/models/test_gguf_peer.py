import json
import subprocess
from pathlib import Path

import distgpt
import numpy as np
import pytest
from distgpt.core.base.files import bundled
from distgpt.core.data.textfile import read_text, resolve_data
from distgpt.core.data.tokenizers import load_tokenizer
from distgpt.corpora.chats.format import encode_parts
from distgpt.models.formats.gguf.container import NUMBERS, TYPES, quantised, restored
from distgpt.models.formats.gguf.transfer import export_gguf, import_gguf
from foreignmodels import MODERN, OF_RECIPES, random_model, shape
from foreignmodels import SHAPES as PLAIN
from gguffiles import tokenizer_like, with_tokenizer
from peers import peer_with
from tokenizing import TEXT, small

from conftest import TESTS

ORACLE = TESTS / "oracles" / "llama_cpp_models.py"
PEER, pytestmark = peer_with("DISTGPT_LLAMA_PYTHON", "llama_cpp", "gguf")
SHAPES = {**PLAIN, **{f"{name} of a recipe": shape for name, shape in OF_RECIPES.items()}}
LACKING = ("relu", "one layer, heads of one")
HELD = [name for name in SHAPES if name not in LACKING and "window" not in SHAPES[name]]
SAMPLE = bundled("weights", "sample.safetensors")
PROMPT = "In the morning "
TEXTS = [TEXT, "It's 1900: 12345 lamps, I'LL say.\n\n\n  x = 1\t!", " leading and trailing ", "中日 Ünïcode 🙂"]


def llama_cpp(*jobs):
    said = subprocess.run([PEER, str(ORACLE), json.dumps(jobs)], capture_output=True, text=True, timeout=250)
    assert said.returncode == 0, said.stderr[-2000:]
    return json.loads(said.stdout.splitlines()[-1])


def test_blocks_match_llama_cpp_bitwise(tmp_path):
    draw, jobs = np.random.default_rng(0), []
    for name, number in NUMBERS.items():
        kind = TYPES[number]
        blocks = draw.integers(0, 256, (300, kind.block.itemsize), np.uint8).view(kind.block).reshape(-1)
        for field in {"d", "m"} & set(kind.block.names):
            blocks[field] = draw.standard_normal(300)
        np.save(tmp_path / f"{name}.npy", blocks.view(np.uint8).reshape(1, -1))
        jobs.append(["restored", name, str(tmp_path / f"{name}.npy"), str(tmp_path / f"{name}.out.npy")])
    x = draw.standard_normal((500, 64)).astype(np.float32)
    x[3], x[4], x[5] = 0, 1, 1e-9 * x[5]
    np.save(tmp_path / "x.npy", x)
    x_of = [str(tmp_path / "x.npy"), str(tmp_path / "Q8_0.x.npy"), str(tmp_path / "Q4_0.x.npy")]
    jobs += [["quantised", "Q8_0", *x_of[:2]], ["quantised", "Q4_0", x_of[0], x_of[2]]]
    llama_cpp(*jobs)
    for name, number in NUMBERS.items():
        blocks = np.load(tmp_path / f"{name}.npy").view(TYPES[number].block).reshape(-1)
        theirs = np.load(tmp_path / f"{name}.out.npy").reshape(-1)
        assert np.array_equal(restored(TYPES[number], blocks), theirs, equal_nan=True), name
    for name in ("Q8_0", "Q4_0"):
        ours = quantised(TYPES[NUMBERS[name]], x).view(np.uint8)
        assert np.array_equal(ours.reshape(-1), np.load(tmp_path / f"{name}.x.npy").reshape(-1)), name


def test_families_match_llama_cpp(tmp_path):
    jobs, draw = [], np.random.default_rng(3)
    for name in HELD:
        path, file = tmp_path / f"{name}.safetensors", str(tmp_path / f"{name}.gguf")
        random_model(path, SHAPES[name], None)
        export_gguf(path, Path(file), "float32")
        context = SHAPES[name]["seq_len"]
        np.save(tmp_path / f"{name}.npy", draw.integers(0, SHAPES[name]["vocab_size"], (2, context)))
        jobs.append(["logits", file, str(tmp_path / f"{name}.npy"), str(tmp_path / f"{name}.out.npy")])
        jobs.append(["tokens_after", file, [1, 2, 3], context - 3])
    written = dict(zip(HELD, llama_cpp(*jobs)[1::2], strict=True))
    for name in HELD:
        model = distgpt.load(tmp_path / f"{name}.safetensors")
        ours, theirs = model.logits(np.load(tmp_path / f"{name}.npy")), np.load(tmp_path / f"{name}.out.npy")
        worst = np.abs(ours - theirs).max() / max(1, np.abs(theirs).max())
        # llama.cpp looks up GELU in a table of float16
        assert worst < (2e-3 if SHAPES[name].get("positions") != "rope" else 1e-4), name
        assert model.generate([1, 2, 3], len(written[name]), temperature=0) == written[name], name


def perplexity(scores, tokens):
    """Return the perplexity of each row's tokens after the first."""
    scores = scores[:, :-1].astype(np.float64)
    scores -= scores.max(-1, keepdims=True)
    logs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    return np.exp(-np.take_along_axis(logs, tokens[:, 1:, None].astype(np.int64), -1).mean())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "q8_0", "q4_0"])
def test_sample_model_matches_llama_cpp_in_every_type(tmp_path, dtype):
    """llama.cpp also rounds activations, so scores differ slightly and greedy text may diverge, except in float32."""
    file, back, wide = tmp_path / "m.gguf", tmp_path / "back.safetensors", tmp_path / "wide.gguf"
    export_gguf(Path(SAMPLE), file, dtype)
    import_gguf(file, back, None)
    export_gguf(back, wide, "float32")
    text = read_text(resolve_data("corpus")).encode()
    ids = np.frombuffer(text[: 128 * 40], np.uint8).reshape(40, 128).astype(np.int64)
    np.save(tmp_path / "ids.npy", ids)
    prompt = list(PROMPT.encode())
    _, direct, widened = llama_cpp(
        ["logits", str(file), str(tmp_path / "ids.npy"), str(tmp_path / "out.npy")],
        ["tokens_after", str(file), prompt, 100],
        ["tokens_after", str(wide), prompt, 100],
    )
    model = distgpt.load(back)
    scores, theirs = model.logits(ids), np.load(tmp_path / "out.npy")
    written = model.generate(prompt, 100, temperature=0)
    agree = (scores.argmax(-1) == theirs.argmax(-1)).mean()
    here, there = perplexity(scores, ids), perplexity(theirs, ids)
    assert abs(here / there - 1) < 1e-3 and agree > 0.97 and widened == written
    assert dtype != "float32" or direct == written


def test_requantized_files_match_llama_cpp(tmp_path):
    """The tolerance for llama.cpp's rounding of activations is 0.08 of the scores' deviation."""
    of, mixtures = (shape(512, 64, 1, 4, 256, mlp_width=512, tied=False, **MODERN), ("Q4_K_M", "Q3_K_M", "Q5_1"))
    random_model(tmp_path / "ours.safetensors", of, None)
    export_gguf(tmp_path / "ours.safetensors", tmp_path / "m.gguf", "float32")
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(0, 512, (2, 64)))
    jobs = []
    for kind in mixtures:
        file = str(tmp_path / f"{kind}.gguf")
        jobs.append(["requantised", str(tmp_path / "m.gguf"), kind, file])
        jobs.append(["logits", file, str(tmp_path / "ids.npy"), f"{file}.npy"])
    llama_cpp(*jobs)
    for kind in mixtures:
        import_gguf(tmp_path / f"{kind}.gguf", tmp_path / f"{kind}.safetensors", None)
        ours = distgpt.load(tmp_path / f"{kind}.safetensors").logits(np.load(tmp_path / "ids.npy"))
        theirs = np.load(tmp_path / f"{kind}.gguf.npy")
        assert np.sqrt(((ours - theirs) ** 2).mean()) < 0.08 * theirs.std(), kind


@pytest.mark.parametrize("kind", ["llama3", "qwen", "smollm2", "tinyllama", "mistral", "byte", "bpe"])
def test_llama_cpp_gives_equal_tokens(tmp_path, kind):
    own = {"byte": lambda: load_tokenizer("byte", ""), "bpe": small}
    tokenizer = own[kind]() if kind in own else tokenizer_like(kind)
    path, file = with_tokenizer(tmp_path / "ours.safetensors", tokenizer), tmp_path / "m.gguf"
    export_gguf(path, file, "float32")
    special = list(tokenizer.specials.values())[-2:]
    parts = [part for token in special for part in (token, "user\n", token, "Hello, <harbour>!\n")]
    spelled = "".join(part if isinstance(part, str) else tokenizer.decode([part]) for part in parts)
    ids, in_chat, end, template = llama_cpp(["tokens", str(file), TEXTS, spelled])[0]
    assert ids == [tokenizer.encode_prompt(text) for text in TEXTS]
    assert in_chat == encode_parts(tokenizer, parts)[0].tolist()
    chat = tokenizer.chat
    assert end == (chat.ends[0] if chat else 255 if kind == "byte" else tokenizer.separator)
    assert template == (chat.source if chat else None)
