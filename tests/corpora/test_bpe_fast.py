import functools
import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from distgpt.core.data.tokenizers import tokenizer_from_json
from distgpt.corpora.tokenizers import bpe
from distgpt.corpora.tokenizers import bpe_fast as fast_bpe
from distgpt.corpora.tokenizers.bpe import learn_bpe
from tokenizing import GPT2, STORY, gpt2, needs_gpt2

NASTY = [
    *["'s", "'S", "'ll", "'l", "'re", "'ve", "'d", "'m", "'t", "'", "''", "’s", "<|endoftext|>"],
    *["the", " the"],
    *(" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\xa0", "\u3000", "\u2028", "\x85", "\x1c", "\x0b"),
    *("\u200b", "\u200d", "\ufeff", "\ufffd", "\x00", "\u0378", "\ue000", "\U0010ffff", "\U000e0041"),
    *("a", "Z", "é", "e\u0301", "\u0301", "ß", "中", "日本", "ǅ", "ʰ", "ª", "ع", "ह\u093f", "🙂", "👩‍👧"),
    *("1", "42", "٣", "½", "Ⅷ", "²", "_", "-", "=", "!", "...", "a" * 30, " " * 30, "é" * 20, "=" * 70),
]


def by_the_library(tokenizer, text):
    return tokenizer.library.encode(text, add_special_tokens=False).ids


def fast(tokenizer):
    return type(tokenizer)(tokenizer.vocabulary, tokenizer.merges, tokenizer.separator).fast


def differing(tokenizer, encoder, texts):
    return [t for t in texts if encoder.encode(t.encode()).tolist() != by_the_library(tokenizer, t)]


def nasty_texts(count, length, seed):
    source = random.Random(seed)
    return ["".join(source.choices(NASTY, k=source.randrange(length))) for _ in range(count)]


def mixed_text(size):
    """Mix prose, code, random strings and a few invalid bytes."""
    code = "def f(x):\n    if x > 10 and x != 0x1F:\n\t\treturn {'a': [x ** 2, \"b\"]}  # why?\n\n\n"
    random_ones, source, parts = nasty_texts(4000, 40, seed=1), random.Random(2), []
    while sum(map(len, parts)) < size:
        start = source.randrange(len(STORY))
        parts += [STORY[start : start + 500], code * source.randrange(3), *source.sample(random_ones, 9)]
    damaged = bytearray("".join(parts).encode())
    for _ in range(200):
        damaged[source.randrange(len(damaged))] = 0xFF
    return damaged.decode("utf-8", "replace")


@functools.cache
def own():
    """Learn merges of all kinds of characters, so that wrongly cut pieces are detected."""
    return learn_bpe([mixed_text(200_000)], size=3000, min_frequency=2, separator="last")


TOKENIZERS = pytest.mark.parametrize(
    "tokenizer", [pytest.param(own, id="own"), pytest.param(gpt2, id="gpt2", marks=needs_gpt2)]
)


@pytest.mark.ci
@TOKENIZERS
def test_random_text_matches_library(tokenizer):
    text = mixed_text(300_000)
    texts = [text, text[:100_000], "", *NASTY, *nasty_texts(1500, 20, seed=3)]
    assert not differing(tokenizer(), fast(tokenizer()), texts)


@pytest.mark.slow
def test_every_code_point_matches_library():
    codes = [chr(code) for code in [*range(0xD800), *range(0xE000, 0x20000), *range(0xE0000, 0xE0200)]]
    assert not differing(own(), fast(own()), [beside.join(codes) for beside in ("", "a", "1! ")])


@TOKENIZERS
def test_long_pieces_match_library(tokenizer):
    encoder = fast(tokenizer())
    for length in (7, 8, 9, 16, 17, 23, 24, 25, 255, 256, 257, 5000):
        runs = [text * length for text in ("a", " ", "é", "中", "=", "ab", "1", "\n", "\x00")]
        texts = [text for run in runs for text in (run, f"x {run} y", f"{run}z", f" {run}\n")]
        assert not differing(tokenizer(), encoder, texts), length


