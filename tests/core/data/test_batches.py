"""From a file to batches: reading, the seeded order of windows, and the share of every rank."""

import gzip
import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from distgpt.core.base.errors import DataError, UsageError
from distgpt.core.base.files import bundled
from distgpt.core.data.batches import SAMPLE_PIECE, ArrayTokens, Batches, rank_sequences, shuffled
from distgpt.core.data.loading import DataRequest, load_corpus, read_text
from distgpt.core.data.textfile import BUNDLED_TEXTS, resolve_data
from distgpt.core.data.tokenizers import load_tokenizer
from threadranks import on_all_ranks
from tokenizing import STORY

SEED = 1337


def filled(batches, step, rows, seq_len):
    x, y = np.full((2, rows.stop - rows.start, seq_len), -1, np.int32)
    batches.fill(step, rows, x, y)
    return x, y


def starts(batches, step, batch_size):
    """Where the sequences of a step begin, in a text whose tokens are their own positions."""
    x, _ = filled(batches, step, slice(0, batch_size), batches.seq_len)
    return x[:, 0]


# The order of the windows


def permutation(count, key=1):
    place = np.arange(count, dtype=np.uint64)
    return shuffled(place, np.full(count, key, np.uint64), count)


def test_the_order_holds_every_window_once():
    for count in [*range(1, 100), 1023, 1024, 1025, 65_521, 100_003]:
        for key in (0, 1, 2**64 - 1):
            assert np.array_equal(np.sort(permutation(count, key)), np.arange(count)), (count, key)


def test_the_order_is_exact_for_huge_corpora():
    for count in (2**40, 2**40 - 1, 2**40 - 87, 2**20 * (2**20 - 1) + 1):
        ends = np.concatenate([np.arange(50_000), np.arange(count - 50_000, count)]).astype(np.uint64)
        found = shuffled(ends, np.full(ends.size, 7, np.uint64), count)
        assert np.unique(found).size == ends.size, count
        assert found.max() < count
        assert abs(found.astype(np.float64).mean() / count - 0.5) < 0.01, count


def test_the_orders_of_few_windows_come_up_equally_often_and_neighbours_are_torn_apart():
    epochs, count = 6000, 3
    place = np.tile(np.arange(count, dtype=np.uint64), epochs)
    key = np.repeat(np.random.default_rng(0).integers(0, 2**63, epochs).astype(np.uint64), count)
    _, seen = np.unique(shuffled(place, key, count).reshape(epochs, count), axis=0, return_counts=True)
    assert seen.size == 6 and seen.min() > 800 and seen.max() < 1200
    order = permutation(10_000).astype(np.int64)
    assert np.mean(np.abs(np.diff(order)) == 1) < 0.002
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.05


