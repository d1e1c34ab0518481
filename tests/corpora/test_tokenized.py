import gzip
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from complaints import done
from distgpt.core.base.errors import DataError
from distgpt.core.comm.api import SerialComm
from distgpt.core.data.loading import DataRequest, load_corpus
from distgpt.core.data.tokenizers import load_tokenizer
from distgpt.corpora import shards
from distgpt.corpora.prepare import tokenized
from distgpt.corpora.prepare.preparing import prepare, reserved
from preparing import Quiet, everything, inputs, json_lines, request  # noqa: F401
from threadranks import on_all_ranks
from tokenizing import small, whole

from conftest import SMALL, inside, losses, refused

MODEL = [word for word in SMALL if word not in ("--data", "story", "--tokenizer", "word")]


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
    return done("train", *MODEL, *words, "--out", folder / "runs" / out, *more)


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
    refused(inside("train", *MODEL, *both, *out), 2, "--val and --val-fraction cannot be combined")
    for more in (["--data", "story"], data):
        refused(inside("train", *MODEL, *more, "--pack", *out), 2, "--pack requires documents", "gpt2")
    refused(inside("train", *MODEL, *data, "--val", documents / "gone.txt", *out), 65, "gone.txt")
    assert not (documents / "runs" / "no").exists()
