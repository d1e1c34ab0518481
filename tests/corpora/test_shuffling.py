"""Shuffled shards: every document once, validation from all sources, the same after any interruption."""

import io
import json
import random
import shutil
import sys
from collections import Counter

import numpy as np
import pytest
from distgpt.core.base.errors import DataError
from distgpt.corpora.prepare import documents as cutting
from distgpt.corpora.prepare import preparing
from distgpt.corpora.prepare.preparing import Request, prepare
from distgpt.corpora.shards import ShardTokens, read_manifest, verify_shards
from preparing import Quiet, contents, everything, interrupt

from conftest import inside, refused


def request(inputs, out, /, **more):
    given = {"inputs": (inputs,), "tokenizer": "byte", "out": out, "shard_tokens": 3000, "val_fraction": 0.1}
    return Request(**{**given, **more})


def text_of(folder, split):
    tokens = ShardTokens(folder, read_manifest(folder), split)
    return bytes(tokens.read(0, len(tokens)).astype(np.uint8)).decode()


@pytest.fixture
def small(monkeypatch):
    """Small pieces, little read at once, the progress noted after each few."""
    monkeypatch.setattr(cutting, "PIECE", 400)
    monkeypatch.setattr(cutting, "LIMIT", 800)
    monkeypatch.setattr(preparing, "DOCUMENTS_AT_ONCE", 7)
    monkeypatch.setattr(preparing, "AT_ONCE", 40)
    monkeypatch.setattr(preparing, "EVERY", 900)


@pytest.fixture
def mixed(tmp_path):
    """Two kinds of lines, one file each, and their texts."""
    texts = []
    folder = tmp_path / "mixed"
    folder.mkdir()
    for kind in ("a", "b"):
        own = [f"{kind}{number} " * random.Random(number).randrange(1, 20) for number in range(100)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in own)
        (folder / f"{kind}.jsonl").write_text(lines)
        texts += own
    return folder, texts


