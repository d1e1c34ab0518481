"""Data for `distgpt data prepare`, and ways to call, interrupt and check it."""

import contextlib
import gzip
import json
import random

import numpy as np
import pytest
from complaints import complains
from distgpt.core.base.files import bundled
from distgpt.corpora.prepare import documents as cutting
from distgpt.corpora.prepare import preparing
from distgpt.corpora.prepare.preparing import Request, prepare
from distgpt.corpora.shards import ShardTokens, read_manifest


class Quiet:
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


@contextlib.contextmanager
def in_steps(piece=400, documents=7, ids=40, noted=900):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "PIECE", piece)
        patch.setattr(cutting, "LIMIT", 2 * piece)
        for name, value in {"DOCUMENTS_AT_ONCE": documents, "AT_ONCE": ids, "EVERY": noted}.items():
            patch.setattr(preparing, name, value)
        yield


@pytest.fixture
def small():
    with in_steps():
        yield


def json_lines(texts, **more):
    return "".join(json.dumps({**more, "text": text}) + "\n" for text in texts)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    source = random.Random(4)
    words = bundled("data", "story.txt").read_text().split()
    documents = [" ".join(source.choices(words, k=source.randrange(1, 200))) for _ in range(40)]
    folder = tmp_path_factory.mktemp("prepared") / "inputs"
    folder.mkdir()
    (folder / "a.txt").write_text(documents[0])
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(json_lines(documents[1:39]).encode()))
    (folder / "c.md").write_text(documents[39])
    return folder, documents


def interrupt(request, after):
    with pytest.raises(KeyboardInterrupt):
        prepare(request, Quiet(after))
    return request


def request(inputs, out, /, **more):
    given = {"inputs": (inputs[0],), "tokenizer": "byte", "out": out, "shard_tokens": 3000, "seed": None}
    return Request(**given | more)


def refuse(error, words, request, watcher=None):
    before = request.out.exists() and contents(request.out)
    with complains(words, kind=error):
        prepare(request, watcher or Quiet())
    assert (request.out.exists() and contents(request.out)) == before, words


def tokens_of(folder, split):
    tokens = ShardTokens(folder, read_manifest(folder), split)
    return tokens.read(0, len(tokens))


def everything(folder):
    return np.concatenate([tokens_of(folder, split) for split in ("val", "train")])


def text_of(folder, split):
    return bytes(tokens_of(folder, split).astype(np.uint8)).decode()


def contents(folder):
    return {path.name: path.is_file() and path.read_bytes() for path in folder.iterdir()}