@pytest.mark.parametrize(("rows", "ids", "at_once"), [(8, 5000, 4000), (4096, 30, 4000), (4096, 5000, 257)])
def test_full_memory_is_cleared(monkeypatch, rows, ids, at_once):
    monkeypatch.setattr(fast_bpe, "MEMORY_ROWS", rows)
    monkeypatch.setattr(fast_bpe, "MEMORY_IDS", ids)
    monkeypatch.setattr(fast_bpe, "IDS_AT_ONCE", at_once)
    encoder = fast(own())
    assert not differing(own(), encoder, [mixed_text(50_000), *nasty_texts(300, 60, seed=5)])
    rows_used, ids_used = encoder.scratch.memory.used
    assert rows_used <= rows and ids_used <= ids


def test_similar_pieces_are_distinguished(monkeypatch):
    """The encoder remembers pieces of up to 24 bytes: three words of eight."""
    monkeypatch.setattr(fast_bpe, "MEMORY_ROWS", 64)  # so that they collide
    zeros = ["\x00" * length for length in range(1, 25)]
    ends = [a + b for a in "abcde" for b in "abcde"]
    words = [" ".join("a" * at + end + "a" * (16 - at) for end in ends) for at in (0, 8, 16)]
    assert not differing(own(), fast(own()), ["a".join(zeros), "a".join(zeros[::-1]), *words])


def test_threads_share_one_tokenizer(monkeypatch):
    monkeypatch.setattr(fast_bpe, "KINDS", np.zeros_like(fast_bpe.KINDS))  # unfilled, so that all threads fill it
    texts = [mixed_text(40_000)[start:] for start in range(8)]
    encoder, meeting = fast(own()), threading.Barrier(4)

    def work(text):
        meeting.wait(timeout=60)
        return encoder.encode(text.encode()).tolist()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, texts)) == [by_the_library(own(), text) for text in texts]


def test_large_inputs_use_compiled_encoder(monkeypatch):
    monkeypatch.setattr(bpe, "LARGE", 1000)
    tokenizer = tokenizer_from_json(own().to_json(), "copy")
    texts = ["x" * 400, "it's " * 80, "y = 1\n" * 100, ""]
    ids = [tokenizer.encode(text) for text in texts[:2]]
    assert "fast" not in vars(tokenizer)
    ids += [tokenizer.encode(text) for text in texts[2:]]
    assert "fast" in vars(tokenizer)
    assert [i.tolist() for i in ids] == [by_the_library(own(), text) for text in texts]
    assert {i.dtype for i in ids} == {np.dtype(np.uint16)}


@pytest.mark.peer
@needs_gpt2
def test_encoder_matches_other_libraries():
    encoder, texts = fast(gpt2()), [mixed_text(300_000), *nasty_texts(2000, 20, seed=7)]
    byte_of = {symbol: byte for byte, symbol in enumerate(bpe.symbols())}
    vocab = json.loads((GPT2 / "vocab.json").read_text("utf-8"))
    ranks = {bytes(byte_of[c] for c in entry): i for entry, i in vocab.items() if i != 50256}
    pattern = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
    known = {"mergeable_ranks": ranks, "special_tokens": {"<|endoftext|>": 50256}}
    tiktoken = pytest.importorskip("tiktoken").Encoding("gpt2", pat_str=pattern, **known)
    for text in texts:
        assert encoder.encode(text.encode()).tolist() == tiktoken.encode_ordinary(text)
    library = pytest.importorskip("transformers")
    transformers = library.GPT2TokenizerFast(str(GPT2 / "vocab.json"), str(GPT2 / "merges.txt"))
    for text in (mixed_text(100_000).replace("<|endoftext|>", ""), "Hello, it's 中日"):
        expected = transformers(text, add_special_tokens=False)["input_ids"]
        assert encoder.encode(text.encode()).tolist() == expected
