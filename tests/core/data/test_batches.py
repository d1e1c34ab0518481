"""From a file to batches: reading, the seeded order of windows, and the share of every rank."""

import gzip
import itertools
import os
import re
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from complaints import complains
from distgpt.core.base.errors import DataError, UsageError
from distgpt.core.base.files import bundled
from distgpt.core.comm.api import SerialComm
from distgpt.core.data.batches import SAMPLE_PIECE, ArrayTokens, Batches, rank_sequences, shuffled
from distgpt.core.data.loading import DataRequest, load_corpus, read_text, refuse_missing, split
from distgpt.core.data.textfile import ADVICE, BUNDLED_TEXTS, resolve_data
from distgpt.core.data.tokenizers import load_tokenizer
from distgpt.corpora.prepare.documents import find_inputs
from hypothesis import example, given, settings
from hypothesis import strategies as st
from threadranks import on_all_ranks
from tokenizing import STORY, filled, whole

from conftest import inside, succeeded

SEED = 1337
KEYS = st.integers(0, 2**64 - 1)


def starts(batches, step, batch_size):
    """Return the start positions of a step's sequences; tokens equal their positions."""
    return filled(batches, step, slice(0, batch_size))[0][:, 0]


def positions(length, *how, **more):
    return Batches(ArrayTokens(np.arange(length, dtype=np.uint16)), *how, **more)


@given(st.integers(1, 2000), KEYS)
@example(65_521, 1)
@example(100_003, 0)
def test_shuffled_order_is_a_permutation(count, key):
    found = shuffled(np.arange(count, dtype=np.uint64), np.full(count, key, np.uint64), count)
    assert np.array_equal(np.sort(found), np.arange(count))


@settings(max_examples=20)
@given(st.integers(2**20, 2**40), KEYS)
@example(2**20 * (2**20 - 1) + 1, 7)
def test_shuffled_order_is_exact_for_huge_corpora(count, key):
    ends = np.concatenate([np.arange(10_000), np.arange(count - 10_000, count)]).astype(np.uint64)
    found = shuffled(ends, np.full(ends.size, key, np.uint64), count)
    assert np.unique(found).size == ends.size and found.max() < count
    assert abs(found.astype(np.float64).mean() / count - 0.5) < 0.02


def test_shuffled_orders_are_uniform():
    epochs, count = 6000, 3
    place = np.tile(np.arange(count, dtype=np.uint64), epochs)
    key = np.repeat(np.random.default_rng(0).integers(0, 2**63, epochs).astype(np.uint64), count)
    _, seen = np.unique(shuffled(place, key, count).reshape(epochs, count), axis=0, return_counts=True)
    assert seen.size == 6 and seen.min() > 800 and seen.max() < 1200
    order = shuffled(np.arange(10_000, dtype=np.uint64), np.ones(10_000, np.uint64), 10_000).astype(np.int64)
    assert np.mean(np.abs(np.diff(order)) == 1) < 0.002 and abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.05


