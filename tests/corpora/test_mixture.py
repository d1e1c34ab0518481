import numpy as np
import pytest
from distgpt.core.comm.api import SerialComm
from distgpt.core.config import RunConfig
from distgpt.core.data.loading import DataRequest, load_corpus
from distgpt.corpora.mixture import ROWS, sources_of
from distgpt.recipes.depth import text_of
from threadranks import on_all_ranks
from tokenizing import whole

from conftest import SMALL, distgpt, inside, losses, refused, succeeded

MODEL = [word for word in SMALL if word not in ("--data", "story")] + ["--tokenizer", "byte"]
LETTERS = {"a.txt": "a", "b:3": "b", "c": "c"}  # the texts' only letters; c is a directory


@pytest.fixture
def texts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c").mkdir()
    for name, length in (("a.txt", 700), ("b:3", 300), ("c/x.txt", 900)):
        (tmp_path / name).write_text(LETTERS[name.partition("/")[0]] * length)
    return tmp_path


@pytest.mark.parametrize(
    "data, sources",
    [
        ("a.txt", {}),
        ("b:3", {}),
        ("missing:3", {}),
        (r"C:\texts\a.txt", {}),
        ("a.txt:3", {"a.txt": 3}),
        ("a.txt:3,b:3:1.5,c:0", {"a.txt": 3, "b:3": 1.5}),
        ("a.txt:1,a.txt:2", {"a.txt": 3}),
        (r"C:\a.txt:3,D:/b,c:1e1", {r"C:\a.txt": 3, "D:/b,c": 10}),
    ],
)
def test_sources_are_parsed(texts, data, sources):
    assert sources_of(data) == sources


@pytest.mark.parametrize(
    "data, words",
    [
        (["a.txt:x"], ["'a.txt'", "'x'"]),
        (["a.txt:"], ["'a.txt'", "''"]),
        (["a.txt:-1", "c:1"], ["'a.txt'", "'-1'"]),
        (["a.txt:nan", "c:1"], ["'a.txt'", "'nan'"]),
        (["a.txt:inf,c:1"], ["'a.txt'", "'inf'"]),
        (["a.txt:0", "c:0"], ["at least one source"]),
        (["a.txt:1", f"c:{2 * ROWS}"], ["'a.txt'", f"1/{ROWS}"]),
        (["a.txt:1,c"], ["--data c:1"]),
        (["a.txt", "c:1"], ["--data a.txt:1"]),
        (["missing:1", "c:1"], ["cannot read 'missing'"]),
    ],
)
def test_bad_weights_are_rejected(texts, data, words):
    options = [word for each in data for word in ("--data", each)]
    result = inside("train", *MODEL, *options, "--steps", "1", "--out", "none")
    refused(result, 65 if "cannot" in words[0] else 2, *words)


def loaded(data, ranks=1, **more):
    request = DataRequest(data, **more)
    return on_all_ranks(ranks, lambda comm: load_corpus(comm, request))[0]


def batches_of(corpus, data, **settings):
    values = {"seq_len": 10, "batch_size": 12, "data": data, "seed": 3, "shift_windows": False, **settings}
    return corpus.batches(SerialComm(), RunConfig().with_values(values))


def filled(batches, step, which=slice(0, 12)):
    x, y = (np.zeros((which.stop - which.start, batches.seq_len), np.int32) for _ in range(2))
    batches.fill(step, which, x, y)
    return np.concatenate([x, y[:, -1:]], axis=1)


def test_sequences_are_drawn_in_proportion_to_weights(texts):
    data = "a.txt:3,b:3:1,c:2"
    batches = batches_of(loaded(data, kept=texts / "kept"), data)
    rows = np.concatenate([filled(batches, step) for step in range(400)])  # more than one block
    assert ROWS < len(rows) == 4800
    for letter, share in zip(LETTERS.values(), (3 / 6, 1 / 6, 2 / 6), strict=True):
        is_own = (rows == ord(letter)).any(axis=1)
        for number in (60, 1001, 4800):  # any start of a run has about this share
            assert is_own[:number].sum() == pytest.approx(share * number, abs=3)
        assert len(set(np.diff(np.flatnonzero(is_own)))) > 1  # not in regular places
    notes = [*batches.notes(100)]
    assert "a.txt: 700 tokens, 50.0% of the sequences, read 8.57 times in 100 steps" in notes
    shares = np.bincount(batches.sample(1200), minlength=128)[[*map(ord, LETTERS.values())]] / 1200
    assert shares == pytest.approx([3 / 6, 1 / 6, 2 / 6], abs=0.01)


