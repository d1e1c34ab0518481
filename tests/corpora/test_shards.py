"""Token shards: what is written can be read, and whatever is damaged is refused."""

import hashlib
import io
import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from distgpt.core.base.errors import DataError, StorageError
from distgpt.core.data.batches import Batches, windows_of
from distgpt.core.data.tokenizers import fingerprint, load_tokenizer
from distgpt.corpora import shards
from distgpt.corpora.packing import PackedBatches
from distgpt.corpora.shards import (
    Manifest,
    Shard,
    ShardTokens,
    header,
    is_shards,
    read_manifest,
    shards_tokenizer,
    verify_shards,
    write_shard,
)

SIZES = {"val-000000.npy": 5, "train-000000.npy": 7, "train-000001.npy": 7, "train-000002.npy": 2}
IDS = np.arange(100, 100 + sum(SIZES.values()), dtype=np.uint16)
IDS[10:12] = IDS[11:9:-1]  # so that the largest of a shard is not its last


@pytest.fixture
def folder(tmp_path):
    """Shards of the ids above, one after the other."""
    written, start = [], 0
    for name, tokens in SIZES.items():
        split, number = name.removesuffix(".npy").split("-")
        pieces = np.array_split(IDS[start : start + tokens], 3)
        written.append(write_shard(tmp_path, split, int(number), "<u2", tokens, pieces))
        start += tokens
    tokenizer = load_tokenizer("byte", "")
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    manifest = Manifest(
        tokenizer=fingerprint(tokenizer),
        description="byte, 256 entries",
        vocab_size=256,
        dtype="<u2",
        shards=tuple(written),
        separator=(10,),
        settings={"shard_tokens": 7},
        inputs=(("a.txt", 21),),
        documents=1,
        text_bytes=21,
        replaced=0,
        sources=((1, 21),),
    )
    (tmp_path / "manifest.json").write_text(manifest.to_json())
    return tmp_path


def with_shard(manifest, **changes):
    """The manifest with something else about its second shard."""
    first, second, *others = manifest.shards
    return replace(manifest, shards=(first, replace(second, **changes), *others))


def test_a_shard_is_what_numpy_would_have_saved_once_it_is_finished(tmp_path):
    path = tmp_path / "train-000003.npy"
    for dtype, count in itertools.product(["<u2", "<u4"], [1, 1000, 100_000]):
        ids = np.random.default_rng(1).integers(0, 50257, count).astype(dtype)
        shard = write_shard(tmp_path, "train", 3, dtype, count, np.array_split(ids, 2))
        whole = io.BytesIO()
        np.save(whole, ids)
        data = path.read_bytes()
        assert data == whole.getvalue(), (dtype, count)
        sha256 = hashlib.sha256(data).hexdigest()
        assert shard == Shard(path.name, "train", count, len(data), sha256, int(ids.max()))
        assert [path.name for path in tmp_path.iterdir()] == [path.name]
    assert {len(header("<u4", tokens)) for tokens in (0, 1, 10**12)} == {128}


def test_reading_crosses_borders_with_few_files_open(folder, monkeypatch):
    monkeypatch.setattr(shards, "MOST_OPEN", 2)
    manifest = read_manifest(folder)
    tokens = ShardTokens(folder, manifest, "train")
    expected = IDS[5:]
    assert len(tokens) == 16
    for start, stop in itertools.combinations_with_replacement(range(17), 2):
        found = tokens.read(start, stop)
        assert found.dtype == np.uint16 and found.tolist() == expected[start:stop].tolist(), (start, stop)
    opened = [path.resolve() for path in Path("/proc/self/fd").iterdir()]
    assert sum(path.parent == folder.resolve() for path in opened) == 2
    only_train = replace(manifest, shards=tuple(manifest.of("train")))
    empty = ShardTokens(folder, only_train, "val")
    assert len(empty) == 0 and empty.read(0, 0).tolist() == []


