"""distgpt data prepare: the right tokens in shards of the right sizes, or a refusal that leaves nothing."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from distgpt.core.base.errors import DataError, DistgptError, StorageError, UsageError
from distgpt.core.data.tokenizers import load_tokenizer
from distgpt.corpora.prepare import preparing
from distgpt.corpora.prepare.preparing import Progress, prepare, reserved
from distgpt.corpora.shards import read_manifest, shards_tokenizer, verify_shards
from preparing import Quiet, contents, everything, inputs, interrupted, refuse, request, small_pieces  # noqa: F401
from tokenizing import small


def test_the_tokens_are_the_documents_with_separators_between(inputs, tmp_path, small_pieces):
    for separator, between in (("auto", "\n"), ("none", ""), (" % ", " % ")):
        out = tmp_path / separator.strip()
        manifest = prepare(request(inputs, out, separator=separator), Quiet())
        assert bytes(everything(out).astype(np.uint8)).decode() == between.join(inputs[1]), separator
        assert (manifest.documents, manifest.replaced) == (40, 0)
        assert manifest.text_bytes == sum(len(text) for text in inputs[1])
        assert [name for name, _ in manifest.inputs] == ["a.txt", "b.jsonl.gz", "c.md"]
        verify_shards(out, manifest, manifest.shards)


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


def test_shards_have_the_size_that_was_asked_for(inputs, tmp_path, small_pieces):
    total = len("\n".join(inputs[1]))
    for settings, val in (({"val_shards": 2}, [3000, 3000]), ({"val_shards": 0}, []), ({"val_fraction": 0.9}, [3000])):
        manifest = prepare(request(inputs, tmp_path / str(settings), **settings), Quiet())
        train = [shard.tokens for shard in manifest.of("train")]
        assert [shard.tokens for shard in manifest.of("val")] == val
        assert set(train[:-1]) == {3000} and train[-1] == (total - 1) % 3000 + 1


# Refusals


def test_an_input_that_changes_meanwhile_is_noticed(inputs, tmp_path):
    watcher = Quiet()
    watcher.advanced = lambda *facts: (inputs[0] / "a.txt").write_text("changed")
    with pytest.raises(DataError, match="changed while they were read"):
        prepare(request(inputs, tmp_path / "out"), watcher)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_impossible_inputs_and_settings_are_refused_and_nothing_is_left_behind(tmp_path):
    path, saved = tmp_path / "a.txt", tmp_path / "t.json"
    saved.write_text(load_tokenizer("char", "abc").to_json())
    for text, changes, message in (
        ("", {}, "there is no text"),
        ("x", {}, "of 1 token, 0 are for validation"),
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
    with reserved(out, print):
        monkeypatch.setattr(type(out), "exists", lambda self: False)
        with pytest.raises(UsageError, match="another process"), reserved(out, print):
            raise AssertionError("it was reserved twice")
        monkeypatch.undo()
        assert out.is_dir()
    assert not out.exists()
    with reserved(tmp_path, print):
        pass
    assert tmp_path.is_dir()


# Interruptions


def test_without_a_manifest_all_shards_are_made_again(inputs, tmp_path, monkeypatch):
    """Also if the process had not noted anything."""
    out, other, again = tmp_path / "out", tmp_path / "other", tmp_path / "again"
    monkeypatch.setattr(preparing, "MANIFEST", "missing/manifest.json")
    with pytest.raises(StorageError):
        prepare(request(inputs, out), Quiet())
    monkeypatch.undo()
    again.mkdir()
    Progress({}, []).save(again)
    for name in ("val-000000.npy", ".train-000000.npy.tmp", ".manifest.json.77.tmp"):
        (again / name).touch()
    for folder in (out, other, again):
        prepare(request(inputs, folder), Quiet())
    assert contents(out) == contents(other) == contents(again)


def test_unfinished_shards_of_other_settings_or_inputs_are_refused(interrupted, inputs):
    for changes, names in (
        ({"tokenizer": "char"}, "tokenizer"),
        ({"shard_tokens": 701}, "shard_tokens"),
        ({"val_shards": 1}, "val_fraction, val_shards"),
        ({"separator": "none"}, "separator"),
        ({"field": "body"}, "field"),
        ({"inputs": (inputs[0], inputs[0] / "a.txt")}, "inputs"),
    ):
        other = request(inputs, interrupted.out, **{"shard_tokens": 700, **changes})
        refuse(UsageError, rf"of another command \({names} changed\)", other)
    before = (inputs[0] / "c.md").stat()
    (inputs[0] / "c.md").write_text("something else")
    refuse(UsageError, "inputs changed", interrupted)
    (inputs[0] / "c.md").write_text(inputs[1][39])
    os.utime(inputs[0] / "c.md", ns=(before.st_atime_ns, before.st_mtime_ns))
    prepare(interrupted, Quiet())


def test_whatever_is_changed_in_the_progress_is_noticed(interrupted):
    path = interrupted.out / "progress.json"
    good = json.loads(path.read_bytes())
    damaged = DataError, r"progress\.json cannot be resumed \(.*\); remove .*out and begin again"
    for name, value in (
        *(("inputs", None), ("settings", None), ("text_bytes", "x"), ("replaced", -1), ("sources", [])),
        *(("place", {"input": 2, "offset": 0, "line": 0}), ("more", 1), ("sha256", None), ("version", 1)),
    ):
        path.write_text(json.dumps({**good, name: value}))
        refuse(*damaged, interrupted)


def test_a_failure_says_whether_there_is_anything_to_resume(interrupted, inputs, tmp_path, monkeypatch):
    def failing(*given, **more):
        raise DistgptError("something else")

    monkeypatch.setattr(preparing, "encode", failing)
    monkeypatch.setattr(preparing, "write_shard", failing)
    at_once, later = Quiet(), Quiet()
    refuse(DistgptError, "something else", interrupted, later)
    assert "the same command resumes" in later.notes[-1]
    refuse(DistgptError, "something else", request(inputs, tmp_path / "new"), at_once)
    assert not at_once.notes and not (tmp_path / "new").exists()
