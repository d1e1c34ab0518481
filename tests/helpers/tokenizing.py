"""Strings and tokenizers for tests."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest
from distgpt.core.data.textfile import read_text, resolve_data
from distgpt.core.data.tokenizers import load_tokenizer
from distgpt.corpora.tokenizers.bpe import learn_bpe

GPT2 = Path(__file__).parents[3] / "shared" / "data" / "gpt2"
needs_gpt2 = pytest.mark.skipif(not GPT2.is_dir(), reason="needs GPT-2's vocab.json and merges.txt")
STORY = read_text(resolve_data("story"))
TEXT = "Hello, <|endoftext|> it's naïve — 中日 🙂!\n\n  x = 10\r\n"


@functools.cache
def gpt2():
    return load_tokenizer(str(GPT2))


@functools.cache
def small():
    return learn_bpe([STORY], size=400, min_frequency=2, separator="last")


def filled(batches, step, rows):
    both = np.full((2, rows.stop - rows.start, batches.seq_len), -1, np.int32)
    batches.fill(step, rows, *both)
    return both


def whole(tokens):
    return tokens.read(0, len(tokens))


def write_gpt2_style(folder, merges=None, **changed):
    vocab = {entry: i for i, entry in enumerate(small().vocabulary)} | changed
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    lines = ["#version: 0.2", *(f"{a} {b}" for a, b in small().merges)] if merges is None else merges
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
