import gzip
import hashlib
import io
import itertools
import json
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from complaints import complains, done
from distgpt.core.base.errors import DataError, StorageError
from distgpt.core.comm.api import SerialComm
from distgpt.core.data.batches import Batches, windows_of
from distgpt.core.data.loading import DataRequest, load_corpus
from distgpt.core.data.tokenizers import fingerprint, load_tokenizer
from distgpt.corpora import shards
from distgpt.corpora.packing import PackedBatches
from distgpt.corpora.prepare import tokenized
from distgpt.corpora.prepare.preparing import prepare, reserved
from distgpt.corpora.shards import Manifest, Shard, ShardTokens, header, is_shards, read_manifest, shards_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from preparing import Quiet, everything, inputs, json_lines, request  # noqa: F401
from threadranks import on_all_ranks
from tokenizing import small, whole

from conftest import SMALL, distgpt, inside, losses, needs_mpi, refused

SIZES = {"val-000000.npy": 5, "train-000000.npy": 7, "train-000001.npy": 7, "train-000002.npy": 2}
IDS = np.arange(100, 100 + sum(SIZES.values()), dtype=np.uint16)
IDS[10:12] = IDS[11:9:-1]  # a shard's largest ID is not its last


@pytest.fixture
def folder(tmp_path):
    """Write the IDs above as consecutive shards."""
    written, start = [], 0
    for name, tokens in SIZES.items():
        split, number = name.removesuffix(".npy").split("-")
        pieces = np.array_split(IDS[start : start + tokens], 3)
        written.append(shards.write_shard(tmp_path, split, int(number), "<u2", tokens, pieces))
        start += tokens
    tokenizer = load_tokenizer("byte", "")
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    about = {"tokenizer": fingerprint(tokenizer), "description": "byte, 256 entries", "vocab_size": 256, "dtype": "<u2"}
    about |= {"separator": (10,), "settings": {"shard_tokens": 7}, "inputs": (("a.txt", 21),), "documents": 1}
    about |= {"shards": tuple(written), "text_bytes": 21, "replaced": 0, "sources": ((1, 21),)}
    (tmp_path / "manifest.json").write_text(Manifest(**about).to_json())
    return tmp_path


def with_shard(manifest, **changes):
    first, second, *others = manifest.shards
    return replace(manifest, shards=(first, replace(second, **changes), *others))


@given(st.sampled_from(["<u2", "<u4"]), st.integers(1, 100_000))
def test_shard_equals_numpy_file(dtype, count):
    ids = np.random.default_rng(1).integers(0, 50257, count).astype(dtype)
    with tempfile.TemporaryDirectory() as name:
        shard = shards.write_shard(Path(name), "train", 3, dtype, count, np.array_split(ids, 2))
        (path,) = Path(name).iterdir()
        data = path.read_bytes()
    np.save(saved := io.BytesIO(), ids)
    assert data == saved.getvalue() and len(header(dtype, 10**12)) == 128
    sha256 = hashlib.sha256(data).hexdigest()
    assert shard == Shard("train-000003.npy", "train", count, len(data), sha256, int(ids.max()))


def test_reading_crosses_shards_with_few_open_files(folder, monkeypatch):
    monkeypatch.setattr(shards, "MOST_OPEN", 2)
    manifest = read_manifest(folder)
    tokens = ShardTokens(folder, manifest, "train")
    assert len(tokens) == 16
    for start, stop in itertools.combinations_with_replacement(range(17), 2):
        found = tokens.read(start, stop)
        assert found.dtype == np.uint16 and found.tolist() == IDS[5:][start:stop].tolist(), (start, stop)
    opened = [path.resolve() for path in Path("/proc/self/fd").iterdir()]
    assert sum(path.parent == folder.resolve() for path in opened) == 2
    empty = ShardTokens(folder, replace(manifest, shards=tuple(manifest.of("train"))), "val")
    assert len(empty) == 0 and empty.read(0, 0).tolist() == []


