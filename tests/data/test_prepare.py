"""distgpt data prepare: the right tokens in shards of the right sizes, or a refusal that leaves nothing."""

import gzip
import json
import random
from pathlib import Path

import numpy as np
import pytest
from preparing import Quiet, contents, everything, inputs, interrupt, refuse, request, small_pieces  # noqa: F401
from tokenizing import small

from distgpt.data.prepare import documents as cutting
from distgpt.data.prepare.preparing import prepare
from distgpt.data.prepare.progress import reserved
from distgpt.data.shards import read_manifest, shards_tokenizer, verify_shards
from distgpt.data.tokenizers.naming import build_tokenizer
from distgpt.errors import DataError, UsageError


def test_the_tokens_are_the_documents_with_separators_between(inputs, tmp_path, small_pieces):
    for separator, between in (("auto", "\n"), ("none", ""), (" % ", " % ")):
        out = tmp_path / separator.strip()
        manifest = prepare(request(inputs, out, separator=separator), Quiet())
        assert bytes(everything(out).astype(np.uint8)).decode() == between.join(inputs[1]), separator
        assert (manifest.documents, manifest.replaced) == (40, 0)
        assert manifest.text_bytes == sum(len(text) for text in inputs[1])
        assert [name for name, _ in manifest.inputs] == ["a.txt", "b.jsonl.gz", "c.md"]
        for shard in manifest.shards:
            verify_shards(out, manifest, [shard])


def test_tokenizers_have_separators_of_their_own_and_may_come_from_the_inputs(inputs, tmp_path, small_pieces):
    """A BPE's stands before each document; where it is a line break, if there is one, between them."""
    (tmp_path / "bpe").write_text(small().to_json())
    for kind in (str(tmp_path / "bpe"), "char", "word"):
        out = tmp_path / f"{Path(kind).name}-shards"
        prepare(request(inputs, out, tokenizer=kind), Quiet())
        tokenizer = shards_tokenizer(out, read_manifest(out))
        breaks = tokenizer.encode("\n" if "\n" in tokenizer.vocabulary else "").tolist()
        joint = breaks if tokenizer.separator is None else [tokenizer.separator]
        expected = [i for text in inputs[1] for i in (*joint, *tokenizer.encode(text).tolist())]
        assert everything(out).tolist() == expected[0 if tokenizer.separator else len(joint) :], kind
        assert tokenizer.kind != "bpe" or tokenizer.to_json() == small().to_json()


# The sizes of shards, and the part for validation


def test_shards_have_the_size_that_was_asked_for(inputs, tmp_path, small_pieces):
    total = len("\n".join(inputs[1]))
    for settings, val in (
        ({"val_shards": 2}, [3000, 3000]),
        ({"val_shards": 0}, []),
        ({"val_fraction": 0.9}, [3000]),
    ):
        manifest = prepare(request(inputs, tmp_path / str(settings), **settings), Quiet())
        train = [shard.tokens for shard in manifest.of("train")]
        assert [shard.tokens for shard in manifest.of("val")] == val
        assert set(train[:-1]) == {3000} and train[-1] == (total - 1) % 3000 + 1


def share(manifest):
    """Of the tokens, how many are for validation."""
    return manifest.tokens("val") / (manifest.tokens("val") + manifest.tokens("train"))


def test_of_one_piece_the_fraction_is_exact_and_of_many_about_right(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("x" * 1000)
    for fraction in (0.0, 0.05, 0.3, 0.9):
        watcher, out = Quiet(), tmp_path / str(fraction)
        assert share(prepare(request([tmp_path / "a.txt"], out, val_fraction=fraction), watcher)) == fraction
        assert not watcher.notes  # of a second pass, even where it is large
    monkeypatch.setattr(cutting, "PIECE", 200_000)
    monkeypatch.setattr(cutting, "LIMIT", 400_000)
    lines = [json.dumps({"text": random.Random(i).randbytes(999).hex(" ")}) + "\n" for i in range(800)]
    data = "".join(lines).encode()
    for kind in ("txt", "txt.gz", "jsonl"):
        (path := tmp_path / f"b.{kind}").write_bytes(gzip.compress(data) if kind.endswith("gz") else data)
        found = prepare(request([path], tmp_path / kind, shard_tokens=10**6, val_fraction=0.1), Quiet())
        assert len(found.of("val")) == 1 and share(found) == pytest.approx(0.1, rel=0.1), kind


def test_a_first_piece_unlike_the_rest_does_not_hold_everything_out(tmp_path):
    def some_words(count, seed=3):
        return " ".join(random.Random(seed).choices(["harbour", "lay", "still", "tide", "1900"], k=count))

    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"the same line\n" * 7000))
    (tmp_path / "b.txt").write_text(some_words(100_000))
    arrow, parquet = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))
    table = arrow.table({"text": [some_words(200_000), *[""] * 300_000, some_words(2000, 1)]})
    parquet.write_table(table, tmp_path / "a.parquet", compression="zstd")
    for names, relative, passes in ((["a.txt.gz", "b.txt"], 0.05, 1), (["a.parquet"], 2e-4, 2)):
        watcher, out = Quiet(), tmp_path / names[0].replace(".", "-")
        files = tuple(tmp_path / name for name in names)
        found = prepare(request(files, out, inputs=files, shard_tokens=10**8), watcher)
        assert share(found) == pytest.approx(0.05, rel=relative), names
        assert len(watcher.notes) < passes


