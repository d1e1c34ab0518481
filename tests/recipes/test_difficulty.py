"""How hard a text is before anything is trained: the same of the same text, however it lies on the disk."""

import gzip
import json
import random
import string

import pytest
from distgpt.core.data.loading import resolve_data
from distgpt.recipes.depth import EASIEST, HARDEST, difficulty

from conftest import inside

WORDS = ["lamp", "keeper", "harbour", "stone", "evening", "ship", "window", "letter", "the", "and", "was"]


def prose(count, seed=0):
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) + draw.choice("abcdefgh") for _ in range(count))


def test_a_text_that_packs_better_is_easier(tmp_path):
    noise = "".join(random.Random(1).choices(string.printable, k=200_000))
    found = []
    for text in ("all work and no play " * 9000, prose(30_000), noise):
        path = tmp_path / "text.txt"
        path.write_text(text)
        found.append(difficulty(path))
    assert found == sorted(found) and found[0] == EASIEST and found[2] == HARDEST
    assert EASIEST < found[1] < HARDEST


def test_the_bundled_texts_are_about_as_hard_as_english():
    assert 1 < difficulty(resolve_data("corpus")) < 1.2
    assert difficulty(resolve_data("corpus")) < difficulty(resolve_data("names"))


def test_it_is_the_same_in_every_kind_of_file(tmp_path):
    text = prose(20_000)
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(text.encode()))
    documents = [text[start : start + 5000] for start in range(0, len(text), 5000)]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in documents))
    shards = ["--tokenizer", "byte", "--shard-tokens", "16384", "--val-shards", "1"]
    prepared = inside("data", "prepare", tmp_path / "a.txt", *shards, "--out", tmp_path / "shards")
    assert prepared.returncode == 0, prepared.stderr
    expected = difficulty(tmp_path / "a.txt")
    for name in ("b.txt.gz", "c.jsonl", "shards"):
        assert difficulty(tmp_path / name) == pytest.approx(expected, rel=0.05), name
    folder = tmp_path / "folder"
    folder.mkdir()
    for number, each in enumerate(documents):
        (folder / f"{number}.txt").write_text(each)
    assert difficulty(folder) == pytest.approx(expected, rel=0.2)  # each file packs alone


def test_an_empty_text_says_nothing(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    assert difficulty(tmp_path / "empty.txt") == 1.0
