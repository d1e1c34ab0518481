"""distgpt data: the right tokens, whatever the number of workers, and after any interruption."""

import gzip
import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from distgpt.data.loading import bundled
from distgpt.data.prepare import documents as cutting
from distgpt.data.prepare import preparing
from distgpt.data.prepare.preparing import Request, prepare
from distgpt.data.prepare.progress import Progress
from distgpt.data.shards import ShardTokens, read_manifest, shards_tokenizer, verify_shard
from distgpt.data.tokenizers.naming import load_tokenizer
from distgpt.errors import DataError, StorageError, UsageError
from tests.conftest import distgpt

GPT2 = Path(__file__).parents[2] / "shared" / "data" / "gpt2"
needs_gpt2 = pytest.mark.skipif(not GPT2.is_dir(), reason="needs GPT-2's vocab.json and merges.txt")

SIZES = {"shard_tokens": 3000, "val_fraction": 0.05}


class Quiet:
    """A watcher that remembers, and can interrupt."""

    def __init__(self, interrupt_after=None):
        self.notes, self.heard, self._left = [], [], interrupt_after

    def began(self, total_bytes, tokenizer):
        self.heard.append((total_bytes, tokenizer))

    def advanced(self, consumed, tokens):
        self.heard.append((consumed, tokens))
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise KeyboardInterrupt

    def noted(self, text):
        self.notes.append(text)


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


def request(inputs, out, **more):
    return Request(**{"inputs": (inputs[0],), "tokenizer": "byte", "out": out, **SIZES, **more})


def everything(folder):
    manifest = read_manifest(folder)
    splits = [ShardTokens(folder, manifest, split) for split in ("val", "train")]
    return np.concatenate([tokens.read(0, len(tokens)) for tokens in splits])


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def sizes(folder, split):
    return [shard.tokens for shard in read_manifest(folder).of(split)]


def test_the_tokens_are_the_documents_with_line_breaks_between(inputs, tmp_path, small_pieces):
    manifest = prepare(request(inputs, tmp_path / "out"), Quiet())
    expected = "\n".join(inputs[1])
    assert bytes(everything(tmp_path / "out").astype(np.uint8)).decode() == expected
    assert (manifest.documents, manifest.replaced) == (40, 0)
    assert manifest.text_bytes == sum(len(text) for text in inputs[1])
    assert [name for name, _ in manifest.inputs] == ["a.txt", "b.jsonl.gz", "c.md"]
    for shard in manifest.shards:
        verify_shard(tmp_path / "out", manifest, shard)


@needs_gpt2
def test_with_gpt2_its_separator_stands_before_each_document(inputs, tmp_path, small_pieces):
    prepare(request(inputs, tmp_path / "out", tokenizer=str(GPT2)), Quiet())
    tokenizer = load_tokenizer(str(GPT2))
    expected = [i for text in inputs[1] for i in (50256, *tokenizer.encode(text).tolist())]
    assert everything(tmp_path / "out").tolist() == expected
    assert shards_tokenizer(tmp_path / "out", read_manifest(tmp_path / "out")).separator == 50256


@pytest.mark.parametrize(("separator", "between"), [("none", ""), ("auto", "\n"), (" % ", " % ")])
def test_the_separator_can_be_chosen(separator, between, inputs, tmp_path):
    prepare(request(inputs, tmp_path / "out", separator=separator), Quiet())
    assert bytes(everything(tmp_path / "out").astype(np.uint8)).decode() == between.join(inputs[1])


@pytest.mark.parametrize("kind", ["char", "word"])
def test_a_vocabulary_comes_from_the_inputs(kind, inputs, tmp_path, small_pieces):
    prepare(request(inputs, tmp_path / "out", tokenizer=kind), Quiet())
    tokenizer = shards_tokenizer(tmp_path / "out", read_manifest(tmp_path / "out"))
    between = "\n" if "\n" in tokenizer.vocabulary else ""
    expected = [tokenizer.encode(text).tolist() for text in inputs[1]]
    joint = tokenizer.encode(between).tolist()
    flat = [i for ids in expected for i in (*joint, *ids)][len(joint) :]
    assert everything(tmp_path / "out").tolist() == flat


