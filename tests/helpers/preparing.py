"""Texts to prepare, and `distgpt data prepare` as its tests call, interrupt and look at it."""

import gzip
import json
import random

import numpy as np
import pytest
from distgpt.core.base.files import bundled
from distgpt.corpora.prepare import documents as cutting
from distgpt.corpora.prepare.preparing import Request, prepare
from distgpt.corpora.shards import ShardTokens, read_manifest

SIZES = {"shard_tokens": 3000, "val_fraction": 0.05, "seed": None}


class Quiet:
    """A watcher that remembers, and can interrupt."""

    def __init__(self, interrupt_after=-1):
        self.notes, self.heard, self._left = [], [], interrupt_after
        self.noted = self.notes.append

    def began(self, *facts):
        self.heard.append(facts)

    def advanced(self, *facts):
        self.heard.append(facts)
        if self._left == 0:
            raise KeyboardInterrupt
        self._left -= 1


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(cutting, "PIECE", 400)
    monkeypatch.setattr(cutting, "LIMIT", 800)


@pytest.fixture
def inputs(tmp_path):
    """Three kinds of files with 40 documents in all."""
    source = random.Random(4)
    words = bundled("data", "story.txt").read_text().split()
    documents = [" ".join(source.choices(words, k=source.randrange(1, 200))) for _ in range(40)]
    folder = tmp_path / "inputs"
    folder.mkdir()
    (folder / "a.txt").write_text(documents[0])
    lines = "".join(json.dumps({"text": text}) + "\n" for text in documents[1:39])
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "c.md").write_text(documents[39])
    return folder, documents


@pytest.fixture
def interrupted(inputs, tmp_path, small_pieces):
    """A request that was interrupted after some shards."""
    whole = Quiet()
    prepare(request(inputs, tmp_path / "whole", shard_tokens=700), whole)
    return interrupt(request(inputs, tmp_path / "out", shard_tokens=700), len(whole.heard) - 5)


def interrupt(request, after):
    with pytest.raises(KeyboardInterrupt):
        prepare(request, Quiet(after))
    return request


def request(inputs, out, /, **more):
    return Request(**{"inputs": (inputs[0],), "tokenizer": "byte", "out": out, **SIZES, **more})


def refuse(error, message, request, watcher=None):
    """This is refused, with these words, and what the folder held before stays as it was."""
    before = request.out.exists() and contents(request.out)
    with pytest.raises(error, match=message):
        prepare(request, watcher or Quiet())
    assert (request.out.exists() and contents(request.out)) == before, message


def everything(folder):
    manifest = read_manifest(folder)
    splits = [ShardTokens(folder, manifest, split) for split in ("val", "train")]
    return np.concatenate([tokens.read(0, len(tokens)) for tokens in splits])


def contents(folder):
    return {path.name: path.is_file() and path.read_bytes() for path in folder.iterdir()}
