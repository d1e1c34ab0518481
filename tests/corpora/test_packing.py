import numpy as np
import pytest
from complaints import complains
from distgpt.core.config import RunConfig
from distgpt.core.data.batches import ArrayTokens, Batches
from distgpt.corpora import packing
from distgpt.corpora.noise import NoisyBatches
from distgpt.corpora.packing import PackedBatches, document_starts, pack, part_starts
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizing import filled

from conftest import SMALL, inside, refused

SEPARATOR = 0
LENGTHS = st.sampled_from([2, 4, 9, 80]).flatmap(lambda most: st.lists(st.integers(1, most), min_size=1, max_size=120))


def plain(lengths, room):
    """Return rows of (document, tokens taken) by best fit, one document at a time."""
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


def starts_of(lengths):
    return np.append(0, np.cumsum(lengths)[:-1]).astype(np.int64)


def corpus(lengths, rest=0):
    """Return documents of distinct IDs that start with a separator, after the rest of another one."""
    ids, starts = np.arange(1, rest + sum(lengths) + 1, dtype=np.uint16), rest + starts_of(lengths)
    ids[starts] = SEPARATOR
    return ids, starts


@given(LENGTHS, st.integers(2, 64))
@example([90] * 3, 17)
@example([3] * 100, 12)
@example([1, 1, 2, 2, 2, 2, 2], 4)
@example([1], 2)
def test_rows_match_plain_packing(lengths, room):
    tokens, starts = sum(lengths), starts_of(lengths)
    plan, rows = pack(starts, tokens, room), plain(lengths, room)
    assert len(plan) == len(rows)
    for number, (row, missing) in enumerate(rows):
        expected = [(int(starts[document]), length) for document, length in row]
        if missing:  # only in the last row
            assert number == len(rows) - 1
            expected += [(0, tokens)] * (missing // tokens) + [(0, missing % tokens)] * (missing % tokens > 0)
        assert list(plan.row(number)) == expected and sum(length for _, length in expected) == room
    assert plan.cut_off == tokens - sum(length for row, _ in rows for _, length in row)


def test_documents_start_at_separators(monkeypatch):
    monkeypatch.setattr(packing, "AT_ONCE", 7)
    for rest in (0, 5):
        ids, starts = corpus([4, 1, 9, 30, 2], rest)
        found = document_starts(ArrayTokens(ids), SEPARATOR)
        assert found.tolist() == [*[0] * (rest > 0), *starts.tolist()]
    with complains("--pack", "token 9"):
        document_starts(ArrayTokens(np.arange(3, dtype=np.uint16)), 9)
    starts = np.array([0, 4, 21, 55], np.int64)
    assert part_starts(starts, 60, 17).tolist() == [0, 4, 21, 38, 55]
    assert part_starts(starts, 73, 17).tolist() == [0, 4, 21, 38, 55, 72]


@given(LENGTHS, st.integers(2, 20), st.integers(1, 9))
def test_epoch_has_every_row_once(lengths, seq_len, batch_size):
    ids, starts = corpus(lengths)
    batches = PackedBatches(ArrayTokens(ids), seq_len, batch_size, 5, SEPARATOR)
    per_epoch = batches.windows_per_epoch
    got = [filled(batches, step, slice(0, batch_size)) for step in range(-(-2 * per_epoch // batch_size))]
    x, y = (np.concatenate(parts)[: 2 * per_epoch] for parts in zip(*got, strict=True))
    parts = ids[part_starts(starts, len(ids), seq_len + 1)]
    assert np.isin(x[:, 0], parts).all() and (x[:, 1:] == y[:, :-1]).all()
    first, second = np.split(np.column_stack([x, y[:, -1]]), [per_epoch])
    assert sorted(first.tolist()) == sorted(second.tolist())
    assert per_epoch < 20 or first.tolist() != second.tolist()
    own = first[first > 0]  # only separators and the last row's filling repeat
    if len(ids) > seq_len:
        assert per_epoch * (seq_len + 1) >= len(ids) - batches.plan.cut_off > (per_epoch - 1) * (seq_len + 1)
        assert len(own) - len(np.unique(own)) <= seq_len


def test_seed_and_step_determine_batches():
    ids, _ = corpus(np.random.default_rng(4).integers(1, 60, 150).tolist(), rest=3)
    made = [PackedBatches(ArrayTokens(ids), 9, 8, seed, SEPARATOR) for seed in (1, 1, 2)]
    steps = [10**9, 7, 0, 3]
    whole = {step: filled(made[0], step, slice(0, 8)) for step in steps}
    for step in sorted(steps):
        halves = [filled(made[1], step, slice(start, start + 4)) for start in (0, 4)]
        assert np.array_equal(np.concatenate(halves, axis=1), whole[step])
    assert not np.array_equal(filled(made[2], 0, slice(0, 8)), whole[0])
    made[1].skipped = 4
    assert np.array_equal(filled(made[1], 3, slice(0, 8)), whole[7])


@pytest.mark.ci
def test_many_documents_are_packed_quickly():
    """A million documents would take minutes if each were compared with the others."""
    lengths = np.random.default_rng(0).integers(1, 2000, 1_000_000)
    plan = pack(starts_of(lengths), int(lengths.sum()), 1025)
    assert np.array_equal(np.unique(plan.starts), starts_of(lengths))
    assert np.array_equal(np.add.reduceat(plan.lengths, plan.ends[:-1]), np.full(len(plan), 1025))


IDS = np.random.default_rng(2).integers(0, 500, 3000, np.uint32)
ROWS = slice(0, 40)


def batches(kind, seed=3):
    run = RunConfig().with_values({"seq_len": 50, "batch_size": 40, "input_noise": 0.2, "seed": seed})
    return kind.of_run(ArrayTokens(IDS), run)


def test_noise_replaces_inputs_by_tokens_of_their_sequence():
    plain, noisy = batches(Batches), batches(NoisyBatches)
    changed, places = [], set()
    for step in range(20):
        (x, y), (noisy_x, noisy_y) = filled(plain, step, ROWS), filled(noisy, step, ROWS)
        assert np.array_equal(y, noisy_y)
        assert all(set(row) <= set(own) for row, own in zip(noisy_x, x, strict=True))
        changed.append((x != noisy_x).mean())
        places.add((x != noisy_x).tobytes())
    assert len(places) == 20
    # One replacement in 50 chooses the token itself, and a few find an equal one.
    assert np.mean(changed) == pytest.approx(0.2 * 49 / 50, abs=0.01)


def test_noise_depends_only_on_seed_and_number_of_the_sequence():
    noisy, whole = batches(NoisyBatches), filled(batches(NoisyBatches), 7, ROWS)[0]
    assert np.array_equal(filled(noisy, 7, slice(10, 30))[0], whole[10:30])
    noisy.skipped = 7
    assert np.array_equal(filled(noisy, 0, ROWS)[0], whole)
    assert not np.array_equal(filled(batches(NoisyBatches, seed=4), 7, ROWS)[0], whole)


def test_noise_and_packing_are_rejected(tmp_path):
    words = ["train", *SMALL, "--set", "input_noise=0.1", "--pack", "--out", tmp_path / "none"]
    refused(inside(*words), 2, "input_noise and --pack")
