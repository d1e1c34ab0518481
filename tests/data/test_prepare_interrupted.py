"""distgpt data prepare: what an interruption leaves, how the same command resumes, and what it refuses."""

import json
import os
import re

import pytest
from preparing import Quiet, contents, inputs, interrupt, interrupted, refuse, request, small_pieces  # noqa: F401

from distgpt.data.prepare import preparing
from distgpt.data.prepare.preparing import Encoder, prepare
from distgpt.data.prepare.progress import Progress
from distgpt.data.shards import ShardWriter
from distgpt.errors import DataError, DistgptError, StorageError, UsageError


def test_after_the_last_shard_only_the_manifest_is_written_and_one_that_nobody_noted_is_made_again(
    inputs, tmp_path, monkeypatch
):
    """A process may end after a shard has got its name, before that is written down."""
    out, other, again = tmp_path / "out", tmp_path / "other", tmp_path / "again"
    monkeypatch.setattr(preparing, "MANIFEST", "missing/manifest.json")
    with pytest.raises(StorageError):
        prepare(request(inputs, out), Quiet())
    monkeypatch.undo()
    shards = {name: data for name, data in contents(out).items() if name.endswith("npy")}
    again.mkdir()
    Progress({}, []).save(again)
    for name in ("val-000000.npy", ".train-000000.npy.tmp", ".manifest.json.77.tmp"):
        (again / name).touch()
    for folder in (out, other, again):
        prepare(request(inputs, folder), Quiet())
    assert contents(out) == contents(other) == contents(again) == contents(out) | shards


def test_unfinished_shards_of_other_settings_or_inputs_are_refused(interrupted, inputs):
    for changes, message in (
        ({"tokenizer": "char"}, "tokenizer is 'char', was 'byte, 256 entries"),
        ({"shard_tokens": 701}, "shard_tokens is 701, was 700"),
        ({"val_fraction": 0.1}, "val_fraction is 0.1, was 0.05"),
        ({"val_shards": 1}, "val_fraction is None, was 0.05; val_shards is 1, was None"),
        ({"separator": "none"}, "separator is 'none', was 'auto'"),
        ({"field": "body"}, "field is 'body', was 'text'"),
        ({"inputs": (inputs[0], inputs[0] / "a.txt")}, "the inputs come in another order"),
    ):
        refuse(UsageError, message, request(inputs, interrupted.out, **{"shard_tokens": 700, **changes}))
    before = (inputs[0] / "c.md").stat()
    (inputs[0] / "c.md").write_text("something else")
    refuse(UsageError, r"c\.md has changed", interrupted)
    (inputs[0] / "c.md").write_text(inputs[1][39])
    os.utime(inputs[0] / "c.md", ns=(before.st_atime_ns, before.st_mtime_ns))
    prepare(interrupted, Quiet())


def test_whatever_is_changed_in_the_progress_is_noticed(interrupted):
    path = interrupted.out / "progress.json"
    good = json.loads(path.read_bytes())
    damaged = DataError, r"progress\.json is damaged \(.*\); remove .*out and begin again"
    for name, value in (
        *(("inputs", None), ("settings", None), ("held_out", "x"), ("held_out", -1), ("skip", 3)),
        *(("place", {"input": 2, "offset": 0, "line": 0}), ("counts", {}), ("shards", []), ("more", 1)),
        ("sha256", None),
    ):
        path.write_text(json.dumps({**good, name: value}))
        refuse(*damaged, interrupted)
    path.write_text(json.dumps({**good, "version": 1}))
    refuse(UsageError, "of another version of distgpt", interrupted)


def test_a_failure_says_what_becomes_of_finished_shards_if_there_are_any(
    interrupted, inputs, tmp_path, monkeypatch
):
    def failing(self, given):
        raise error

    monkeypatch.setattr(Encoder, "__call__", failing)
    monkeypatch.setattr(ShardWriter, "write", failing)
    for error, words in (
        (DistgptError("something else"), r"finished shards in .*out: the same command resumes"),
        (DataError("line 7: not JSON"), r"finished shards in .*out: remove it once an input has changed"),
    ):
        at_once, later = Quiet(), Quiet()
        refuse(type(error), str(error), interrupted, later)
        assert re.search(words, later.notes[-1])
        refuse(type(error), str(error), request(inputs, tmp_path / "new"), at_once)
        assert not at_once.notes and not (tmp_path / "new").exists()