def test_shards_have_the_size_that_was_asked_for(inputs, tmp_path, small_pieces):
    total = len("\n".join(inputs[1]))
    prepare(request(inputs, tmp_path / "a", val_shards=2), Quiet())
    assert sizes(tmp_path / "a", "val") == [3000, 3000]
    *full, last = sizes(tmp_path / "a", "train")
    assert set(full) == {3000} and last == (total - 1) % 3000 + 1
    prepare(request(inputs, tmp_path / "b", val_shards=0), Quiet())
    assert sizes(tmp_path / "b", "val") == []
    prepare(request(inputs, tmp_path / "c", val_fraction=0.9), Quiet())
    assert sizes(tmp_path / "c", "val") == [3000]


@pytest.mark.parametrize("fraction", [0.0, 0.05, 0.3])
def test_of_one_piece_the_fraction_is_exact(fraction, tmp_path):
    (tmp_path / "a.txt").write_text("x" * 1000)
    prepare(request([tmp_path / "a.txt"], tmp_path / "out", val_fraction=fraction), Quiet())
    assert sum(sizes(tmp_path / "out", "val")) == round(1000 * fraction)


@pytest.mark.parametrize("kind", ["txt", "txt.gz", "jsonl"])
def test_of_many_pieces_the_fraction_is_about_right(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(cutting, "PIECE", 200_000)
    monkeypatch.setattr(cutting, "LIMIT", 400_000)
    source = random.Random(1)
    lines = [json.dumps({"text": source.randbytes(999).hex(" ")}) + "\n" for _ in range(800)]
    data = "".join(lines).encode()
    path = tmp_path / f"a.{kind}"
    path.write_bytes(gzip.compress(data) if kind.endswith("gz") else data)
    prepare(request([path], tmp_path / "out", shard_tokens=10**6, val_fraction=0.1), Quiet())
    (val,) = sizes(tmp_path / "out", "val")
    assert val == pytest.approx(0.1 * len(everything(tmp_path / "out")), rel=0.1)


@pytest.mark.parametrize("tokenizer", ["byte", "char"])
def test_an_interruption_anywhere_changes_nothing(tokenizer, inputs, tmp_path, small_pieces, monkeypatch):
    whole = request(inputs, tmp_path / "whole", tokenizer=tokenizer, shard_tokens=2000)
    watcher = Quiet()
    prepare(whole, watcher)
    expected = contents(whole.out)
    assert len(expected) > 8
    out = tmp_path / "out"
    encoded = []
    encode = preparing.Encoder.__call__
    monkeypatch.setattr(
        preparing.Encoder, "__call__", lambda self, piece: encoded.append(piece) or encode(self, piece)
    )
    for pieces in range(2, len(watcher.heard) - 1, 5):
        shutil.rmtree(out, ignore_errors=True)
        again = request(inputs, out, tokenizer=tokenizer, shard_tokens=2000)
        with pytest.raises(KeyboardInterrupt):
            prepare(again, Quiet(interrupt_after=pieces))
        finished = len(list(out.glob("*.npy")))
        assert not finished or not (out / "manifest.json").exists()
        encoded.clear()
        resumed = Quiet()
        prepare(again, resumed)
        assert contents(out) == expected
        assert not finished or f"resuming after {finished} finished" in resumed.notes[0]
        assert len(encoded) <= len(watcher.heard) - 1 - pieces + 3  # a piece may hold the ends of shards


def test_after_the_last_shard_only_the_manifest_is_written(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "MANIFEST", "missing/manifest.json")
    with pytest.raises(StorageError):
        prepare(request(inputs, tmp_path / "out"), Quiet())
    monkeypatch.undo()
    before = contents(tmp_path / "out")
    prepare(request(inputs, tmp_path / "out"), Quiet())
    prepare(request(inputs, tmp_path / "other"), Quiet())
    assert contents(tmp_path / "out") == contents(tmp_path / "other")
    assert {n: d for n, d in before.items() if n.endswith("npy")}.items() <= contents(
        tmp_path / "out"
    ).items()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer": "char"}, "tokenizer is 'char', was 'byte, 256 entries"),
        ({"shard_tokens": 701}, "shard_tokens is 701, was 700"),
        ({"val_fraction": 0.1}, "val_fraction is 0.1, was 0.05"),
        ({"val_shards": 1}, "val_fraction is None, was 0.05; val_shards is 1, was None"),
        ({"separator": "none"}, "separator is 'none', was 'auto'"),
        ({"field": "body"}, "field is 'body', was 'text'"),
    ],
)
def test_unfinished_shards_of_other_settings_are_refused(changes, message, inputs, tmp_path, small_pieces):
    first = request(inputs, tmp_path / "out", shard_tokens=700)
    with pytest.raises(KeyboardInterrupt):
        prepare(first, Quiet(interrupt_after=9))
    before = contents(first.out)
    with pytest.raises(UsageError) as refusal:
        prepare(request(inputs, tmp_path / "out", **{"shard_tokens": 700, **changes}), Quiet())
    assert message in str(refusal.value)
    assert contents(first.out) == before
    prepare(first, Quiet())


