import gzip
import json
import random
import sys
import tempfile
import threading
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from complaints import complains
from disks import unprivileged
from distgpt.core.base.errors import DataError, StorageError, UsageError
from distgpt.core.config import RunConfig
from distgpt.core.data.batches import ArrayTokens, Batches
from distgpt.corpora import packing
from distgpt.corpora.noise import NoisyBatches
from distgpt.corpora.packing import PackedBatches, document_starts, pack, part_starts
from distgpt.corpora.prepare import documents as cutting
from distgpt.corpora.prepare import preparing
from distgpt.corpora.prepare.documents import Offset, documents, find_inputs, parts, pieces
from distgpt.corpora.prepare.preparing import AHEAD, in_order
from distgpt.corpora.tokenizers.bpe import learn_bpe
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizing import filled, gpt2, needs_gpt2

from conftest import SMALL, inside, refused

ALPHABET = "ab'sZé’\"_-. ,!09½²Я中日カ한🙂👩‍👧\u0301\u200b" + "  \n\n\t\r\x0b\x0c\x1c\x85\xa0\u2028\u3000\ufeff\ufffd"
TEXTS = ["one", "two\nlines é", "3 🙂 中文", "", "last"]


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(cutting, "PIECE", 40)
    monkeypatch.setattr(cutting, "LIMIT", 80)
    monkeypatch.setattr(cutting, "ROWS_AT_ONCE", 3)


def random_text(seed, length=3000):
    return "".join(random.Random(seed).choices(ALPHABET, k=length))


def parts_of(path):
    return [part for piece in pieces(find_inputs([path]), "text", Offset()) for part in parts(piece, "text")]


def lines_of(texts):
    return "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts).encode()


def written(path, data=b"text"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.name.endswith("gz") else data)
    return path


def parquet(path, columns, names=("id", "text"), **options):
    arrow = pytest.importorskip("pyarrow")
    writer = pytest.importorskip("pyarrow.parquet")
    table = arrow.Table.from_arrays([arrow.array(column) for column in columns], names)
    writer.write_table(table, path, **options)
    return path


def some_file(folder, kind, documents):
    path = folder / f"some.{kind}"
    if kind == "parquet":
        return parquet(path, [range(len(documents)), documents], row_group_size=7)
    return written(path, lines_of(documents) if "jsonl" in kind else "".join(documents).encode())


def refuse(error, words, path, field="text", **how):
    with complains(*([words] if isinstance(words, str) else words), kind=error):
        list(documents([path], field, **how))


def test_file_kinds_give_equal_documents(tmp_path):
    for kind in ("jsonl", "jsonl.gz", "parquet", "txt", "md", "txt.gz", "log"):
        expected = [text for text in TEXTS if text] if kind[:1] in "jp" else ["".join(TEXTS)]
        assert list(documents([some_file(tmp_path, kind, TEXTS)], "text")) == expected, kind


@needs_gpt2
@pytest.mark.parametrize("seed", range(4))
def test_pieces_have_ids_of_whole_text(tmp_path, small_pieces, monkeypatch, seed):
    monkeypatch.setattr(cutting, "LIMIT", 10**6)  # no forced cuts
    text = random_text(seed)
    found = [text for text, _ in parts_of(written(tmp_path / "a.txt", text.encode()))]
    whole = text.removeprefix("\ufeff").replace("\r\n", "\n")
    assert len(found) > 20
    assert [i for part in found for i in gpt2().encode(part).tolist()] == gpt2().encode(whole).tolist()


SOME = [b"a b ", b"\r\n", "é中🙂".encode(), b"\xff", b"\xe4\xb8", b"\xef\xbf\xbd", b" "]
UNITS = [unit.encode() * 200 for unit in ("中文字", "é", "🙂a", "\r\n", " ", "x", "\ufeff")]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(SOME), max_size=400).map(b"".join) | st.sampled_from(UNITS))
def test_pieces_join_to_whole_text(tmp_path, small_pieces, raw):
    path = written(tmp_path / "a.txt", raw or b"x")
    whole, found = path.read_bytes().decode("utf-8", "replace"), parts_of(path)
    assert "".join(text for text, _ in found) == whole.removeprefix("\ufeff").replace("\r\n", "\n")
    assert sum(broken for _, broken in found) == whole.count("\ufffd") - raw.count(b"\xef\xbf\xbd")
    sizes = [piece.size() for piece in pieces(find_inputs([path]), "text", Offset())]
    assert max(sizes) <= 80 and len(sizes) >= len(raw) // 80