def test_manifest_round_trips_and_reads_version_1(folder):
    manifest = read_manifest(folder)
    assert Manifest.from_json(manifest.to_json(), "x") == manifest
    assert (manifest.tokens("val"), manifest.tokens("train")) == (5, 16)
    assert [shard.name for shard in manifest.shards] == list(SIZES)
    assert is_shards(folder) and not is_shards(folder / "manifest.json")
    assert shards_tokenizer(folder, manifest).kind == "byte"
    document = json.loads((folder / "manifest.json").read_text())
    del document["sources"]
    old = Manifest.from_json(json.dumps({**document, "version": 1}), "x")
    assert old == replace(manifest, sources=()) and Manifest.from_json(old.to_json(), "x") == old


def test_shard_truncated_while_reading_is_named(folder):
    """A memory map would end the process with SIGBUS."""
    tokens = ShardTokens(folder, read_manifest(folder), "train")
    assert tokens.read(0, 3).tolist() == IDS[5:8].tolist()
    (path := folder / "train-000000.npy").write_bytes(path.read_bytes()[:134])
    assert tokens.read(0, 3).tolist() == IDS[5:8].tolist()
    with complains("train-000000.npy", "truncated"):
        tokens.read(2, 9)


def test_id_beyond_vocabulary_is_named_on_read(folder):
    """Models index memory by ID, so every read checks the IDs, even after verification."""
    manifest = read_manifest(folder)
    shards.verify_shards(folder, manifest, manifest.shards)
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


def test_fingerprints_distinguish_contents(folder):
    manifest = read_manifest(folder)
    prints = {ShardTokens(folder, manifest, split).fingerprint for split in ("val", "train")}
    prints.add(manifest.fingerprint())
    other = with_shard(manifest, sha256="0" * 64)
    of_others = replace(manifest, tokenizer="0" * 64)
    prints |= {other.fingerprint(), of_others.fingerprint()}
    assert len(prints) == 5 and other.fingerprint(("val",)) == manifest.fingerprint(("val",))
    assert read_manifest(folder).fingerprint() == manifest.fingerprint()


def refuse_second_shard(folder, manifest, message, opening=True):
    """Verifying rejects the shard with this message; `opening`: opening the split also does."""
    acts = [lambda: shards.verify_shards(folder, manifest, manifest.shards[1:2])]
    acts += [lambda: ShardTokens(folder, manifest, "train")] * opening
    for act in acts:
        with pytest.raises((DataError, StorageError), match=rf"train-000000\.npy.*{message}"):
            act()