def test_a_misleading_beginning_costs_a_second_pass_which_can_be_interrupted_as_well(tmp_path):
    """The first of two compressed texts is a thousand times smaller than its text, the second hardly."""
    files = tmp_path / "a.txt.gz", tmp_path / "b.txt.gz"
    files[0].write_bytes(gzip.compress(b"the same line\n" * 50_000))
    files[1].write_bytes(gzip.compress(random.Random(1).randbytes(50_000).hex().encode()))
    how = {"inputs": files, "shard_tokens": 170_000, "val_fraction": 0.1}
    watcher, whole = Quiet(), tmp_path / "whole"
    manifest = prepare(request(files, whole, **how), watcher)
    assert share(manifest) == pytest.approx(0.1, abs=1e-5) and len(manifest.of("train")) == 5
    assert watcher.notes == ["too much was held out for validation: starting again with the right part"]
    assert manifest.documents == 2 and manifest.text_bytes == 800_000
    for shard in manifest.shards:
        verify_shards(whole, manifest, [shard])
    for after in range(len(watcher.heard) - 2):  # besides the two beginnings
        again = interrupt(request(files, tmp_path / str(after), **how), after)
        prepare(again, Quiet())
        assert contents(again.out) == contents(whole)


# Refusals


def test_an_input_that_changes_meanwhile_is_noticed(inputs, tmp_path):
    watcher = Quiet()
    watcher.advanced = lambda *facts: (inputs[0] / "a.txt").write_text("changed")
    with pytest.raises(DataError, match="changed while they were read"):
        prepare(request(inputs, tmp_path / "out"), watcher)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_impossible_inputs_and_settings_are_refused_and_nothing_is_left_behind(tmp_path):
    path, saved = tmp_path / "a.txt", tmp_path / "t.json"
    saved.write_text(build_tokenizer("char", "abc").to_json())
    for text, changes, message in (
        ("", {}, "there is no text"),
        ("x", {}, "only 1 token; at least 2 are needed"),
        ("x" * 5000, {"val_shards": 2}, "of 5,000 tokens, 5,000 are for validation"),
        ("x" * 3000, {"val_fraction": 0.9999}, "2,999 are for validation"),
        ("abcd", {"tokenizer": str(saved)}, r"a\.txt: the character 'd'"),
    ):
        path.write_text(text)
        refuse(DataError, message, request([path], tmp_path / "out", **changes))
    for changes in ({"shard_tokens": 1}, {"val_fraction": 1.0}, {"val_fraction": -0.1}):
        with pytest.raises(UsageError, match="must"):
            request([path], tmp_path / "out", **changes)


def test_a_folder_with_anything_else_is_left_alone(inputs, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    refuse(UsageError, r"not empty \(it holds 'inputs'\)", request(inputs, tmp_path))
    for text in ("{}", "[]", "", "no", "[" * 100_000, '{"format": "mine"}'):
        (tmp_path / "progress.json").write_text(text)
        refuse(UsageError, r"is not of distgpt data prepare; give a new folder", request(inputs, tmp_path))


def test_the_loser_of_two_leaves_the_empty_folder_to_the_winner(tmp_path, monkeypatch):
    """Both find no folder, one makes it first. A folder that was there before stays."""
    out = tmp_path / "out"
    with reserved(out):
        monkeypatch.setattr(type(out), "exists", lambda self: False)
        with pytest.raises(UsageError, match="another process"), reserved(out):
            raise AssertionError("it was reserved twice")
        monkeypatch.undo()
        assert out.is_dir()
    assert not out.exists()
    with reserved(tmp_path):
        pass
    assert tmp_path.is_dir()
