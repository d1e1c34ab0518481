"""Training on shards: the same batches on any number of ranks, and nothing damaged gets to the first step."""

import hashlib
import json
import shutil

import numpy as np
import pytest
from conftest import distgpt, inside, losses, needs_mpi, refused
from threadranks import on_all_ranks

from distgpt.data.batches import Batches, rank_rows
from distgpt.data.loading import Wanted, load_corpus
from distgpt.errors import DataError

_MODEL = "--n-layer 1 --n-head 2 --n-embd 16 --seq-len 16 --batch-size 8"
MODEL = f"{_MODEL} --steps 4 --threads 1".split()


def prepared(*args):
    result = inside("data", "prepare", "--tokenizer", "byte", "--workers", "1", *args[:1], "--out", *args[1:])
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Eight shards for training, the last one short, and one for validation."""
    folder = tmp_path_factory.mktemp("shards")
    text = folder / "text.txt"
    text.write_text("".join(f"line {i} says {i * i}.\n" for i in range(400)))
    out = folder / "shards"
    prepared(text, out, "--shard-tokens", "1000", "--val-shards", "1")
    return out


@pytest.fixture
def copy(shards, tmp_path):
    return shutil.copytree(shards, tmp_path / "shards")


def whole(tokens):
    return tokens.read(0, len(tokens))


def test_shards_hold_the_text_in_two_parts(shards):
    text = (shards.parent / "text.txt").read_bytes()
    for corpus in on_all_ranks(2, lambda comm: load_corpus(comm, Wanted(str(shards)))):
        assert whole(corpus.val).tobytes() == np.frombuffer(text[:1000], np.uint8).astype("<u2").tobytes()
        assert corpus.tokenizer.decode(whole(corpus.train)) == text[1000:].decode()


def test_any_number_of_ranks_sees_each_window_once_and_in_one_order(shards):
    corpus = load_corpus(on_all_ranks(1, lambda comm: comm)[0], Wanted(str(shards)))
    tokens, text = corpus.train, whole(corpus.train)
    batches = Batches(tokens, 16, 8, 7, shift=False)
    for ranks in (1, 2, 4):
        seen = []
        for step in range(-(-batches.windows_per_epoch // 8)):
            x, y = np.zeros((2, 8, 16), np.int32)
            for rank in range(ranks):
                rows = rank_rows(8, rank, ranks, 0, 1)
                batches.fill(step, rows, x[rows], y[rows])
            for start, inputs, targets in zip(batches.windows(step), x, y, strict=True):
                window = text.take(np.arange(start, start + 17), mode="wrap")  # across borders and the end
                np.testing.assert_array_equal(inputs, window[:-1], f"{ranks} ranks, step {step}")
                np.testing.assert_array_equal(targets, window[1:], f"{ranks} ranks, step {step}")
                seen.append(start)
        assert sorted(seen[: batches.windows_per_epoch]) == list(range(0, len(text), 16)), ranks


@needs_mpi
def test_ranks_train_on_shards_as_one_process_does(shards, tmp_path):
    args = ["train", "--data", shards, *MODEL, "--eval-every", "2", "--val-tokens", "200"]
    one = distgpt(*args, "--out", tmp_path / "one")
    two = distgpt(*args, "--out", tmp_path / "two", "--stage", "mpi", ranks=2)
    assert one.returncode == two.returncode == 0, one.stderr + two.stderr
    logged = {}
    for name in ("one", "two"):
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        logged[name] = [line.get("loss", line.get("val_loss")) for line in lines]
    assert len(logged["one"]) == 7
    assert logged["two"] == pytest.approx(logged["one"], rel=1e-4)
    assert "9 shards" in one.stdout and "for validation" in one.stdout


def changed(path, data):
    """Write this file, under a manifest that has been made to agree."""
    path.write_bytes(data)
    about = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    edit_shard(path.parent / "manifest.json", path.name, about)


def edit_shard(manifest, name, values):
    document = json.loads(manifest.read_text())
    next(shard for shard in document["shards"] if shard["name"] == name).update(values)
    manifest.write_text(json.dumps(document))


def cut(folder):
    path = folder / "train-000002.npy"
    path.write_bytes(path.read_bytes()[:-2])


def swap(folder):
    first, second = (folder / f"train-00000{i}.npy" for i in (0, 1))
    contents = first.read_bytes(), second.read_bytes()
    second.write_bytes(contents[0])
    first.write_bytes(contents[1])


def edit(folder):
    path = folder / "val-000000.npy"
    data = bytearray(path.read_bytes())
    data[500] ^= 1
    path.write_bytes(data)


def beyond(folder):
    """An id that the vocabulary does not have."""
    path = folder / "train-000003.npy"
    changed(path, path.read_bytes()[:-2] + (9999).to_bytes(2, "little"))


def lie(folder):
    edit_shard(folder / "manifest.json", "train-000000.npy", {"tokens": 1008})


def remove(folder):
    (folder / "train-000004.npy").unlink()


def other_tokenizer(folder):
    saved = {"format": "distgpt-tokenizer", "version": 1, "kind": "char", "vocabulary": ["a", "b"]}
    (folder / "tokenizer.json").write_text(json.dumps(saved))


DAMAGES = {
    cut: "train-000002.npy",
    swap: "train-000000.npy",
    edit: "val-000000.npy",
    beyond: "train-000003.npy",
    lie: "manifest.json",
    remove: "train-000004.npy",
    other_tokenizer: "tokenizer.json",
}


@pytest.mark.parametrize(("damage", "named"), DAMAGES.items())
def test_damage_is_found_before_the_first_step(copy, tmp_path, damage, named):
    damage(copy)
    refused(inside("train", "--data", copy, *MODEL, "--out", tmp_path / "run"), 65, named)
    assert not (tmp_path / "run").exists()
    for error in on_all_ranks(2, lambda comm: load_corpus(comm, Wanted(str(copy)))):
        assert isinstance(error, DataError) and named in str(error)


@needs_mpi
def test_all_ranks_leave_together_after_damage(copy, tmp_path):
    cut(copy)
    out = tmp_path / "run"
    args = ["train", "--data", copy, *MODEL, "--stage", "mpi", "--out", out]
    refused(distgpt(*args, ranks=2), 65, "train-000002.npy")
    assert not out.exists()


def test_what_is_trusted_is_not_read_beforehand(copy, tmp_path):
    edit(copy)
    result = inside("train", "--data", copy, *MODEL, "--trust-data", "--out", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    cut(copy)
    refused(inside("train", "--data", copy, *MODEL, "--trust-data", "--out", tmp_path / "x"), 65, "000002")


def test_eval_reads_what_is_held_out_and_no_more(copy, tmp_path):
    made = inside("train", "--data", copy, *MODEL, "--out", tmp_path / "run")
    assert made.returncode == 0, made.stderr
    weights = tmp_path / "run" / "weights.safetensors"
    cut(copy)
    result = inside("eval", "--weights", weights, "--val", copy, "--json")
    assert json.loads(result.stdout)["val_tokens"] == 999, result.stderr
    edit(copy)
    refused(inside("eval", "--weights", weights, "--val", copy), 65, "val-000000.npy")


def test_a_single_token_to_validate_on_is_refused(tmp_path):
    (tmp_path / "text").write_text("abcdef")
    out = tmp_path / "out"
    prepared(tmp_path / "text", out, "--shard-tokens", "2", "--val-shards", "1")
    path = out / "val-000000.npy"
    first = np.load(path)[:1]
    np.save(path, first)
    edit_shard(out / "manifest.json", path.name, {"tokens": 1, "largest": int(first[0])})
    changed(path, path.read_bytes())
    refused(inside("train", "--data", out, *MODEL, "--out", tmp_path / "run"), 65, "single token", "val")


def test_tokens_of_another_tokenizer_are_refused(shards, tmp_path):
    text = tmp_path / "abc.txt"
    text.write_text("abcabc" * 50)
    start = tmp_path / "chars"
    made = inside("train", "--data", text, "--tokenizer", "char", *MODEL, "--out", start)
    assert made.returncode == 0, made.stderr
    weights = start / "weights.safetensors"
    for wanted in (["--init", weights], ["--tokenizer", "gpt2"], ["--tokenizer", "word"]):
        refused(inside("train", "--data", shards, *wanted, "--out", tmp_path / "x"), 65, "byte")
    refused(inside("eval", "--weights", weights, "--val", shards), 65, "byte")


def test_another_corpus_does_not_continue_a_run(shards, copy, tmp_path):
    args = ["train", *MODEL, "--out", tmp_path / "run"]
    assert inside(*args, "--data", copy, "--save-every", "2").returncode == 0
    before = losses(tmp_path / "run")
    shutil.rmtree(copy)
    text = tmp_path / "other.txt"
    text.write_text("something else\n" * 300)
    prepared(text, copy, "--shard-tokens", "1000")
    refused(inside(*args, "--data", copy, "--resume", "auto"), 65, "changed")
    assert losses(tmp_path / "run") == before


def test_a_folder_that_was_not_prepared_is_told_apart(tmp_path):
    refused(inside("train", "--data", tmp_path, "--out", tmp_path / "run"), 65, "data prepare")