def test_corrupt_or_missing_shard_is_named(folder):
    manifest, path = read_manifest(folder), folder / "train-000000.npy"
    before = path.read_bytes()
    path.write_bytes(before[:-3] + bytes([before[-3] ^ 1]) + before[-2:])
    refuse_second_shard(folder, manifest, "SHA-256", opening=False)
    for data, message in (
        (before[:-1], "141 bytes, but 142 in the manifest"),
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


def test_wrong_manifest_is_rejected_cheaply(folder, monkeypatch):
    monkeypatch.setattr(shards, "READ_BYTES", 4)  # the largest id is not in the last piece read
    manifest = read_manifest(folder)
    for wrong, message, opening in (
        (with_shard(manifest, tokens=10**13, bytes=2 * 10**13 + 128), "142 bytes", True),  # terabytes
        (with_shard(manifest, largest=12), "largest token is 111, but 12 in the manifest", False),
        (replace(manifest, vocab_size=111), "the token 111, but the vocabulary ends at 110", False),
    ):
        refuse_second_shard(folder, wrong, message, opening)
    (folder / "tokenizer.json").write_text(load_tokenizer("char", "ab").to_json())
    with complains("not the tokenizer of these shards"):
        shards_tokenizer(folder, manifest)
    (folder / "tokenizer.json").unlink()
    with complains("No such file", kind=StorageError):
        shards_tokenizer(folder, manifest)


# Changes of a manifest ("second" changes its second shard), and words of the error.
SENSELESS = (
    ({"format": "x"}, "not a manifest of shards: the format"),
    ({"version": 3}, "version 3"),
    ({"sources": [[1, 2], [3, 4]]}, "sources"),
    *(({"vocab_size": wrong}, "vocab_size") for wrong in (0, True)),
    *(({"dtype": "<u4"}, "dtype"), ({"vocab_size": 70000}, "dtype")),
    *(({name: wrong}, name) for name, wrong in (("separator", [256]), ("settings", {"a": []}))),
    ({"shards": []}, "list of shards"),
    *(({"second": {"name": wrong}}, "name of a shard") for wrong in ("../../etc/passwd", "train-1.npy")),
    ({"second": {"name": "train-000001.npy"}}, "numbered"),
    ({"second": {"tokens": 8}}, "wrong number of bytes"),
    ({"second": {"sha256": "0" * 63}}, "SHA-256"),
    ({"second": {"largest": 256}}, "ID outside the vocabulary"),
)


def test_invalid_manifest_is_rejected(folder):
    path = folder / "manifest.json"
    good = json.loads(path.read_text())
    first, second, *others = good["shards"]
    wrong = [(text, "not a manifest") for text in (b"", b"{", b"\xff", b"[" * 100_000, b"[]", b"null")]
    for changes, message in SENSELESS:
        listed = [first, second | changes.get("second", {}), *others]
        rest = {name: value for name, value in changes.items() if name != "second"}
        wrong.append((json.dumps(good | {"shards": listed} | rest).encode(), message))
    backwards, shorter = good["shards"][::-1], [first, *others]
    wrong += [(json.dumps(good | {"shards": s}).encode(), "numbered") for s in (backwards, shorter)]
    for data, message in wrong:
        path.write_bytes(data)
        with complains(path, message):
            read_manifest(folder)


SHAPE = [word for word in SMALL if word not in ("--data", "story", "--tokenizer", "word")]
MODEL = [*SHAPE, "--steps", "4"]


def prepared(text, out, *args):
    done("data", "prepare", "--tokenizer", "byte", "--workers", "1", text, "--out", out, *args)


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """Prepare eight training shards, the last one short, and a validation shard."""
    folder = tmp_path_factory.mktemp("shards")
    text, out = folder / "text.txt", folder / "shards"
    text.write_text("".join(f"line {i} says {i * i}.\n" for i in range(400)))
    prepared(text, out, "--shard-tokens", "1000", "--val-shards", "1")
    return out


@pytest.fixture
def copy(lines, tmp_path):
    return shutil.copytree(lines, tmp_path / "shards")


def cut(path):
    path.write_bytes(path.read_bytes()[:-2])


@pytest.mark.ranks
@pytest.mark.slow
@needs_mpi
def test_ranks_on_shards_match_one_process(lines, copy, tmp_path):
    cut(copy / "train-000002.npy")
    args = ["train", *MODEL, "--eval-every", "2", "--val-tokens", "200", "--data"]
    printed = done(*args, lines, "--out", tmp_path / "one")
    mpi = ["--stage", "mpi", "--out"]
    two = distgpt(*args, lines, *mpi, tmp_path / "two", ranks=2)
    assert two.returncode == 0, two.stderr
    refused(distgpt(*args, copy, *mpi, tmp_path / "no", ranks=2), 65, "train-000002.npy")
    assert not (tmp_path / "no").exists()
    logged = {}
    for name in ("one", "two"):
        found = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        logged[name] = [
            {k: value for k, value in line.items() if k[-2:] != "_s" and k not in ("slowest_rank", "time")}
            for line in found
        ]
    assert len(logged["one"]) == len(logged["two"]) == 7
    for one, two in zip(logged["one"], logged["two"], strict=True):
        assert two == pytest.approx(one, rel=1e-4)
    assert "9 shards" in printed and "for validation" in printed


OTHER = '{"format": "distgpt-tokenizer", "version": 1, "kind": "char", "vocabulary": ["a", "b"]}'
DAMAGES = {
    "train-000002.npy": cut,
    "train-000000.npy": lambda path: shutil.copy(path.with_name("train-000001.npy"), path),
    "manifest.json": cut,
    "train-000004.npy": lambda path: path.unlink(),
    "tokenizer.json": lambda path: path.write_text(OTHER),
}


@pytest.mark.parametrize("named", DAMAGES)
def test_damage_is_found_before_first_step(copy, tmp_path, named):
    DAMAGES[named](copy / named)
    refused(inside("train", "--data", copy, *MODEL, "--out", tmp_path / "run"), 65, copy / named)
    assert not (tmp_path / "run").exists()
    for error in on_all_ranks(2, lambda comm: load_corpus(comm, DataRequest(str(copy)))):
        assert isinstance(error, DataError) and str(copy / named) in str(error)


def test_impossible_id_ends_training(copy, tmp_path):
    for number in (0, 1, 2, 3):
        with (copy / f"train-{number:06d}.npy").open("r+b") as file:
            file.seek(128 + 2 * 50)
            file.write(np.full(900, 256, "<u2").tobytes())
    args = ["train", "--set", "verify_data=false", "--data", copy, *MODEL, "--steps", "40", "--out", tmp_path / "run"]
    refused(inside(*args), 65, f"{copy / 'train-00000'}", "has the token 256", "at position")
    refused(inside("data", "info", "--no-verify", copy), 65, "train-000000.npy", "position 50")


def test_only_requested_splits_are_read(copy):
    def loaded(**more):
        return load_corpus(SerialComm(), DataRequest(str(copy), splits=("val",), **more))

    cut(copy / "train-000002.npy")
    corpus = loaded()
    assert len(corpus.val) == 1000 and corpus.train is corpus.val
    shutil.copy(copy / "train-000000.npy", copy / "val-000000.npy")
    with complains("val-000000.npy"):
        loaded()
    assert len(loaded(verify=False).val) == 1000  # verify_data = false


def test_other_tokenizers_and_directories_are_rejected(lines, tmp_path):
    (tmp_path / "abc.txt").write_text("abcabc" * 50)
    done("train", "--data", tmp_path / "abc.txt", "--tokenizer", "char", *MODEL, "--out", tmp_path / "chars")
    weights, out = tmp_path / "chars" / "weights.safetensors", ["--out", tmp_path / "run"]
    for asked in (["--init", weights], ["--tokenizer", "gpt2"], ["--tokenizer", "word"]):
        refused(inside("train", "--data", lines, *asked, *out), 65, "byte")
    refused(inside("eval", "--weights", weights, "--val", lines), 65, "byte")
    refused(inside("train", "--data", weights.parent / "checkpoints", *out), 65, "has no files that end in")


def test_changed_corpus_does_not_resume(copy, tmp_path):
    args = ["train", *MODEL, "--out", tmp_path / "run", "--data", copy]
    done(*args, "--save-every", "2")
    before = losses(tmp_path / "run")
    shutil.rmtree(copy)
    (tmp_path / "other.txt").write_text("something else\n" * 300)
    prepared(tmp_path / "other.txt", copy, "--shard-tokens", "1000")
    refused(inside(*args, "--steps", "9", "--resume", "auto"), 65, "changed")
    assert losses(tmp_path / "run") == before


def loaded(asked, ranks=1):
    said = []
    return on_all_ranks(ranks, lambda comm: load_corpus(comm, asked, said.append)), said


@pytest.fixture
def asked(inputs, tmp_path):
    return DataRequest(str(shutil.copytree(inputs[0], tmp_path / "inputs")), kept=tmp_path / "tokenized")


def test_run_waits_for_another_tokenizing_run(asked, tmp_path, monkeypatch):
    corpus = load_corpus(SerialComm(), asked)
    [folder] = (tmp_path / "tokenized").iterdir()
    shutil.rmtree(folder)
    other = reserved(folder, print)
    other.__enter__()
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            other.__exit__(None, None, None)

    monkeypatch.setattr(tokenized.time, "sleep", sleep)
    [again], said = loaded(asked)
    assert len(waits) == 3 and sum("waiting for it" in line for line in said) == 1
    assert np.array_equal(whole(again.train), whole(corpus.train))


def test_directory_is_tokenized_once_like_prepare(asked, inputs, tmp_path):
    prepare(request(inputs, tmp_path / "own", shard_tokens=10**8, val_fraction=0.1, seed=0), Quiet())
    asked = replace(asked, val_fraction=0.1)
    corpora, said = loaded(asked, ranks=2)
    for corpus in corpora:
        both = np.concatenate([whole(corpus.val), whole(corpus.train)])
        assert both.tolist() == everything(tmp_path / "own").tolist()
        assert corpus.tokenizer.kind == "byte" and corpus.separator is None
    assert any("tokenizing" in line for line in said)
    again, said = loaded(asked)
    assert again[0].train.fingerprint == corpora[0].train.fingerprint
    assert "3 files read" in said[0] and "verifying" in said[1] and len(said) == 2


def test_other_hosts_get_the_resolved_path(asked, tmp_path, monkeypatch):
    """A replay's link is in a temporary directory on rank 0's host."""
    asked.kept.mkdir()
    (tmp_path / "link").symlink_to(asked.kept)
    monkeypatch.setattr(tokenized, "load_shards", lambda comm, folder, *more: folder)
    folder = load_corpus(SerialComm(), replace(asked, kept=tmp_path / "link"))
    assert folder.parent == asked.kept.resolve() and folder.is_dir()


def test_each_setting_has_separate_shards(asked):
    def folders():
        return len(list(asked.kept.iterdir()))

    loaded(asked)
    os.utime(Path(asked.data, "a.txt"), ns=(0, 0))  # looks rewritten
    loaded(asked)
    assert folders() == 2
    loaded(replace(asked, val_fraction=0.1))
    ((corpus,), _) = loaded(replace(asked, tokenizer="char"))
    assert folders() == 4
    _, said = loaded(replace(asked, existing=corpus.tokenizer))  # passed by a resumed run
    assert folders() == 4 and not any("tokenizing" in line for line in said)
    loaded(replace(asked, existing=load_tokenizer("char", "".join(corpus.tokenizer.vocabulary) + "€")))
    assert folders() == 5


def test_interrupted_tokenizing_can_restart(asked, monkeypatch):
    def interrupt(*facts):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tokenized.Watcher, "advanced", interrupt)
        load_corpus(SerialComm(), asked)
    ((corpus,), said) = loaded(asked)
    assert len(corpus.train) > 1000 and any("tokenizing" in line for line in said)