def test_every_document_is_there_once_in_an_order_of_the_seed_and_some_of_each_kind_validate(mixed, tmp_path, small):
    folder, texts = mixed
    orders = []
    for seed in (0, 0, 1):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        manifest = prepare(request(folder, tmp_path / "out", seed=seed), Quiet())
        val, train = (text_of(tmp_path / "out", split) for split in ("val", "train"))
        for shard in manifest.shards:
            verify_shards(tmp_path / "out", manifest, [shard])
        *whole, cut = val.split("\n")
        rest, *others = train.split("\n")
        assert Counter([*whole, *others]) <= Counter(texts) and len(whole) + len(others) >= 198
        assert sorted("".join([*whole, cut + rest, *others])) == sorted("".join(texts))
        tokens = len("\n".join(texts))
        assert len(val) == int(0.1 * tokens) and tokens - len(val) - len(train) in (0, 1)
        kinds = Counter(text[0] for text in whole)
        assert min(kinds["a"], kinds["b"]) >= 3, kinds
        orders.append(contents(tmp_path / "out"))
        assert manifest.documents == 200 and manifest.settings["seed"] == seed
        assert manifest.sources == tuple((100, sum(len(text) for text in texts if text[0] == kind)) for kind in "ab")
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize("seed", [0, None])
def test_the_order_depends_on_no_size_of_pieces_or_threads(seed, mixed, tmp_path, monkeypatch):
    prepare(request(mixed[0], tmp_path / "whole", seed=seed), Quiet())
    monkeypatch.setattr(preparing, "DOCUMENTS_AT_ONCE", 7)
    monkeypatch.setattr(cutting, "PIECE", 300)
    monkeypatch.setattr(preparing, "EVERY", 99)
    prepare(request(mixed[0], tmp_path / "parts", workers=3, seed=seed), Quiet())
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_a_single_text_stays_in_order_and_long_texts_give_their_beginning_each(tmp_path, small):
    texts = ["".join(f"{kind}{i} " for i in range(3000)) for kind in "xyz"]
    for kind, text in zip("xyz", texts, strict=True):
        (tmp_path / f"{kind}.txt").write_text(text)
    prepare(request(tmp_path / "x.txt", tmp_path / "one", shard_tokens=10**6), Quiet())
    assert text_of(tmp_path / "one", "val") == texts[0][: len(texts[0]) // 10]
    assert text_of(tmp_path / "one", "val") + text_of(tmp_path / "one", "train") == texts[0]
    files = tuple(tmp_path / f"{kind}.txt" for kind in "xyz")
    prepare(request(tmp_path, tmp_path / "all", inputs=files, shard_tokens=10**6), Quiet())
    val, train = (text_of(tmp_path / "all", split).split("\n") for split in ("val", "train"))
    val = {part[0]: part for part in val}
    train = {part.lstrip("0123456789 ")[0]: part for part in train}
    for kind, text in zip("xyz", texts, strict=True):
        assert val[kind] + train[kind] == text
        assert len(val[kind]) == pytest.approx(len(text) / 10, abs=2)


def test_long_and_short_texts_together_are_counted_exactly(tmp_path, small):
    lines = [f"short {number}" * 5 for number in range(300)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    (tmp_path / "b.txt").write_text("long text " * 1000)
    for how in ({"val_fraction": 0.2}, {"val_shards": 2, "shard_tokens": 1000}, {"separator": "none"}):
        out = tmp_path / "out"
        shutil.rmtree(out, ignore_errors=True)
        given = {"shard_tokens": 10**5, **how}
        files = (tmp_path / "a.jsonl", tmp_path / "b.txt")
        manifest = prepare(request(tmp_path, out, inputs=files, **given), Quiet())
        total = sum(map(len, lines)) + 10_000 + (300 if "separator" not in how else 0)
        expected = {"val_fraction": int(0.2 * total), "val_shards": 2000, "separator": int(0.1 * total)}
        assert manifest.tokens("val") == expected[next(iter(how))]
        val = text_of(out, "val")
        assert "long text" in val and "short" in val
        assert manifest.tokens("train") + manifest.tokens("val") - total in (-1, 0, 1)  # separators at cuts


def test_an_interruption_anywhere_changes_nothing(mixed, tmp_path, small):
    watcher, out = Quiet(), tmp_path / "out"
    how = {"tokenizer": "char", "shard_tokens": 2000, "workers": 2}
    prepare(request(mixed[0], tmp_path / "whole", **how), watcher)
    expected = contents(tmp_path / "whole")
    resumed = set()
    for after in range(0, len(watcher.heard) - 3, 9):
        shutil.rmtree(out, ignore_errors=True)
        again, quiet = interrupt(request(mixed[0], out, **how), after), Quiet()
        prepare(again, quiet)
        assert contents(out) == expected
        resumed |= {note for note in quiet.notes if note.startswith("resuming")}
    assert len(resumed) > 2


def test_what_a_killed_process_had_not_noted_is_cut_off_and_what_is_lost_is_noticed(mixed, tmp_path, small):
    out = tmp_path / "out"
    prepare(request(mixed[0], tmp_path / "whole"), Quiet())
    again = interrupt(request(mixed[0], out), 20)
    kept = sorted(out.glob("spool.*"))
    assert kept and "spooled" in (out / "progress.json").read_text()
    for path in kept:
        path.write_bytes(path.read_bytes() + b"unnoted")
    prepare(again, Quiet())
    assert contents(out) == contents(tmp_path / "whole")
    shutil.rmtree(out)
    interrupt(again, 20)
    kept[0].write_bytes(kept[0].read_bytes()[:10])
    with pytest.raises(DataError, match=rf"{kept[0].name} has lost what was written"):
        prepare(again, Quiet())


def test_the_command_shows_the_sources_and_info_does_too(mixed, tmp_path):
    (mixed[0] / "c.txt").write_text("c" * 500)
    words = ("--tokenizer", "byte", "--progress", "plain", "--out")
    result = inside("data", "prepare", mixed[0], *words, tmp_path / "out")
    assert result.returncode == 0, result.stderr
    tokens = 0
    for line in map(json.loads, (mixed[0] / "a.jsonl").read_text().splitlines()):
        tokens += len(line["text"])
    for shown in (result.stdout, inside("data", "info", tmp_path / "out").stdout):
        rows = [line.split() for line in shown.splitlines()]
        assert ["source", "documents", "tokens", "share"] in rows
        assert any(row[:3] == ["a.jsonl", "100", f"{tokens:,}"] for row in rows)
        assert any(row[:3] == ["c.txt", "1", "500"] and row[3].endswith("%") for row in rows)
    facts = json.loads(inside("data", "info", tmp_path / "out", "--json").stdout)
    assert facts["sources"][2] == [1, 500]
    kept = inside("data", "prepare", mixed[0], "--no-shuffle", *words, tmp_path / "kept")
    assert kept.returncode == 0 and text_of(tmp_path / "kept", "val").startswith("a0 a0")
    assert everything(tmp_path / "kept").size == everything(tmp_path / "out").size
    clash = inside("data", "prepare", mixed[0], "--no-shuffle", "--seed", "1", *words, tmp_path / "no")
    assert clash.returncode == 2 and "exclude each other" in clash.stderr


def test_standard_input_is_a_text_or_lines_of_json_or_refused(tmp_path, monkeypatch):
    def piping(data, name, *more):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        return inside("data", "prepare", "-", "--tokenizer", "byte", "--out", tmp_path / name, *more)

    lines = "".join(json.dumps({"text": f"line {number}"}) + "\n" for number in range(50))
    for name, data, documents in (("a", lines.encode(), 50), ("b", b"plain text " * 50, 1)):
        result = piping(data, name)
        assert result.returncode == 0, result.stderr
        manifest = read_manifest(tmp_path / name)
        assert manifest.documents == documents and manifest.inputs[0][0].startswith("stdin.")
    refused(piping(b"a\0b", "c"), 65, "zero bytes")
    result = piping(b'{"text": "' + b"x" * 5000, "c", "--max-document", "1KB")
    assert result.returncode == 65 and "stdin.jsonl, line 1 is longer than 1 KiB" in result.stderr
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    refused(piping(b"text", "c"), 74, "cannot keep standard input in", "none", "No such file")
