"""Packing: rows against the plain way to find them, what a batch holds, and any step at any time."""

import numpy as np
import pytest
from distgpt.core.base.errors import DataError
from distgpt.core.data.batches import ArrayTokens
from distgpt.corpora import packing
from distgpt.corpora.packing import PackedBatches, document_starts, pack, part_starts

SEPARATOR = 0


def plain(lengths, room):
    """Rows of (document, tokens taken) by best fit, one document after the other."""
    left, rows = sorted(range(len(lengths)), key=lambda i: (lengths[i], i)), []
    while left:
        row, missing = [], room
        while missing and left:
            fitting = [i for i in left if lengths[i] <= missing]
            longest = max((lengths[i] for i in fitting), default=0)
            one = next((i for i in fitting if lengths[i] == longest), left[0])
            row.append((one, min(lengths[one], missing)))
            missing -= row[-1][1]
            left.remove(one)
        rows.append((row, missing))
    return rows


def corpus(lengths, rest=0):
    """Documents that begin with a separator, each with numbers of its own; before them the rest of one."""
    ids = np.arange(1, rest + sum(lengths) + 1, dtype=np.uint16)
    starts = rest + np.append(0, np.cumsum(lengths)[:-1]).astype(np.int64)
    ids[starts] = SEPARATOR
    return ids, starts


def some_lengths(seed):
    draw = np.random.default_rng(seed)
    return draw.integers(1, draw.integers(2, 80), draw.integers(1, 200)).tolist()


def test_rows_are_those_that_the_plain_way_finds():
    cases = [(some_lengths(seed), room) for seed in range(60) for room in (2, 17, 64)]
    for lengths, room in [*cases, ([5], 17), ([90] * 3, 17), ([3] * 100, 12), ([1], 2)]:
        tokens = sum(lengths)
        starts = np.append(0, np.cumsum(lengths)[:-1]).astype(np.int64)
        plan, rows = pack(starts, tokens, room), plain(lengths, room)
        assert len(plan) == len(rows), (lengths, room)
        for number, (row, missing) in enumerate(rows):
            expected = [(int(starts[document]), length) for document, length in row]
            if missing:  # in the last row alone
                assert number == len(rows) - 1
                expected += [(0, tokens)] * (missing // tokens) + [(0, missing % tokens)] * (missing % tokens > 0)
            assert list(plan.row(number)) == expected, (lengths, room, number)
            assert sum(length for _, length in expected) == room
        assert plan.cut_off == tokens - sum(length for row, _ in rows for _, length in row)


def test_documents_begin_at_separators_and_the_rest_of_one_at_zero(monkeypatch):
    monkeypatch.setattr(packing, "AT_ONCE", 7)
    for rest in (0, 5):
        ids, starts = corpus([4, 1, 9, 30, 2], rest)
        found = document_starts(ArrayTokens(ids), SEPARATOR)
        assert found.tolist() == [*[0] * (rest > 0), *starts.tolist()]
    with pytest.raises(DataError, match="the token 9, which separates documents, is not in the corpus"):
        document_starts(ArrayTokens(np.arange(3, dtype=np.uint16)), 9)


def filled(batches, step, rows, seq_len):
    x, y = np.full((2, rows.stop - rows.start, seq_len), -1, np.int32)
    batches.fill(step, rows, x, y)
    return x, y


def test_long_documents_are_cut_into_rows_and_a_rest():
    starts = np.array([0, 4, 21, 55], np.int64)
    assert part_starts(starts, 60, 17).tolist() == [0, 4, 21, 38, 55]
    assert part_starts(starts, 73, 17).tolist() == [0, 4, 21, 38, 55, 72]


def test_each_row_begins_with_a_part_of_a_document_and_an_epoch_holds_every_row_once():
    lengths, seq_len, batch_size = some_lengths(3), 16, 6
    ids, starts = corpus(lengths)
    batches = PackedBatches(ArrayTokens(ids), seq_len, batch_size, 5, SEPARATOR)
    per_epoch = batches.windows_per_epoch
    steps = -(-2 * per_epoch // batch_size)
    got = [filled(batches, step, slice(0, batch_size), seq_len) for step in range(steps)]
    x, y = (np.concatenate(parts)[: 2 * per_epoch] for parts in zip(*got, strict=True))
    parts = ids[part_starts(starts, len(ids), seq_len + 1)]
    assert np.isin(x[:, 0], parts).all() and (x[:, 1:] == y[:, :-1]).all()
    first, second = np.split(np.column_stack([x, y[:, -1]]), [per_epoch])
    assert sorted(first.tolist()) == sorted(second.tolist()) and first.tolist() != second.tolist()
    own = first[first > 0]  # no token but separators is in two rows, except those that fill the last one
    assert per_epoch * (seq_len + 1) >= len(ids) - batches.plan.cut_off > per_epoch * seq_len
    assert len(own) - len(np.unique(own)) <= seq_len


def test_the_seed_and_the_step_decide_whatever_was_asked_before_and_by_how_many_ranks():
    ids, _ = corpus(some_lengths(4), rest=3)
    made = [PackedBatches(ArrayTokens(ids), 9, 8, seed, SEPARATOR) for seed in (1, 1, 2)]
    steps = [10**9, 7, 0, 3]
    whole = {step: filled(made[0], step, slice(0, 8), 9) for step in steps}
    for step in sorted(steps):
        halves = [filled(made[1], step, slice(start, start + 4), 9) for start in (0, 4)]
        assert np.array_equal(np.concatenate(halves, axis=1), whole[step])
    assert not np.array_equal(filled(made[2], 0, slice(0, 8), 9), whole[0])
    made[1].skipped = 4
    assert np.array_equal(filled(made[1], 3, slice(0, 8), 9), whole[7])


@pytest.mark.ci
def test_many_documents_are_packed_at_once():
    """A million of them: one by one, each compared with the others, they would take minutes."""
    lengths = np.random.default_rng(0).integers(1, 2000, 1_000_000)
    starts = np.append(0, np.cumsum(lengths)[:-1])
    plan = pack(starts, int(lengths.sum()), 1025)
    begins = np.unique(plan.starts)
    assert np.array_equal(begins, starts)
    assert np.array_equal(np.add.reduceat(plan.lengths, plan.ends[:-1]), np.full(len(plan), 1025))