def test_an_epoch_covers_the_ring_and_repeats_no_window():
    epochs = 6
    for length, seq_len, batch_size in ((1000, 7, 4), (96, 8, 3), (50, 16, 16), (5, 8, 2)):
        batches = Batches(ArrayTokens(np.arange(length, dtype=np.uint16)), seq_len, batch_size, SEED)
        per_epoch = batches.windows_per_epoch
        assert per_epoch == -(-length // seq_len)
        steps = range(-(-epochs * per_epoch // batch_size))
        found = np.concatenate([starts(batches, step, batch_size) for step in steps])[: epochs * per_epoch]
        shifts = set()
        for epoch in found.reshape(epochs, per_epoch):
            covered = (epoch[:, None] + np.arange(seq_len)) % length
            assert np.unique(epoch).size == per_epoch, length
            assert np.unique(covered).size == length and covered.size - length < seq_len
            shifts.add(int(epoch.min()))
        assert len(shifts) > 1


def test_fixed_windows_begin_at_the_same_places_in_every_epoch():
    batches = Batches(ArrayTokens(np.arange(100, dtype=np.uint16)), 16, 7, SEED, shift=False)
    epochs = [starts(batches, step, 7).tolist() for step in range(4)]
    assert {tuple(sorted(epoch)) for epoch in epochs} == {tuple(range(0, 100, 16))} and epochs[0] != epochs[1]


def test_the_seed_and_the_step_decide_and_nothing_else():
    tokens = np.arange(5000, dtype=np.uint16)
    batches = Batches(ArrayTokens(tokens), 16, 8, SEED)
    forward = [starts(batches, step, 8).tolist() for step in range(20)]
    backward = [starts(batches, step, 8).tolist() for step in reversed(range(20))]
    assert forward == backward[::-1]
    assert starts(Batches(ArrayTokens(tokens), 16, 8, SEED + 1), 0, 8).tolist() != forward[0]
    late = starts(Batches(ArrayTokens(tokens), 16, 8, 2**64 + 5), 2**40, 8)
    assert late.min() >= 0 and late.max() < 5000
    golden = Batches(ArrayTokens(np.arange(1308, dtype=np.uint16)), 16, 4, 1337)
    written_down = [[901, 1221, 21, 101], [133, 261, 837, 453], [642, 1186, 1138, 834]]
    assert [starts(golden, step, 4).tolist() for step in (0, 1, 1000)] == written_down


# What a batch holds


def test_targets_are_the_next_tokens_around_the_ring():
    for length, seq_len in ((100, 7), (100, 99), (100, 100), (9, 32), (2, 5), (2, 1)):
        dtype, most = (np.uint32, 10**6) if length > seq_len + 1 else (np.uint16, 60_000)
        tokens = np.random.default_rng(0).integers(0, most, length).astype(dtype)
        batches = Batches(ArrayTokens(tokens), seq_len, 5, SEED)
        positions = Batches(ArrayTokens(np.arange(length, dtype=np.uint16)), seq_len, 5, SEED)
        for step in range(8):
            x, y = filled(batches, step, slice(0, 5), seq_len)
            expected = tokens[(starts(positions, step, 5)[:, None] + np.arange(seq_len + 1)) % length]
            assert np.array_equal(x, expected[:, :-1]) and np.array_equal(y, expected[:, 1:])


def test_any_number_of_ranks_sees_the_same_global_batch():
    tokens = np.random.default_rng(1).integers(0, 500, 700).astype(np.uint16)
    batch_size, seq_len, step = 24, 9, 5
    batches = Batches(ArrayTokens(tokens), seq_len, batch_size, SEED)
    x, y = filled(batches, step, slice(0, batch_size), seq_len)
    for size, grad_accum in ((1, 1), (2, 1), (4, 1), (1, 3), (2, 3), (4, 3)):
        taken = []
        for micro_batch, rank in itertools.product(range(grad_accum), range(size)):
            rows = rank_sequences(batch_size, rank, size, micro_batch, grad_accum)
            own_x, own_y = filled(batches, step, rows, seq_len)
            assert np.array_equal(own_x, x[rows]) and np.array_equal(own_y, y[rows]), (size, rows)
            taken += range(batch_size)[rows]
        assert taken == list(range(batch_size)), (size, grad_accum)


def test_a_sample_is_the_text_or_pieces_of_it_at_even_distances():
    tokens = np.arange(3 * SAMPLE_PIECE, dtype=np.uint32)
    batches = Batches(ArrayTokens(tokens), 16, 4, SEED)
    assert np.array_equal(batches.sample(len(tokens)), tokens)
    for most, begins in ((2 * SAMPLE_PIECE, [0, 2 * SAMPLE_PIECE]), (1000, [0]), (SAMPLE_PIECE, [0])):
        found = batches.sample(most).reshape(len(begins), -1)
        assert found.size == most and found[:, 0].tolist() == begins
        assert np.array_equal(found - found[:, :1], np.arange(found.shape[1])[None].repeat(len(begins), 0))


def test_an_uneven_batch_is_refused_with_the_nearest_that_work():
    for batch_size, size, grad_accum, advice in (
        (16, 3, 1, "3 ranks × 1 micro-batch; the nearest that can: 15 or 18"),
        (5, 2, 4, "can: 8"),
        (20, 4, 2, "16 or 24"),
    ):
        with pytest.raises(UsageError, match=advice):
            rank_sequences(batch_size, 0, size, 0, grad_accum)


# Reading


def test_text_is_read_without_mark_and_carriage_returns_or_refused(tmp_path):
    path = tmp_path / "file"
    path.write_bytes("\ufeffone\r\ntwo é\n".encode())
    assert read_text(path) == "one\ntwo é\n"
    for content, message in (
        (b"", "is empty"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"\xef\xbb\xbfab\xffc", "byte 5"),
        (b"ok\xe2\x82", "byte 2"),
        (gzip.compress(b"text"), "is not UTF-8 text"),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"{path} .*{message}"):
            read_text(path)
    for unreadable in (tmp_path, tmp_path / "missing", path / "below", tmp_path / ("x" * 300), Path("nul\0")):
        with pytest.raises(DataError, match=r"cannot be read|is a folder"):
            read_text(unreadable)


def test_data_is_a_bundled_name_or_a_path(tmp_path):
    for name in BUNDLED_TEXTS:
        assert len(read_text(resolve_data(name))) > 4000
    with pytest.raises(DataError, match=r"weights/nothing\.bin is missing"):
        bundled("weights", "nothing.bin")
    path = tmp_path / "mine.txt"
    path.write_text("text")
    assert resolve_data(str(path)) == path
    for word, hint in (("stroy", "'stroy'.*did you mean 'story'.*"), ("nul\0", ""), ("x" * 300, "")):
        with pytest.raises(DataError, match=f"{hint}corpus, names, story"):
            resolve_data(word)


# Loading on every rank


def loaded(ranks, *asked, **more):
    """What loading gives, or raises, on each of so many ranks."""
    return on_all_ranks(ranks, lambda comm: load_corpus(comm, DataRequest(*asked, **more)))


def whole(tokens):
    return tokens.read(0, len(tokens))


def test_every_rank_gets_the_tokens_of_rank_zero(tmp_path):
    for kind, ranks in itertools.product(["byte", "char", "word"], [1, 2, 4]):
        expected = load_tokenizer(kind, STORY)
        for corpus in loaded(ranks, "story", kind, 64):
            tokens = whole(corpus.train)
            assert corpus.tokenizer.to_json() == expected.to_json()
            assert corpus.val is None and tokens.dtype == np.uint16
            assert np.array_equal(tokens, expected.encode(STORY)), (kind, ranks)
    (path := tmp_path / "text.txt").write_text("ab" * 40)
    places = (str(path), "nowhere")  # only rank 0 touches the file
    corpora = on_all_ranks(2, lambda comm: load_corpus(comm, DataRequest(places[comm.rank], "char", 8)))
    assert [len(corpus.train) for corpus in corpora] == [80, 80]
    mine = load_tokenizer("char", STORY + "äöü")  # of a model that there is already
    (corpus,) = loaded(1, "story", "auto", 8, existing=mine)
    assert corpus.tokenizer.to_json() == mine.to_json()
    assert corpus.tokenizer.decode(whole(corpus.train)) == STORY


def test_the_first_part_of_a_text_is_held_out(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("0123456789" * 4)
    for corpus in loaded(2, str(path), "char", 8, 0.1):
        assert corpus.tokenizer.decode(whole(corpus.val)) == "0123"
        assert corpus.tokenizer.decode(whole(corpus.train)) == ("0123456789" * 4)[4:]
        assert corpus.train.fingerprint != corpus.val.fingerprint


def test_what_rank_zero_finds_wrong_is_raised_on_all(tmp_path):
    path, known = tmp_path / "text.txt", tmp_path / "known.json"
    known.write_text(load_tokenizer("word", "some").to_json())
    for content, choice, kind, message in (
        (None, "char", DataError, "no readable file"),
        ("x", "char", DataError, "1 token"),
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