def test_single_files_of_each_kind_are_read(tmp_path):
    texts = ("one lamp", "two lamps")
    (tmp_path / "a.jsonl").write_text(json_lines(texts))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"one lamp\ntwo lamps"))
    (tmp_path / "c.txt").write_text("one lamp\ntwo lamps")
    (tmp_path / "d").write_text("one lamp\ntwo lamps")
    for name in ("a.jsonl", "b.txt.gz", "c.txt", "d"):
        ((corpus,), _) = loaded(DataRequest(str(tmp_path / name), kept=tmp_path / "kept"))
        assert sorted(corpus.tokenizer.decode(whole(corpus.train)).split("\n")) == sorted(texts), name
    assert len(list((tmp_path / "kept").iterdir())) == 2


def test_unreadable_file_is_named_on_all_ranks(tmp_path):
    (tmp_path / "bad.jsonl").write_text(json_lines(["a", "b"]) + "{\n")
    errors, _ = loaded(DataRequest(str(tmp_path / "bad.jsonl"), kept=tmp_path / "kept"), ranks=2)
    assert all(isinstance(error, DataError) and "bad.jsonl, line 3" in str(error) for error in errors)


def test_shards_missing_on_other_nodes_are_named(asked, monkeypatch):
    loaded(asked)
    (folder,) = asked.kept.iterdir()
    manifest, tokenizer = shards.read_manifest(folder), load_tokenizer("byte", "")
    gone = folder.rename(asked.kept / "gone")
    monkeypatch.setattr(shards, "read_manifest", lambda path: manifest)
    monkeypatch.setattr(shards, "shards_tokenizer", lambda path, manifest: tokenizer)
    errors = on_all_ranks(2, lambda comm: shards.load_shards(comm, folder, asked, lambda text: None))
    assert gone.is_dir() and all("all nodes must share its file system" in str(error) for error in errors)