def test_surrogates_are_replaced_and_marks_dropped(tmp_path, small_pieces):
    (half_a_pair,) = parts_of(written(tmp_path / "a.jsonl", rb'{"text": "a\ud83d b \ud83d\ude42"}'))
    assert half_a_pair == ("a\ufffd b 🙂", 1)
    text = written(tmp_path / "a.txt", "\ufeffone\ufeff two ".encode() * 9)
    lines = written(tmp_path / "b.jsonl", b"\xef\xbb\xbf" + lines_of(["\ufeffx"]))
    assert "".join(documents([text], "text")) == ("\ufeffone\ufeff two " * 9)[1:]
    assert list(documents([lines], "text")) == ["\ufeffx"]


@pytest.mark.parametrize("kind", ["txt", "txt.gz", "jsonl", "jsonl.gz", "parquet"])
def test_reading_resumes_at_any_piece(kind, tmp_path, small_pieces):
    path = some_file(tmp_path, kind, [f"document {i} " for i in range(60)])
    inputs = find_inputs([path, path])
    everything = list(pieces(inputs, "text", Offset()))
    assert len(everything) > 20 and everything[-1].consumed == 2 * path.stat().st_size
    beginning = [number for number, piece in enumerate(everything) if piece.begins]
    assert beginning == ([0, len(everything) // 2] if "txt" in kind else [*range(len(everything))])
    for number, piece in enumerate(everything):
        again = list(pieces(inputs, "text", piece.place))
        assert [(p.data, p.begins) for p in again] == [(p.data, p.begins) for p in everything[number:]]
        follows = next(pieces(inputs, "text", piece.next), None)
        assert follows is None or follows.data == everything[number + 1].data


def test_invalid_line_or_row_is_named(tmp_path, small_pieces):
    for line, message in (
        (b"no", "not JSON: 'no'"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", "not an object with a string 'text'"),
        (b'{"txt": "a"}', "a string 'text'; it has 'txt'"),
        (b'{"text": 3}', "a string 'text'"),
        (b'{"text": null}', "a string 'text'"),
        (b'{"text": "a"', "not JSON"),
    ):
        path = written(tmp_path / "a.jsonl", lines_of(["fine"] * 9) + b"\n" + line + b"\n")
        refuse(DataError, ("line 11: ", message), path)
    for long, where in (
        (written(path, lines_of(["ok", "x" * 3000])), "line 2"),
        (parquet(tmp_path / "a.parquet", [["fine", "x" * 3000]], ["text"]), "row 2"),
    ):
        refuse(DataError, (where, "1.953 KiB", "--max-document"), long, max_document=2000)


def test_corrupt_gzip_or_table_is_rejected(tmp_path, monkeypatch):
    whole = gzip.compress(random_text(1).encode())
    for damaged in (whole[:-9], whole[:30] + b"\0\0\0" + whole[33:], b"text"):
        (tmp_path / "a.txt.gz").write_bytes(damaged)
        refuse(DataError, "a.txt.gz is corrupt, or not gzip", tmp_path / "a.txt.gz")
    path = tmp_path / "a.parquet"
    for columns, names, field, *words in (
        ([["a"]], ["\x1b[31mred"], "text", "--field", r" \x1b[31mred"),
        ([[0, 1], ["a", None]], ["id", "text"], "txt", "no column 'txt'", "id, text"),
        ([[0, 1], ["a", None]], ["id", "text"], "id", "int64"),
        ([[0, 1], ["a", None]], ["id", "text"], "text", "row 2 has no"),
    ):
        refuse(DataError, words, parquet(path, columns, names), field)
    path.write_bytes(path.read_bytes()[:-20])
    refuse(DataError, "as Parquet", path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refuse(UsageError, "pip install 'distgpt[parquet]'", path)


def names(folder):
    return [source.name for source in find_inputs([folder])]


def test_directories_are_searched_in_order(tmp_path):
    for name in ("b.txt", "a/z.md", "a/b/c.TXT", "a.txt", "no.dat", ".hidden.txt", ".git/x.txt"):
        written(tmp_path / name, name.encode())
    assert names(tmp_path) == ["a/b/c.TXT", "a/z.md", "a.txt", "b.txt"]
    assert list(documents([tmp_path / "no.dat", tmp_path / "a"], "text")) == ["no.dat", "a/b/c.TXT", "a/z.md"]


def test_linked_directories_are_entered_once(tmp_path):
    inputs, elsewhere = tmp_path / "inputs", tmp_path / "elsewhere"
    written(inputs / "a.txt")
    written(elsewhere / "b.txt")
    for link, there in (("inputs/linked", elsewhere), ("inputs/more", elsewhere), ("elsewhere/back", inputs)):
        (tmp_path / link).symlink_to(there)
    assert names(inputs) == ["a.txt", "linked/b.txt"]


def test_unreadable_inputs_are_rejected(tmp_path, monkeypatch):
    refuse(DataError, "not a file", tmp_path / "none")
    refuse(DataError, "has no files that end in", tmp_path)
    refuse(DataError, "not a regular file", Path("/dev/null"))
    for name in ("a.txt", "a.log", "a", "a.txt.gz"):
        path = written(tmp_path / name, "text".encode("utf-16"))
        refuse(DataError, "is not UTF-8 text, because it contains zero bytes", path)
        path.unlink()
    inputs = find_inputs([path := written(tmp_path / "gone.txt")])
    path.unlink()
    with complains("No such file", kind=StorageError):
        list(pieces(inputs, "text", Offset()))
    (link := tmp_path / "b.txt").symlink_to(tmp_path / "none")
    refuse(StorageError, "b.txt: No such file", tmp_path)
    link.unlink()
    with tempfile.TemporaryDirectory() as name:  # accessible to other users
        Path(name).chmod(0o755)
        written(Path(name, "locked", "b.txt")).parent.chmod(0o000)
        with unprivileged():
            refuse(StorageError, "locked: Permission denied", Path(name))


def test_results_keep_order_with_few_in_flight(monkeypatch):
    monkeypatch.setattr(preparing, "LARGEST_QUEUE", 300)
    read, begun, done, threads = [], [], [], threading.active_count()

    def items():
        for number in range(12):
            read.append(number)
            yield number

    results = in_order(lambda item: item, items(), lambda item: 200, 2)
    assert next(results) == 0 and len(read) == 2 < AHEAD * 2  # one more than fits, so that a single large one passes
    assert list(results) == [*range(1, 12)]

    def work(item):
        begun.append(item)
        time.sleep(0.01 * (item == 0))  # the first is the slowest
        if item == 7:
            raise DataError("seven")
        return item

    with pytest.raises(DataError, match="seven"):
        done.extend(in_order(work, range(100), lambda item: 1, 3))
    assert done == [*range(7)] and len(begun) < 50 and threading.active_count() == threads


def test_gzip_bomb_is_rejected_in_bounded_memory(tmp_path):
    path = written(tmp_path / "a.jsonl.gz", b'{"text": "fine"}\n{"text": "' + b"a" * (64 << 20) + b'"}\n')
    tracemalloc.start()
    with pytest.raises(DataError, match=r"a\.jsonl\.gz, line 2 is longer than 1 MiB; raise --max-document"):
        list(documents([path], "text", 1 << 20))
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


MANY = 64  # rows
BOMBS = {
    "in its dictionary": ({}, 8, MANY, "row 1, is longer than 1 MiB; raise --max-document", 40),
    "in a dictionary that pandas made": ({"typed": True}, 8, MANY, "row 1, is longer than 1 MiB", 40),
    "of prefixes": ({"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}}, 0.9, MANY, "", 8),
    "plain": ({"use_dictionary": False}, 32, 1, "an entry of row group 0 is longer than 1 MiB", 1),
}


@pytest.mark.ci
@pytest.mark.parametrize("kind", BOMBS)
def test_repetitive_table_is_read_in_bounded_memory(kind, tmp_path):
    arrow = pytest.importorskip("pyarrow")
    options, megabytes, rows, message, most = BOMBS[kind]
    options = {"compression": "zstd", "store_schema": "typed" in options, **options}
    texts = arrow.DictionaryArray.from_arrays(arrow.array([0] * rows), ["x" * int(megabytes * (1 << 20))])
    if not options.pop("typed", False):
        texts = texts.cast(arrow.large_string())
    path = parquet(tmp_path / "a.parquet", [texts], ["text"], **options)
    assert path.stat().st_size < 8192
    arrow.set_memory_pool(counting := arrow.proxy_memory_pool(former := arrow.default_memory_pool()))
    try:
        found = documents([path], "text", 1 << 20)
        if message:
            with pytest.raises(DataError, match=message):
                list(found)
        else:
            assert sum(map(len, found)) == rows * int(megabytes * (1 << 20))
        assert counting.max_memory() < most << 20
    finally:
        arrow.set_memory_pool(former)


def test_dictionary_column_gives_its_documents(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    texts = [random_text(seed, 20) for seed in range(5)] * 40
    column = arrow.array(texts).dictionary_encode()
    path = parquet(tmp_path / "a.parquet", [column], ["text"], row_group_size=90)
    assert "".join(text for text, _ in parts_of(path)) == "".join(texts).replace("\r\n", "\n")
    column = arrow.array(["a", None]).dictionary_encode()
    refuse(DataError, "row 2 has no 'text'", parquet(path, [column], ["text"]))


@pytest.mark.parametrize("text", ["harbour" * 60_000, " " * 400_000], ids=["letters", "blanks"])
def test_learning_without_blanks_takes_linear_time(text):
    pytest.importorskip("tokenizers")
    begun = time.monotonic()
    learned = learn_bpe([text, "harbour lamps " * 50], 400, 2, "last")
    assert time.monotonic() - begun < 10  # it was minutes
    assert learned.decode(learned.encode(text)) == text


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
