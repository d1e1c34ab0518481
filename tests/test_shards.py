"""Token shards: what is written can be read, and whatever is damaged is refused."""

import dataclasses
import hashlib
import io
import json

import numpy as np
import pytest

from distgpt.data import shards
from distgpt.data.shards import (
    Manifest,
    Shard,
    ShardTokens,
    ShardWriter,
    header,
    is_shards,
    read_manifest,
    shards_tokenizer,
    strangers,
    verify_shard,
)
from distgpt.data.tokenizers.naming import build_tokenizer, fingerprint
from distgpt.errors import DataError, StorageError

SIZES = {"val-000000.npy": 5, "train-000000.npy": 7, "train-000001.npy": 7, "train-000002.npy": 2}
IDS = np.arange(100, 100 + sum(SIZES.values()), dtype=np.uint16)
IDS[10:12] = IDS[11:9:-1]  # so that the largest of a shard is not its last


@pytest.fixture
def folder(tmp_path):
    """Shards of the ids above, one after the other."""
    written, start = [], 0
    for name, tokens in SIZES.items():
        writer = ShardWriter(tmp_path / name, "<u2")
        for piece in np.array_split(IDS[start : start + tokens], 3):
            writer.write(piece)
        written.append(writer.finish(name.split("-")[0]))
        start += tokens
    tokenizer = build_tokenizer("byte", "")
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
    )
    (tmp_path / "manifest.json").write_text(manifest.to_json())
    return tmp_path