def test_held_out_file_uses_tokenizer_of_data(asked, tmp_path):
    (tmp_path / "val.txt").write_text("the lamp the sea")
    (tmp_path / "val.jsonl").write_text(json_lines(["the lamp ", "the sea"]))
    held = {}
    for name in ("val.txt", "val.jsonl"):
        corpora, _ = loaded(replace(asked, tokenizer="char", val=str(tmp_path / name)), ranks=2)
        for corpus in corpora:
            held[name] = corpus.tokenizer.decode(whole(corpus.val))
            assert corpus.tokenizer.kind == "char" and len(corpus.train) > 1000
    assert held["val.txt"] == "the lamp the sea" and sorted(held["val.jsonl"]) == sorted(held["val.txt"])
    (tmp_path / "val.txt").write_text("the lamp €")
    ((error,), _) = loaded(replace(asked, tokenizer="char", val=str(tmp_path / "val.txt")))
    assert "val.txt" in str(error) and "'€'" in str(error)


def test_held_out_shards_use_their_validation_split(asked, inputs, tmp_path):
    (tmp_path / "val.txt").write_text("the lamp")
    for name, fraction in (("with", 0.05), ("without", 0.0)):
        prepare(request(inputs, tmp_path / name, val_fraction=fraction), Quiet())
    ((corpus,), _) = loaded(replace(asked, val=str(tmp_path / "with")))
    part = len(corpus.val)
    ((corpus,), _) = loaded(replace(asked, val=str(tmp_path / "without")))
    assert part < 3001 < len(corpus.val) == len(corpus.train)
    ((corpus,), _) = loaded(replace(asked, data=str(tmp_path / "with"), val=str(tmp_path / "val.txt")))
    assert corpus.tokenizer.decode(whole(corpus.val)) == "the lamp"


