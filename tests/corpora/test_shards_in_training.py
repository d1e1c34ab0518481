"""Training on shards: the same batches on any number of ranks, and nothing damaged gets to the first step."""

import json
import shutil

import numpy as np
import pytest
from distgpt.core.base.errors import DataError
from distgpt.core.data.loading import DataRequest, load_corpus
from threadranks import on_all_ranks

from conftest import SMALL, distgpt, inside, losses, needs_mpi, refused

MODEL = [word for word in SMALL if word not in ("--data", "story", "--tokenizer", "word")] + ["--steps", "4"]


def run(*args):
    result = inside(*args)
    assert result.returncode == 0, result.stderr
    return result.stdout


def prepared(text, out, *args):
    run("data", "prepare", "--tokenizer", "byte", "--workers", "1", text, "--out", out, *args)


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


@pytest.mark.ranks
@pytest.mark.slow
@needs_mpi
def test_ranks_log_on_shards_what_one_process_does_and_leave_together_after_damage(shards, copy, tmp_path):
    cut(copy / "train-000002.npy")
    args = ["train", *MODEL, "--eval-every", "2", "--val-tokens", "200", "--data"]
    printed = run(*args, shards, "--out", tmp_path / "one")
    mpi = ["--stage", "mpi", "--out"]
    two = distgpt(*args, shards, *mpi, tmp_path / "two", ranks=2)
    assert two.returncode == 0, two.stderr
    refused(distgpt(*args, copy, *mpi, tmp_path / "no", ranks=2), 65, "train-000002.npy")
    assert not (tmp_path / "no").exists()
    logged = {}
    for name in ("one", "two"):
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        logged[name] = [
            {k: value for k, value in line.items() if k[-2:] != "_s" and k not in ("slowest_rank", "time")}
            for line in lines
        ]
    assert len(logged["one"]) == len(logged["two"]) == 7
    for one, two in zip(logged["one"], logged["two"], strict=True):
        assert two == pytest.approx(one, rel=1e-4)
    assert "9 shards" in printed and "for validation" in printed


# Damage


def cut(path):
    path.write_bytes(path.read_bytes()[:-2])


OTHER = '{"format": "distgpt-tokenizer", "version": 1, "kind": "char", "vocabulary": ["a", "b"]}'
DAMAGES = {
    "train-000002.npy": cut,
    "train-000000.npy": lambda path: shutil.copy(path.with_name("train-000001.npy"), path),
    "manifest.json": cut,
    "train-000004.npy": lambda path: path.unlink(),
    "tokenizer.json": lambda path: path.write_text(OTHER),
}


def test_damage_is_found_before_the_first_step(shards, tmp_path):
    for named, damage in DAMAGES.items():
        copy = shutil.copytree(shards, tmp_path / named)
        damage(copy / named)
        refused(inside("train", "--data", copy, *MODEL, "--out", tmp_path / "run"), 65, copy / named)
        assert not (tmp_path / "run").exists()
        for error in on_all_ranks(2, lambda comm, copy=copy: load_corpus(comm, DataRequest(str(copy)))):
            assert isinstance(error, DataError) and str(copy / named) in str(error)


def test_an_impossible_id_ends_training_and_evaluation_of_trusted_shards(copy, tmp_path):
    for number in (0, 1, 2, 3):
        with (copy / f"train-{number:06d}.npy").open("r+b") as file:
            file.seek(128 + 2 * 50)
            file.write(np.full(900, 256, "<u2").tobytes())
    args = ["train", "--set", "verify_data=false", "--data", copy, *MODEL, "--steps", "40", "--out", tmp_path / "run"]
    refused(inside(*args), 65, f"{copy / 'train-00000'}", "has the token 256", "at position")
    refused(inside("data", "info", "--no-verify", copy), 65, "train-000000.npy", "position 50")


def test_only_the_splits_that_are_asked_for_are_read(copy):
    cut(copy / "train-000002.npy")
    asked = DataRequest(str(copy), splits=("val",))
    (corpus,) = on_all_ranks(1, lambda comm: load_corpus(comm, asked))
    assert len(corpus.val) == 1000 and corpus.train is corpus.val
    shutil.copy(copy / "train-000000.npy", copy / "val-000000.npy")
    (error,) = on_all_ranks(1, lambda comm: load_corpus(comm, asked))
    assert isinstance(error, DataError) and "val-000000.npy" in str(error)
    trusted = DataRequest(str(copy), splits=("val",), verify=False)  # as with verify_data = false
    (corpus,) = on_all_ranks(1, lambda comm: load_corpus(comm, trusted))
    assert len(corpus.val) == 1000


def test_tokens_of_another_tokenizer_and_other_folders_are_refused(shards, tmp_path):
    (tmp_path / "abc.txt").write_text("abcabc" * 50)
    run("train", "--data", tmp_path / "abc.txt", "--tokenizer", "char", *MODEL, "--out", tmp_path / "chars")
    weights = tmp_path / "chars" / "weights.safetensors"
    for asked in (["--init", weights], ["--tokenizer", "gpt2"], ["--tokenizer", "word"]):
        refused(inside("train", "--data", shards, *asked, "--out", tmp_path / "x"), 65, "byte")
    refused(inside("eval", "--weights", weights, "--val", shards), 65, "byte")
    refused(
        inside("train", "--data", tmp_path / "chars" / "checkpoints", "--out", tmp_path / "run"),
        65,
        "holds no file that ends in",
    )


def test_another_corpus_does_not_continue_a_run(copy, tmp_path):
    args = ["train", *MODEL, "--out", tmp_path / "run", "--data", copy]
    run(*args, "--save-every", "2")
    before = losses(tmp_path / "run")
    shutil.rmtree(copy)
    (tmp_path / "other.txt").write_text("something else\n" * 300)
    prepared(tmp_path / "other.txt", copy, "--shard-tokens", "1000")
    refused(inside(*args, "--steps", "9", "--resume", "auto"), 65, "changed")
    assert losses(tmp_path / "run") == before