def with_shard(manifest, **changes):
    """The manifest with another word about its second shard."""
    shards = list(manifest.shards)
    shards[1] = dataclasses.replace(shards[1], **changes)
    return dataclasses.replace(manifest, shards=tuple(shards))


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
@pytest.mark.parametrize("count", [1, 1000, 100_000])
def test_a_shard_is_what_numpy_would_have_saved(tmp_path, dtype, count):
    ids = np.random.default_rng(1).integers(0, 50257, count).astype(dtype)
    writer = ShardWriter(tmp_path / "a.npy", dtype)
    writer.write(ids[: count // 2])
    writer.write(ids[count // 2 :])
    shard = writer.finish("train")
    saved = io.BytesIO()
    np.save(saved, ids)
    data = (tmp_path / "a.npy").read_bytes()
    assert data == saved.getvalue()
    assert shard == Shard(
        "a.npy", "train", count, len(data), hashlib.sha256(data).hexdigest(), int(ids.max())
    )
    assert [path.name for path in tmp_path.iterdir()] == ["a.npy"]


def test_a_header_has_the_same_length_for_any_number_of_ids():
    for tokens in (0, 1, 10**12):
        assert len(header("<u4", tokens)) == 128


def test_a_shard_appears_only_when_it_is_finished(tmp_path):
    writer = ShardWriter(tmp_path / "a.npy", "<u2")
    writer.write(IDS)
    assert [path.name for path in tmp_path.iterdir()] == [".a.npy.tmp"]
    writer.discard()
    assert not list(tmp_path.iterdir())


def test_reading_goes_across_borders(folder):
    tokens = ShardTokens(folder, read_manifest(folder), "train")
    expected = IDS[5:]
    assert len(tokens) == 16
    for start in range(17):
        for stop in range(start, 17):
            found = tokens.read(start, stop)
            assert found.dtype == np.uint16 and found.tolist() == expected[start:stop].tolist()


def test_within_a_shard_reading_copies_nothing(folder):
    tokens = ShardTokens(folder, read_manifest(folder), "train")
    assert np.shares_memory(tokens.read(8, 10), tokens.read(7, 14))
    assert not tokens.read(8, 10).flags.writeable


def test_a_split_that_is_not_there_is_empty(folder):
    manifest = read_manifest(folder)
    only_train = dataclasses.replace(manifest, shards=tuple(manifest.of("train")))
    tokens = ShardTokens(folder, only_train, "val")
    assert len(tokens) == 0 and tokens.read(0, 0).tolist() == []


def test_the_manifest_comes_back(folder):
    manifest = read_manifest(folder)
    assert Manifest.from_json(manifest.to_json(), "x") == manifest
    assert (manifest.tokens("val"), manifest.tokens("train")) == (5, 16)
    assert [shard.name for shard in manifest.shards] == list(SIZES)
    assert is_shards(folder) and not is_shards(folder / "manifest.json")
    assert shards_tokenizer(folder, manifest).kind == "byte"


def test_fingerprints_tell_contents_apart(folder):
    manifest = read_manifest(folder)
    prints = {manifest.fingerprint, *(ShardTokens(folder, manifest, s).fingerprint for s in ("val", "train"))}
    other = with_shard(manifest, sha256="0" * 64)
    of_others = dataclasses.replace(manifest, tokenizer="0" * 64)
    prints |= {other.fingerprint, of_others.fingerprint}
    assert len(prints) == 5
    assert other.fingerprint_of(("val",)) == manifest.fingerprint_of(("val",))
    assert read_manifest(folder).fingerprint == manifest.fingerprint


def test_intact_shards_pass(folder):
    manifest = read_manifest(folder)
    heard = []
    for shard in manifest.shards:
        verify_shard(folder, manifest, shard, heard.append)
    assert sum(heard) == 2 * len(IDS)
    assert not strangers(folder, manifest)
    (folder / "train-000003.npy").touch()
    assert strangers(folder, manifest) == ["train-000003.npy"]


def flipped(data):
    return data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]


def other_header(old, new):
    return lambda data: data.replace(old, new)


@pytest.mark.parametrize(
    ("damage", "message", "when"),
    [
        (flipped, "SHA-256", "verifying"),
        (lambda data: data[:-1], "141 bytes, in the manifest 142", "opening"),
        (lambda data: data + b"\0", "143 bytes", "opening"),
        (lambda data: b"", "0 bytes", "opening"),
        (other_header(b"<u2", b">u2"), "header", "opening"),
        (other_header(b"<u2", b"|O8"), "header", "opening"),
        (other_header(b"False", b"True "), "header", "opening"),
        (other_header(b"(7,)", b"(8,)"), "header", "opening"),
        (other_header(b"\x01\x00v", b"\x02\x00v"), "header", "opening"),
    ],
)
def test_a_damaged_shard_is_refused_by_name(folder, damage, message, when):
    manifest = read_manifest(folder)
    path = folder / "train-000000.npy"
    before = path.read_bytes()
    path.write_bytes(damage(before))
    assert path.read_bytes() != before
    with pytest.raises(DataError, match=rf"train-000000\.npy.*{message}"):
        verify_shard(folder, manifest, manifest.shards[1])
    if when == "opening":
        with pytest.raises(DataError, match=rf"train-000000\.npy.*{message}"):
            ShardTokens(folder, manifest, "train")


def test_a_missing_shard_is_refused_by_name(folder):
    manifest = read_manifest(folder)
    (folder / "train-000001.npy").unlink()
    with pytest.raises(DataError, match=r"train-000001\.npy is missing"):
        ShardTokens(folder, manifest, "train")
    with pytest.raises(DataError, match=r"train-000001\.npy is missing"):
        verify_shard(folder, manifest, manifest.shards[2])
    (folder / "train-000001.npy").mkdir()
    with pytest.raises((DataError, StorageError), match=r"train-000001\.npy"):
        verify_shard(folder, manifest, manifest.shards[2])


def test_ids_that_the_manifest_hides_are_found(folder, monkeypatch):
    monkeypatch.setattr(shards, "_PIECE", 4)  # the largest id is not in the last piece read
    manifest = read_manifest(folder)
    with pytest.raises(DataError, match="largest token is 111, in the manifest it is 12"):
        lying = with_shard(manifest, largest=12)
        verify_shard(folder, lying, lying.shards[1])
    small = dataclasses.replace(manifest, vocab_size=111)
    with pytest.raises(DataError, match="has the token 111, but the vocabulary ends at 110"):
        verify_shard(folder, small, small.shards[1])


def test_a_manifest_that_claims_terabytes_costs_nothing(folder):
    manifest = with_shard(read_manifest(folder), tokens=10**13, bytes=2 * 10**13 + 128)
    for attempt in (
        lambda: ShardTokens(folder, manifest, "train"),
        lambda: verify_shard(folder, manifest, manifest.shards[1]),
    ):
        with pytest.raises(DataError, match="142 bytes"):
            attempt()


def test_another_tokenizer_beside_the_shards_is_refused(folder):
    manifest = read_manifest(folder)
    (folder / "tokenizer.json").write_text(build_tokenizer("char", "ab").to_json())
    with pytest.raises(DataError, match="not the tokenizer that the shards"):
        shards_tokenizer(folder, manifest)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(StorageError, match="No such file"):
        shards_tokenizer(folder, manifest)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(format="x"), "format"),
        (lambda m: m.update(version=2), "version 2, this distgpt reads 1"),
        (lambda m: m.pop("inputs"), "lacks.*inputs"),
        (lambda m: m.update(more=1), "should not have.*more"),
        (lambda m: m.update(tokenizer=None), "fingerprint"),
        (lambda m: m.update(vocab_size=0), "vocab_size"),
        (lambda m: m.update(vocab_size=True), "vocab_size"),
        (lambda m: m.update(vocab_size=70000), "dtype"),
        (lambda m: m.update(dtype="<u4"), "dtype"),
        (lambda m: m.update(separator=[256]), "separator"),
        (lambda m: m.update(settings=[]), "settings"),
        (lambda m: m.update(inputs=[["a"]]), "inputs"),
        (lambda m: m.update(documents=-1), "documents"),
        (lambda m: m.update(shards=None), "list"),
        (lambda m: m.update(shards=[3]), "no object"),
        (lambda m: m["shards"][1].update(name="../../etc/passwd"), "numbered"),
        (lambda m: m["shards"][1].update(name=["x"]), "split"),
        (lambda m: m["shards"][1].update(split="test"), "split"),
        (lambda m: m["shards"].reverse(), "numbered"),
        (lambda m: m["shards"].pop(1), "numbered"),
        (lambda m: m["shards"][1].update(tokens=0), "number of tokens"),
        (lambda m: m["shards"][1].update(tokens=8), "so many bytes"),
        (lambda m: m["shards"][1].update(bytes=7.0), "so many bytes"),
        (lambda m: m["shards"][1].update(sha256="0" * 63), "SHA-256"),
        (lambda m: m["shards"][1].update(largest=256), "impossible id"),
        (lambda m: m["shards"][1].pop("largest"), "lacks.*largest"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(folder, change, message):
    document = json.loads((folder / "manifest.json").read_text())
    change(document)
    (folder / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(DataError, match=message) as refusal:
        read_manifest(folder)
    assert str(refusal.value).startswith(str(folder / "manifest.json"))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"[" * 100_000, b"[]", b"null"])
def test_what_is_no_manifest_is_refused(folder, text):
    (folder / "manifest.json").write_bytes(text)
    with pytest.raises(DataError, match="no manifest"):
        read_manifest(folder)