@pytest.fixture
def documents(tmp_path):
    (tmp_path / "d.jsonl").write_text(json_lines(f"Lamp {i} was lit. " * (1 + i % 9) for i in range(200)))
    (tmp_path / "v.jsonl").write_text(json_lines(["The naïve lamp.", "The sea."]))
    (tmp_path / "bpe.json").write_text(small().to_json())
    return tmp_path


def trained(folder, out, *more):
    words = ["--data", folder / "d.jsonl", "--val", folder / "v.jsonl", "--tokenizer", folder / "bpe.json"]
    return done("train", *SHAPE, *words, "--out", folder / "runs" / out, *more)


@pytest.mark.ci
def test_packed_run_resumes_bitwise(documents):
    how = ("--pack", "--eval-every", "4", "--save-every", "2", "--steps", "4")
    shown = trained(documents, "whole", *how)
    assert "tokenizing" in shown and "of the tokens" in shown
    run = documents / "runs" / "whole"
    half = shutil.copytree(run, documents / "runs" / "half")
    shutil.rmtree(half / "checkpoints" / "step-00000004")
    assert "tokenizing" not in trained(documents, "half", *how, "--resume", "auto")
    assert (half / "weights.safetensors").read_bytes() == (run / "weights.safetensors").read_bytes()
    assert "tokenizing" not in trained(documents, "other", "--steps", "1")
    assert losses(documents / "runs" / "other")[0] != losses(run)[0]
    lines_of = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    result = inside("train", "--resume", half, "--val", documents / "d.jsonl", "--steps", "5", "--lr", "1e-9")
    assert result.returncode == 0 and "d.jsonl is also the training text" in result.stdout
    ended = json.loads((half / "summary.json").read_text())
    assert ended["best_step"] == 5  # earlier losses are on another text
    (documents / "d.jsonl").rename(documents / "moved.jsonl")
    refused(inside("train", "--resume", half, "--data", documents / "moved.jsonl"), 65, "d.jsonl", "path with --val")
    evaluated = [line for line in lines_of if "val_loss" in line]
    text_bytes = len("The naïve lamp.The sea.".encode())
    for line in evaluated:
        bits = line["val_loss"] / np.log(2) * line["val_tokens"]
        assert line["bits_per_byte"] == pytest.approx(bits / text_bytes)


def test_incompatible_data_options_are_rejected(documents):
    out = ["--out", documents / "runs" / "no"]
    data = ["--data", documents / "d.jsonl"]
    both = [*data, "--val", documents / "v.jsonl", "--val-fraction", "0.1"]
    refused(inside("train", *SHAPE, *both, *out), 2, "--val and --val-fraction cannot be combined")
    for more in (["--data", "story"], data):
        refused(inside("train", *SHAPE, *more, "--pack", *out), 2, "--pack requires documents", "gpt2")
    refused(inside("train", *SHAPE, *data, "--val", documents / "gone.txt", *out), 65, "gone.txt")
    assert not (documents / "runs" / "no").exists()