def test_the_manifest_comes_back(folder):
    manifest = read_manifest(folder)
    assert Manifest.from_json(manifest.to_json(), "x") == manifest
    assert (manifest.tokens("val"), manifest.tokens("train")) == (5, 16)
    assert [shard.name for shard in manifest.shards] == list(SIZES)
    assert is_shards(folder) and not is_shards(folder / "manifest.json")
    assert shards_tokenizer(folder, manifest).kind == "byte"


def test_a_manifest_of_the_first_version_is_read(folder):
    document = json.loads((folder / "manifest.json").read_text())
    del document["sources"]
    old = Manifest.from_json(json.dumps({**document, "version": 1}), "x")
    assert old == replace(read_manifest(folder), sources=())
    assert Manifest.from_json(old.to_json(), "x") == old


def test_a_shard_that_is_cut_short_while_it_is_read_is_named(folder):
    """A memory map would end the process with SIGBUS."""
    tokens = ShardTokens(folder, read_manifest(folder), "train")
    assert tokens.read(0, 3).tolist() == IDS[5:8].tolist()
    (path := folder / "train-000000.npy").write_bytes(path.read_bytes()[:134])
    assert tokens.read(0, 3).tolist() == IDS[5:8].tolist()
    with pytest.raises(DataError, match=r"train-000000\.npy has been cut short"):
        tokens.read(2, 9)


def test_an_id_beyond_the_vocabulary_is_named_whenever_it_is_read(folder):
    """Models index memory by ids: each read looks at them, also long after the shards were verified."""
    manifest = read_manifest(folder)
    verify_shards(folder, manifest, manifest.shards)
    tokens = ShardTokens(folder, manifest, "train")
    batches = Batches(tokens, seq_len=4, batch_size=4, seed=1)
    packed = PackedBatches(tokens, seq_len=4, batch_size=4, seed=1, separator=105)
    x, y = np.empty((4, 4), np.int32), np.empty((4, 4), np.int32)
    batches.fill(0, slice(None), x, y)
    overwritten = np.array([110, 255, 256, 60_000], "<u2")  # 255 is the last entry of this vocabulary
    with (folder / "train-000001.npy").open("r+b") as file:
        file.seek(128 + 2 * 2)
        file.write(overwritten.tobytes())
    assert tokens.read(9, 11).tolist() == [110, 255]
    with pytest.raises(DataError, match=r"train-000001\.npy has the token 256.* ends at 255 .*position 4\)"):
        tokens.read(4, 12)
    for each in (batches, packed):
        with pytest.raises(DataError, match=r"train-000001\.npy has the token 60000.*position 5\)"):
            for step in range(4):
                each.fill(step, slice(None), x, y)
    with pytest.raises(DataError, match="position 5"):
        windows_of(tokens, 16)


def test_fingerprints_tell_contents_apart(folder):
    manifest = read_manifest(folder)
    prints = {ShardTokens(folder, manifest, split).fingerprint for split in ("val", "train")}
    prints.add(manifest.fingerprint())
    other = with_shard(manifest, sha256="0" * 64)
    of_others = replace(manifest, tokenizer="0" * 64)
    prints |= {other.fingerprint(), of_others.fingerprint()}
    assert len(prints) == 5
    assert other.fingerprint(("val",)) == manifest.fingerprint(("val",))
    assert read_manifest(folder).fingerprint() == manifest.fingerprint()


def refuse_second_shard(folder, manifest, message, opening=True):
    """Verifying names it and says this; so does opening the split, unless only reading all of it can tell."""
    acts = [lambda: verify_shards(folder, manifest, manifest.shards[1:2])]
    acts += [lambda: ShardTokens(folder, manifest, "train")] * opening
    for act in acts:
        with pytest.raises((DataError, StorageError), match=rf"train-000000\.npy.*{message}"):
            act()