@settings(max_examples=20)
@given(st.integers(2, 150), st.integers(1, 40), st.integers(1, 9), st.booleans())
@example(1000, 7, 4, True)
@example(5, 8, 2, True)
def test_epochs_cover_each_window_once(length, seq_len, batch_size, shift):
    batches, epochs = positions(length, seq_len, batch_size, SEED, shift=shift), 6
    per_epoch = batches.windows_per_epoch
    assert per_epoch == -(-length // seq_len)
    tokens = np.random.default_rng(0).integers(0, 10**6, length).astype(np.uint32)
    same, found = Batches(ArrayTokens(tokens), seq_len, batch_size, SEED, shift=shift), []
    for step in range(-(-epochs * per_epoch // batch_size)):
        found.append(starts(batches, step, batch_size))
        x, y = filled(same, step, slice(0, batch_size))
        expected = tokens[(found[-1][:, None] + np.arange(seq_len + 1)) % length]
        assert np.array_equal(x, expected[:, :-1]) and np.array_equal(y, expected[:, 1:])
    each = np.concatenate(found)[: epochs * per_epoch].reshape(epochs, per_epoch)
    for epoch in each:
        assert np.unique(epoch).size == per_epoch
        assert np.unique((epoch[:, None] + np.arange(seq_len)) % length).size == length
        assert shift or sorted(epoch) == [*range(0, length, seq_len)]
    assert len({tuple(sorted(epoch)) for epoch in each.tolist()}) > 1 or not shift or seq_len < 4 or length < 20
    assert len({tuple(epoch) for epoch in each.tolist()}) > 1 or per_epoch < 4


def test_batches_depend_only_on_seed_and_step():
    batches = positions(5000, 16, 8, SEED)
    forward = [starts(batches, step, 8).tolist() for step in range(20)]
    assert forward == [starts(batches, step, 8).tolist() for step in reversed(range(20))][::-1]
    assert starts(positions(5000, 16, 8, SEED + 1), 0, 8).tolist() != forward[0]
    late = starts(positions(5000, 16, 8, 2**64 + 5), 2**40, 8)
    assert late.min() >= 0 and late.max() < 5000
    written_down = [[901, 1221, 21, 101], [133, 261, 837, 453], [642, 1186, 1138, 834]]
    assert [starts(positions(1308, 16, 4, 1337), step, 4).tolist() for step in (0, 1, 1000)] == written_down


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), st.integers(0, 1000))
def test_global_batch_is_equal_for_any_ranks(each, size, grad_accum, step):
    batch_size, taken = each * size * grad_accum, []
    batches = positions(700, 9, batch_size, SEED)
    both = filled(batches, step, slice(0, batch_size))
    for micro_batch, rank in itertools.product(range(grad_accum), range(size)):
        rows = rank_sequences(batch_size, rank, size, micro_batch, grad_accum)
        assert np.array_equal(filled(batches, step, rows), both[:, rows])
        taken += range(batch_size)[rows]
    assert taken == list(range(batch_size))


def test_sample_takes_evenly_spaced_pieces():
    tokens = np.arange(3 * SAMPLE_PIECE, dtype=np.uint32)
    for whole_text in (tokens, tokens[7:]):
        batches = Batches(ArrayTokens(whole_text), 16, 4, SEED)
        assert np.array_equal(batches.sample(len(whole_text)), whole_text)
    batches = Batches(ArrayTokens(tokens), 16, 4, SEED)
    for most, begins in ((2 * SAMPLE_PIECE, [0, 2 * SAMPLE_PIECE]), (1000, [0]), (SAMPLE_PIECE, [0])):
        found = batches.sample(most).reshape(len(begins), -1)
        assert found.size == most and found[:, 0].tolist() == begins
        assert np.array_equal(found - found[:, :1], np.arange(found.shape[1])[None].repeat(len(begins), 0))


def test_uneven_batch_is_rejected_with_nearest_sizes():
    for batch_size, size, grad_accum, *advice in (
        (16, 3, 1, "3 ranks × 1 micro-batch", "15 or 18"),
        (5, 2, 4, "use 8"),
        (20, 4, 2, "16 or 24"),
    ):
        with complains(*advice, kind=UsageError):
            rank_sequences(batch_size, 0, size, 0, grad_accum)


def test_read_text_normalizes_or_rejects(tmp_path):
    path = tmp_path / "file"
    path.write_bytes("\ufeffone\r\ntwo é\n".encode())
    assert read_text(path) == "one\ntwo é\n"
    for content, words in (
        (b"", "is empty"), (b"\xef\xbb\xbf", "is empty"), (b"\xef\xbb\xbfab\xffc", "byte 5"),
        (b"ok\xe2\x82", "byte 2"), (gzip.compress(b"text"), "is not UTF-8 text"),
    ):  # fmt: skip
        path.write_bytes(content)
        with complains(path, words):
            read_text(path)
    for unreadable in (tmp_path, tmp_path / "missing", path / "below", tmp_path / ("x" * 300), Path("nul\0")):
        with pytest.raises(DataError, match=r"cannot read|is a directory"):
            read_text(unreadable)


def test_data_is_a_bundled_name_or_path(tmp_path):
    for name in BUNDLED_TEXTS:
        assert len(read_text(resolve_data(name))) > 4000
    with complains("weights/nothing.bin is missing"):
        bundled("weights", "nothing.bin")
    (path := tmp_path / "mine.txt").write_text("text")
    assert resolve_data(str(path)) == path
    for word, hint in (("stroy", "did you mean 'story'"), ("nul\0", ""), ("x" * 300, "")):
        with complains(hint, "corpus, names, story, tales"):
            resolve_data(word)


def loaded(ranks, *asked, **more):
    return on_all_ranks(ranks, lambda comm: load_corpus(comm, DataRequest(*asked, **more)))


def test_ranks_get_tokens_of_rank_0(tmp_path):
    for kind, ranks in (("byte", 1), ("char", 2), ("word", 4)):
        expected = load_tokenizer(kind, STORY)
        for corpus in loaded(ranks, "story", kind, 64):
            tokens = whole(corpus.train)
            assert corpus.tokenizer.to_json() == expected.to_json()
            assert corpus.val is None and tokens.dtype == np.uint16
            assert np.array_equal(tokens, expected.encode(STORY)), (kind, ranks)
    (path := tmp_path / "text.txt").write_text("0123456789" * 8)
    places = (str(path), "nowhere")  # only rank 0 touches the file
    asked = ("char", 8, 0.1)  # the first part is held out
    for corpus in on_all_ranks(2, lambda comm: load_corpus(comm, DataRequest(places[comm.rank], *asked))):
        assert corpus.tokenizer.decode(whole(corpus.val)) == "01234567"
        assert corpus.tokenizer.decode(whole(corpus.train)) == ("0123456789" * 8)[8:]
        assert corpus.train.fingerprint != corpus.val.fingerprint
    mine = load_tokenizer("char", STORY + "äöü")  # an existing model's
    (corpus,) = loaded(1, "story", "auto", 8, existing=mine)
    assert corpus.tokenizer.to_json() == mine.to_json() and corpus.tokenizer.decode(whole(corpus.train)) == STORY


def test_data_errors_are_raised_on_all_ranks(tmp_path):
    path, known = tmp_path / "text.txt", tmp_path / "known.json"
    known.write_text(load_tokenizer("word", "some").to_json())
    for content, choice, kind, message in (
        (None, "char", DataError, "cannot read"),
        ("x", "char", DataError, "has only 1 token; at least 2"),
        (" \t ", "word", DataError, "0 token"),
        ("", "byte", DataError, "is empty"),
        ("some text", "chra", UsageError, "did you mean 'char'"),
        ("some text", str(known), DataError, r"text\.txt: the word 'text' at position 5"),
    ):
        if content is not None:
            path.write_text(content)
        errors = loaded(3, str(path), choice, 8)
        assert {(type(error), str(error)) for error in errors} == {(kind, str(errors[0]))}
        assert re.search(message, str(errors[0]))


@pytest.mark.parametrize("length, held_out, pieces", [(9000, 700, 1), (9001, 1600, 3), (100_003, 10_007, 8), (5, 0, 0)])
def test_validation_takes_pieces_from_the_whole_text(length, held_out, pieces):
    val, train = split(np.arange(length, dtype=np.uint32), held_out)
    assert len(val) == held_out and sorted([*val, *train]) == list(range(length))
    starts = val[np.diff(val, prepend=-5) != 1]
    assert starts.tolist() == [length * i // max(1, pieces) for i in range(pieces)]


TEXT = "Es war einmal ein König, der hatte schöne Töchter; die jüngste war so schön.\n" * 40
CONVERT = "iconv -f ENCODING -t UTF-8"
PLAIN = "convert it to plain text first"
SAMPLE = bundled("weights", "sample.safetensors")
FILES = {
    "my.txt": TEXT.encode("latin-1"),
    "u.txt": TEXT.encode("utf-16"),
    "u.jsonl": '{"prompt": "a", "completion": "b"}\n'.encode("utf-16"),
    "u.txt.gz": gzip.compress(TEXT.encode("utf-16")),
    "my.pdf": b"%PDF",
    "fine.txt": b"text",
    "bad.jsonl": b'{"text": "a"}\n{"text": "b"}\n{\n',
    "other.jsonl": b'{"content": "a"}\n',
    "cut.txt.gz": gzip.compress(os.urandom(4000))[:2000],
    "t.parquet": b"requires a table",
    "x.zip": b"PK",
    "none.jsonl": b"",
    "two.jsonl": b'{"text": "ab"}\n{"text": "cd"}\n',
}
REFUSED = {
    "train --data my.txt": f"UTF-8 text (byte 19); convert it first ({CONVERT})",
    "infer --prompt-file my.txt": CONVERT,
    f"tune --weights {SAMPLE} --data u.jsonl --out run": CONVERT,
    "data prepare u.jsonl --tokenizer byte --out shards": CONVERT,
    "train --data u.txt.gz": "u.txt.gz is not UTF-8 text, because it contains zero bytes",
    "train --data my.pdf": PLAIN,
    "train --depth 1 --data my.pdf": PLAIN,
    "data prepare u.txt --tokenizer byte --out shards": CONVERT,
    "tokenizer train my.pdf --kind char --out t.json": PLAIN,
    "train --data bad.jsonl": "bad.jsonl, line 3: not JSON",
    "train --data other.jsonl": "'content' (see",
    "train --data cut.txt.gz": "cut.txt.gz",
    "train --data t.parquet": "t.parquet",
    "train --data x.zip": "unpack it first",
    "train --data empty": "empty has no files that end in",
    "train --data none.jsonl": "no text in none.jsonl",
    "train --data two.jsonl --val-fraction 0.1": "--val-fraction 0.1 of two.jsonl",
    **dict.fromkeys(
        (
            "data prepare pipe.txt --tokenizer byte --out o",
            "data prepare folder --tokenizer byte --out o",
            "data prepare fine.txt --tokenizer pipe.txt --out o",
            "tokenizer train /dev/zero --kind char --out c.json",
            "tokenizer info pipe.txt",
            "train --data pipe.txt --out run",
            "infer --weights pipe.txt",
            "infer --prompt-file /dev/zero",
            "weights import folder/b.jsonl --out w",
        ),
        "regular file",
    ),
}


def test_binary_file_names_are_rejected(tmp_path):
    for ending in chain(*ADVICE):
        (path := tmp_path / f"a{ending}").write_text("text")
        for refuse, *asked in (
            (load_corpus, SerialComm(), DataRequest(str(path))),
            (refuse_missing, [str(path)], "byte"),
            (find_inputs, [path]),
        ):
            with complains(path, "as text"):
                refuse(*asked)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unreadable")
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    (folder / "empty").mkdir()
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe.txt")
    os.mkfifo(folder / "folder" / "b.jsonl")
    return folder


@pytest.mark.parametrize("line", REFUSED)
def test_commands_reject_unreadable_files_with_remedy(place, line):
    found = inside(*line.split(), cwd=place, env={"XDG_CACHE_HOME": str(place / "kept")})
    assert found.returncode == 65 and REFUSED[line] in found.stderr, found.stderr
    assert len(found.stderr.strip().splitlines()) == 1 or "Traceback" not in found.stderr


def test_directory_with_other_encodings_shows_remedy(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_bytes(TEXT.encode("latin-1"))
    words = "train --data texts --n-layer 1 --steps 1 --threads 1 --out run"
    said = inside(*words.split(), cwd=tmp_path).stdout
    counted = "texts: 1 file read; replaced invalid UTF-8 by U+FFFD 200 times"
    assert CONVERT in said and counted in said
    assert counted in inside(*words.split()[:-1], "again", cwd=tmp_path).stdout  # not tokenized again


def test_skipped_files_of_a_directory_are_counted(tmp_path):
    (texts := tmp_path / "texts" / "sub").mkdir(parents=True)
    for name in ("a.txt", "b.md", "rows.csv", "scan.PDF", "old.pdf", "README"):
        (texts / name).write_text("The lamp was lit. " * 9)
    (texts / "empty.txt").touch()
    (texts / ".hidden.bin").touch()
    for words in (
        "train --data texts --n-layer 1 --steps 1 --threads 1",
        "data prepare texts --tokenizer byte --out s",
    ):
        result = succeeded(*words.split(), cwd=tmp_path)
        assert "3 files read, 4 skipped" in result.stdout + result.stderr