def test_batches_depend_only_on_seed_and_step(texts):
    (texts / "a.txt").write_text("".join(map(chr, range(32, 127))) * 9)
    data = "a.txt:2,b:3:1"
    one, other, third = (batches_of(loaded(data), data, seed=seed) for seed in (3, 3, 4))
    steps = [10**9, 7, 0, 341]
    whole_batches = {step: filled(one, step) for step in steps}
    for step in sorted(steps):
        halves = [filled(other, step, slice(start, start + 6)) for start in (0, 6)]
        assert np.array_equal(np.concatenate(halves), whole_batches[step])
    assert not np.array_equal(filled(third, 0), whole_batches[0])
    other.skipped = 7
    assert np.array_equal(filled(other, 0), whole_batches[7])
    # An epoch of a source has all of its windows, in the order of a run over it alone.
    rows = np.concatenate([filled(one, step) for step in range(30)])
    own = rows[(rows != ord("b")).any(axis=1)]
    alone = batches_of(loaded("a.txt"), "a.txt")
    assert np.array_equal(own, np.concatenate([filled(alone, step) for step in range(30)])[: len(own)])


def test_single_source_is_loaded_as_without_weight(texts):
    for data in ("a.txt", "b:3", "c"):
        one, other = (loaded(each, kept=texts / "kept", val_fraction=0.1) for each in (data, f"{data}:2"))
        assert type(one) is type(other) and one.train.fingerprint == other.train.fingerprint


def test_each_source_holds_out_its_part(texts):
    corpus = loaded("a.txt:3,b:3:1,c:2", ranks=2, val_fraction=0.1, kept=texts / "kept")
    held = whole(corpus.held_out)
    assert {letter: int((held == ord(letter)).sum()) for letter in "ab"} == {"a": 70, "b": 30}
    assert set(np.unique(held)) >= set(map(ord, "abc"))
    some = np.concatenate([window.ids for window in corpus.held_out_windows(10, 40)])
    assert set(some) >= set(map(ord, "abc")) and len(some) < 60
    assert sum(len(window.ids) - 1 for window in corpus.held_out_windows(10, 0)) == len(held) - 1
    replaced = loaded("a.txt:3,c:1", val="b:3", kept=texts / "kept")
    assert set(np.concatenate([window.ids for window in replaced.held_out_windows(10, 0)])) == {ord("b")}


def test_sources_share_a_tokenizer(texts):
    """Shards determine it; without shards, it is learned from all sources."""
    corpus = loaded("a.txt:3,b:3:1,c:2", tokenizer="char", kept=texts / "kept")
    assert corpus.tokenizer.decode(corpus.tokenizer.encode("abc")) == "abc"
    (texts / "d.txt").write_text("abcd" * 100)
    for name, kind in (("one", "byte"), ("two", "char"), ("three", "char")):
        succeeded("data", "prepare", "d.txt", "--out", name, "--tokenizer", kind, "--val-fraction", "0.1")
    shards = loaded("three:1,a.txt:1,two:1", val_fraction=0.1)
    assert shards.tokenizer.kind == "char" and "--val-fraction has no effect" in shards.notes[0]
    for data, words in (("one:1,two:1", ["one and two"]), ("two:1,a.txt:1", ["byte"])):
        options = ["--data", data, "--tokenizer", "byte", "--steps", "1", "--out", "none"]
        refused(inside("train", *options), 65, *words)


def test_tokens_of_a_mixture_are_counted_by_passes(texts):
    """The average sequence has been read once after this number of tokens."""
    known = {"tokenizer": "byte"}
    assert text_of({**known, "data": "a.txt:7,b:3:3"}).tokens == pytest.approx(1000)
    assert text_of({**known, "data": "a.txt:1,b:3:1"}).tokens == pytest.approx(1 / (0.25 / 700 + 0.25 / 300))
    assert text_of({**known, "data": "a.txt:5"}) == text_of({**known, "data": "a.txt"})


@pytest.mark.ci
def test_missing_source_is_found_on_resume(texts):
    run = ["--steps", "4", "--out", "run", "--resume", "auto"]
    succeeded("train", *MODEL, "--data", "a.txt:3", "--data", "c:1", *run)
    (texts / "a.txt").rename(texts / "e.txt")
    refused(inside("train", *run), 65, "'a.txt'", "--data")
    result = succeeded("train", "--data", "e.txt:6,c:2", "--out", "run", "--resume", "auto", "--steps", "5")
    assert "data has changed" not in result.stdout
    result = succeeded("train", "--data", "e.txt:1,c:2", "--out", "run", "--resume", "auto", "--steps", "6")
    assert "data has changed" in result.stdout


@pytest.mark.ci
def test_two_ranks_and_a_resumed_run_have_the_same_batches(texts):
    data = ["--data", "a.txt:3", "--data", "c:1", "--val-fraction", "0.1", "--eval-every", "2"]
    options = [*MODEL, *data, "--schedule", "constant", "--reproducible-parts", "2", "--resume", "auto"]
    succeeded("train", *options, "--steps", "4", "--out", "whole")
    for steps in ("2", "4"):
        succeeded("train", *options, "--steps", steps, "--out", "parts")
    options += ["--stage", "mpi", "--steps", "4", "--out", "ranks"]
    succeeded("train", *options, by=distgpt, ranks=2, cwd=texts)
    assert losses("whole") == losses("parts") == losses("ranks")