def test_a_damaged_or_missing_shard_is_refused_by_name(folder):
    manifest = read_manifest(folder)
    path = folder / "train-000000.npy"
    before = path.read_bytes()
    path.write_bytes(before[:-3] + bytes([before[-3] ^ 1]) + before[-2:])
    refuse_second_shard(folder, manifest, "SHA-256", opening=False)
    for data, message in (
        (before[:-1], "141 bytes, in the manifest 142"),
        (before + b"\0", "143 bytes"),
        (b"", "0 bytes"),
        (before.replace(b"<u2", b">u2"), "header"),
        (before.replace(b"<u2", b"|O8"), "header"),
        (before.replace(b"False", b"True "), "header"),
        (before.replace(b"(7,)", b"(8,)"), "header"),
        (before.replace(b"\x01\x00v", b"\x02\x00v"), "header"),
    ):
        assert data != before
        path.write_bytes(data)
        refuse_second_shard(folder, manifest, message)
    path.unlink()
    refuse_second_shard(folder, manifest, "is missing")
    path.mkdir()
    refuse_second_shard(folder, manifest, "")


def test_a_manifest_that_is_wrong_about_a_shard_is_refused_and_costs_nothing(folder, monkeypatch):
    monkeypatch.setattr(shards, "_READ_BYTES", 4)  # the largest id is not in the last piece read
    manifest = read_manifest(folder)
    for wrong, message, opening in (
        (with_shard(manifest, tokens=10**13, bytes=2 * 10**13 + 128), "142 bytes", True),  # terabytes
        (with_shard(manifest, largest=12), "largest token is 111, in the manifest it is 12", False),
        (replace(manifest, vocab_size=111), "the token 111, but the vocabulary ends at 110", False),
    ):
        refuse_second_shard(folder, wrong, message, opening)


def test_another_tokenizer_beside_the_shards_is_refused(folder):
    manifest = read_manifest(folder)
    (folder / "tokenizer.json").write_text(load_tokenizer("char", "ab").to_json())
    with pytest.raises(DataError, match="not the tokenizer that the shards"):
        shards_tokenizer(folder, manifest)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(StorageError, match="No such file"):
        shards_tokenizer(folder, manifest)


# What is changed in a manifest ("second" in its second shard), and words of the refusal.
SENSELESS = (
    ({"format": "x"}, "no manifest of shards: its format"),
    ({"version": 3}, "version 3, this distgpt reads up to 2"),
    ({"sources": [[1, 2], [3, 4]]}, "sources"),
    *(({"vocab_size": wrong}, "vocab_size") for wrong in (0, True)),
    *(({"dtype": "<u4"}, "dtype"), ({"vocab_size": 70000}, "dtype")),
    *(({name: wrong}, name) for name, wrong in (("separator", [256]), ("settings", {"a": []}))),
    ({"shards": []}, "list of shards"),
    *(({"second": {"name": wrong}}, "name of a shard") for wrong in ("../../etc/passwd", "train-1.npy")),
    ({"second": {"name": "train-000001.npy"}}, "numbered"),
    ({"second": {"tokens": 8}}, "so many bytes"),
    ({"second": {"sha256": "0" * 63}}, "SHA-256"),
    ({"second": {"largest": 256}}, "impossible id"),
)


def test_what_is_no_manifest_or_makes_no_sense_is_refused(folder):
    path = folder / "manifest.json"
    good = json.loads(path.read_text())
    first, second, *others = good["shards"]
    wrong = [(text, "no manifest") for text in (b"", b"{", b"\xff", b"[" * 100_000, b"[]", b"null")]
    for changes, message in SENSELESS:
        listed = [first, second | changes.get("second", {}), *others]
        rest = {name: value for name, value in changes.items() if name != "second"}
        wrong.append((json.dumps(good | {"shards": listed} | rest).encode(), message))
    backwards, shorter = good["shards"][::-1], [first, *others]
    wrong += [(json.dumps(good | {"shards": s}).encode(), "numbered") for s in (backwards, shorter)]
    for data, message in wrong:
        path.write_bytes(data)
        with pytest.raises(DataError, match=message) as refusal:
            read_manifest(folder)
        assert str(refusal.value).startswith(str(path)) and "\n" not in str(refusal.value), message
