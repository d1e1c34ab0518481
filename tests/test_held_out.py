"""The part for validation, where the first piece is a bad sample of all the text."""

import gzip
import random

import pytest

from distgpt.data.prepare.preparing import Request, prepare
from distgpt.data.shards import read_manifest, verify_shard
from tests.test_prepare import Quiet, contents, everything, sizes


def words(count, seed=3):
    return " ".join(random.Random(seed).choices(["harbour", "lay", "still", "tide", "1900"], k=count))


def prepared(inputs, out, interrupt_after=None, **more):
    settings = {"shard_tokens": 10**6, "val_fraction": 0.05, **more}
    watcher = Quiet(interrupt_after)
    prepare(Request(tuple(inputs), "byte", out, **settings), watcher)
    return watcher


def share(out):
    return sum(sizes(out, "val")) / len(everything(out))


def test_a_small_compressed_beginning_does_not_hold_everything_out(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"the same line\n" * 7000))
    (tmp_path / "b.txt").write_text(words(100_000))
    watcher = prepared([tmp_path / "a.txt.gz", tmp_path / "b.txt"], tmp_path / "out")
    assert share(tmp_path / "out") == pytest.approx(0.05, rel=0.05)
    assert not watcher.notes


@pytest.fixture
def misleading(tmp_path):
    """The first of two compressed texts is a thousand times smaller than its text, the second hardly."""
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"the same line\n" * 50_000))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(random.Random(1).randbytes(50_000).hex().encode()))
    return [tmp_path / "a.txt.gz", tmp_path / "b.txt.gz"]


def test_a_misleading_beginning_costs_a_second_pass_and_not_the_training_text(misleading, tmp_path):
    watcher = prepared(misleading, tmp_path / "out", shard_tokens=10**7)
    assert share(tmp_path / "out") == pytest.approx(0.05, abs=1e-5)
    assert watcher.notes == ["too much was held out for validation: starting again with the right part"]
    manifest = read_manifest(tmp_path / "out")
    for shard in manifest.shards:
        verify_shard(tmp_path / "out", manifest, shard)
    assert manifest.documents == 2 and manifest.text_bytes == 800_000


def test_the_second_pass_can_be_interrupted_as_well(misleading, tmp_path):
    how = {"shard_tokens": 170_000, "val_fraction": 0.1}
    whole = prepared(misleading, tmp_path / "whole", **how)
    assert len(whole.notes) == 1 and len(sizes(tmp_path / "whole", "train")) == 5
    pieces = len(whole.heard) - 2  # besides the two beginnings
    for after in range(pieces):
        out = tmp_path / str(after)
        with pytest.raises(KeyboardInterrupt):
            prepared(misleading, out, interrupt_after=after, **how)
        prepared(misleading, out, **how)
        assert contents(out) == contents(tmp_path / "whole")


def test_a_large_text_before_thousands_of_empty_rows(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    writer = pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"text": [words(200_000), *[""] * 300_000, words(2000, 1)]})
    writer.write_table(table, tmp_path / "a.parquet", compression="zstd")
    prepared([tmp_path / "a.parquet"], tmp_path / "out", shard_tokens=10**8)
    assert share(tmp_path / "out") == pytest.approx(0.05, abs=1e-5)


def test_what_was_asked_for_is_no_mistake(tmp_path):
    """No second pass where validation shall be large."""
    (tmp_path / "a.txt").write_text("x" * 1000)
    assert not prepared([tmp_path / "a.txt"], tmp_path / "out", val_fraction=0.9).notes
    assert share(tmp_path / "out") == 0.9