def test_a_shard_that_nobody_noted_is_made_again(inputs, tmp_path):
    """A process may end after a shard has got its name, before that is written down."""
    out = tmp_path / "out"
    prepare(request(inputs, tmp_path / "other", val_shards=0), Quiet())
    out.mkdir()
    Progress({}, []).save(out)
    for name in ("val-000000.npy", ".train-000000.npy.tmp", ".manifest.json.77.tmp"):
        (out / name).touch()
    prepare(request(inputs, out, val_shards=0), Quiet())
    assert contents(out) == contents(tmp_path / "other")


def test_unfinished_shards_of_other_inputs_are_refused(inputs, tmp_path, small_pieces):
    first = request(inputs, tmp_path / "out", shard_tokens=700)
    with pytest.raises(KeyboardInterrupt):
        prepare(first, Quiet(interrupt_after=9))
    (inputs[0] / "c.md").write_text("something else")
    with pytest.raises(UsageError, match=r"c\.md has changed"):
        prepare(first, Quiet())
    (inputs[0] / "c.md").unlink()
    with pytest.raises(UsageError, match=r"c\.md has changed, is new or is missing"):
        prepare(first, Quiet())


def test_an_input_that_changes_meanwhile_is_noticed(inputs, tmp_path):
    class Meddler(Quiet):
        def advanced(self, consumed, tokens):
            (inputs[0] / "a.txt").write_text("changed")

    with pytest.raises(DataError, match="changed while they were read"):
        prepare(request(inputs, tmp_path / "out"), Meddler())
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        ("", {}, "there is no text"),
        ("x", {}, "only 1 token; at least 2 are needed"),
        ("x" * 5000, {"val_shards": 2}, "of 5,000 tokens, 5,000 are for validation"),
        ("x" * 3000, {"val_fraction": 0.9999}, "2,999 are for validation"),
    ],
)
def test_without_anything_to_train_on_nothing_is_left_behind(text, changes, message, tmp_path):
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(DataError, match=message):
        prepare(request([tmp_path / "a.txt"], tmp_path / "out", **changes), Quiet())
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_a_folder_with_anything_else_is_refused(inputs, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"not empty \(it holds 'notes.txt'\)"):
        prepare(request(inputs, tmp_path / "out"), Quiet())
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("changes", [{"shard_tokens": 1}, {"val_fraction": 1.0}, {"val_fraction": -0.1}])
def test_impossible_settings_are_refused(changes, inputs, tmp_path):
    with pytest.raises(UsageError, match="must"):
        request(inputs, tmp_path / "out", **changes)


def test_a_word_that_the_tokenizer_does_not_know_names_the_file(tmp_path):
    (tmp_path / "t.txt").write_text("abc")
    saved = tmp_path / "t.json"
    learned = distgpt("tokenizer", "train", tmp_path / "t.txt", "--kind", "char", "--out", saved)
    assert learned.returncode == 0, learned.stderr
    (tmp_path / "a.txt").write_text("abcd")
    with pytest.raises(DataError, match=r"a\.txt: the character 'd'"):
        prepare(request([tmp_path / "a.txt"], tmp_path / "out", tokenizer=str(saved)), Quiet())
    assert not (tmp_path / "out").exists()
