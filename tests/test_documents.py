"""Documents out of files: which are taken, the same from every kind, cut where no tokenizer can notice."""

import gzip
import json
import os
import random
import sys
import threading
import time
from pathlib import Path

import pytest

from distgpt.data.prepare import documents as cutting
from distgpt.data.prepare.documents import Place, documents, parts, pieces
from distgpt.data.prepare.encoding import AHEAD, in_order
from distgpt.data.prepare.inputs import NO_INPUTS, find_inputs
from distgpt.data.tokenizers.naming import load_tokenizer
from distgpt.errors import DataError, StorageError, UsageError

GPT2 = Path(__file__).parents[2] / "shared" / "data" / "gpt2"
needs_gpt2 = pytest.mark.skipif(not GPT2.is_dir(), reason="needs GPT-2's vocab.json and merges.txt")
ALPHABET = (
    "ab'sZé’\"_-. ,!09½²Я中日カ한🙂👩‍👧\u0301\u200b"
    + "  \n\n\t\r\x0b\x0c\x1c\x85\xa0\u2028\u3000\ufeff\ufffd"
)
TEXTS = ["one", "two\nlines é", "3 🙂 中文", "", "last"]


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(cutting, "PIECE", 40)
    monkeypatch.setattr(cutting, "LIMIT", 80)


def random_text(seed, length=3000):
    return "".join(random.Random(seed).choices(ALPHABET, k=length))


def cut(path):
    return list(pieces(find_inputs([path]), "text", Place()))


def texts(path):
    return [part.text for piece in cut(path) for part in parts(piece, "text")]


def lines_of(texts, **more):
    return "".join(json.dumps({"id": 1, "text": text, **more}) + "\n" for text in texts).encode()


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
    data = lines_of(documents) if kind.startswith("jsonl") else "".join(documents).encode()
    path.write_bytes(gzip.compress(data) if kind.endswith("gz") else data)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet"])
def test_every_kind_of_file_gives_the_same_documents(kind, tmp_path):
    path = some_file(tmp_path, kind, TEXTS)
    assert list(documents([path], "text")) == [text for text in TEXTS if text]


@pytest.mark.parametrize("kind", ["txt", "md", "txt.gz", "log"])
def test_a_text_is_one_document(kind, tmp_path):
    path = some_file(tmp_path, kind, TEXTS)
    assert list(documents([path], "text")) == ["".join(TEXTS)]


def test_folders_are_searched_in_order_for_known_endings(tmp_path):
    for name in ("b.txt", "a/z.md", "a/b/c.TXT", "a.txt", "no.dat", ".hidden.txt", ".git/x.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [source.name for source in find_inputs([tmp_path])] == ["a/b/c.TXT", "a/z.md", "a.txt", "b.txt"]
    assert list(documents([tmp_path / "no.dat", tmp_path / "a"], "text")) == ["no.dat", "a/b/c.TXT", "a/z.md"]


@needs_gpt2
@pytest.mark.parametrize("seed", range(4))
def test_the_ids_of_the_pieces_are_those_of_the_whole_text(seed, tmp_path, small_pieces, monkeypatch):
    monkeypatch.setattr(cutting, "LIMIT", 10**6)  # never where it would show
    tokenizer = load_tokenizer(str(GPT2))
    text = random_text(seed)
    (tmp_path / "a.txt").write_bytes(text.encode())
    found = texts(tmp_path / "a.txt")
    assert len(found) > 20
    assert [i for part in found for i in tokenizer.encode(part).tolist()] == tokenizer.encode(
        text.removeprefix("\ufeff").replace("\r\n", "\n")
    ).tolist()


def test_text_without_a_place_to_cut_is_cut_between_characters(tmp_path, small_pieces):
    for unit in ("中文字", "é", "🙂a", "\r\n", " ", "x"):
        data = (unit * 200).encode()
        (tmp_path / "a.txt").write_bytes(data)
        found = cut(tmp_path / "a.txt")
        assert max(len(piece.data[0]) for piece in found) <= 80 and len(found) >= len(data) // 80, unit
        assert "".join(texts(tmp_path / "a.txt")) == (unit * 200).replace("\r\n", "\n"), unit


@pytest.mark.parametrize("seed", range(6))
def test_what_is_no_utf8_is_replaced_and_counted_as_in_the_whole_text(seed, tmp_path, small_pieces):
    source = random.Random(seed)
    raw = b"".join(
        source.choice([b"a b ", b"\r\n", "é中🙂".encode(), b"\xff", b"\xe4\xb8", b"\xef\xbf\xbd", b" "])
        for _ in range(400)
    )
    (tmp_path / "a.txt").write_bytes(raw)
    found = [part for piece in cut(tmp_path / "a.txt") for part in parts(piece, "text")]
    whole = raw.decode("utf-8", "replace")
    assert len(found) > 10
    assert "".join(part.text for part in found) == whole.replace("\r\n", "\n")
    assert sum(p.replaced for p in found) == whole.count("\ufffd") - raw.count(b"\xef\xbf\xbd") > 0


def test_a_byte_order_mark_is_dropped_at_the_beginning_only(tmp_path, small_pieces):
    (tmp_path / "a.txt").write_bytes("\ufeffone\ufeff two ".encode() * 9)
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + lines_of(["\ufeffx"]))
    assert "".join(documents([tmp_path / "a.txt"], "text")) == ("\ufeffone\ufeff two " * 9)[1:]
    assert list(documents([tmp_path / "b.jsonl"], "text")) == ["\ufeffx"]


@pytest.mark.parametrize("kind", ["txt", "txt.gz", "jsonl", "jsonl.gz", "parquet"])
def test_reading_can_go_on_with_any_piece(kind, tmp_path, small_pieces):
    folder = tmp_path / "inputs"
    folder.mkdir()
    path = some_file(folder, kind, [f"document {i} " for i in range(60)])
    inputs = find_inputs([path, path])
    everything = list(pieces(inputs, "text", Place()))
    assert len(everything) > 20
    assert everything[-1].consumed == 2 * path.stat().st_size
    for number, piece in enumerate(everything):
        again = list(pieces(inputs, "text", piece.place))
        assert [p.data for p in again] == [p.data for p in everything[number:]]
        assert [p.begins for p in again] == [p.begins for p in everything[number:]]
        follows = next(pieces(inputs, "text", piece.next), None)
        assert follows is None or follows.data == everything[number + 1].data


def test_a_line_that_is_no_document_is_named(tmp_path, small_pieces):
    for line, message in (
        (b"no", "not JSON: 'no'"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", "not an object with a text under 'text'"),
        (b'{"txt": "a"}', "under 'text'; it has 'txt'"),
        (b'{"text": 3}', "under 'text'"),
        (b'{"text": null}', "under 'text'"),
        (b'{"text": "a"', "not JSON"),
    ):
        (tmp_path / "a.jsonl").write_bytes(lines_of(["fine"] * 9) + b"\n" + line + b"\n")
        with pytest.raises(DataError, match="line 11") as refusal:
            list(documents([tmp_path / "a.jsonl"], "text"))
        said = str(refusal.value)
        assert message in said and "\n" not in said and len(said) < 300, said


def test_half_a_surrogate_pair_in_json_is_replaced(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud83d b \\ud83d\\ude42"}')
    (found,) = [part for piece in cut(tmp_path / "a.jsonl") for part in parts(piece, "text")]
    assert (found.text, found.replaced) == ("a\ufffd b 🙂", 1)


def test_an_endless_line_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(cutting, "LONGEST_LINE", 1000)
    (tmp_path / "a.jsonl").write_bytes(lines_of(["ok", "x" * 2000]))
    with pytest.raises(DataError, match="line 2 is longer than"):
        list(documents([tmp_path / "a.jsonl"], "text"))


@pytest.mark.parametrize(
    "damage", [lambda d: d[:-9], lambda d: d[:30] + b"\0\0\0" + d[33:], lambda d: b"text"]
)
def test_a_damaged_gzip_file_is_refused(damage, tmp_path):
    whole = gzip.compress(random_text(1).encode())
    (tmp_path / "a.txt.gz").write_bytes(damage(whole))
    with pytest.raises(DataError, match=r"a\.txt\.gz is damaged, or not gzip"):
        list(documents([tmp_path / "a.txt.gz"], "text"))


def test_a_table_without_such_texts_is_refused(tmp_path):
    path = parquet(tmp_path / "a.parquet", [[0, 1], ["a", None]])
    for field, message in (("txt", "no column 'txt'.*id, text"), ("id", "int64"), ("text", "row 2 has no")):
        with pytest.raises(DataError, match=message):
            list(documents([path], field))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        list(documents([path], "text"))


def test_a_table_needs_pyarrow_and_says_so(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"pip install 'distgpt\[parquet\]'"):
        list(documents([tmp_path / "a.parquet"], "text"))


def test_what_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(DataError, match="no readable file"):
        find_inputs([tmp_path / "none"])
    with pytest.raises(DataError, match="holds no file that ends in"):
        find_inputs([tmp_path])
    with pytest.raises(DataError, match="no regular file"):
        find_inputs([Path("/dev/null")])
    (tmp_path / "a.txt").write_text("x")
    inputs = find_inputs([tmp_path])
    (tmp_path / "a.txt").unlink()
    with pytest.raises(StorageError, match="No such file"):
        list(pieces(inputs, "text", Place()))


# Which files are taken


def names(folder):
    return [source.name for source in find_inputs([folder])]


def written(path, data=b"text"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def test_an_unreadable_subfolder_is_not_left_out_silently(tmp_path, monkeypatch):
    written(tmp_path / "a.txt")
    written(tmp_path / "locked" / "b.txt")
    scandir = os.scandir

    def refusing(path):  # as the rights would, if tests did not run as root now and then
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(StorageError, match=r"cannot read .*locked: Permission denied"):
        find_inputs([tmp_path])


def test_linked_folders_are_entered_once_and_circles_end(tmp_path):
    written(tmp_path / "inputs" / "a.txt")
    written(tmp_path / "elsewhere" / "b.txt")
    (tmp_path / "inputs" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "inputs" / "more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "inputs")
    assert names(tmp_path / "inputs") == ["a.txt", "linked/b.txt"]


def test_a_link_to_nothing_is_not_left_out_silently(tmp_path):
    written(tmp_path / "a.txt")
    (tmp_path / "b.txt").symlink_to(tmp_path / "none")
    with pytest.raises(StorageError, match=r"b\.txt: No such file"):
        find_inputs([tmp_path])


def test_a_name_that_tells_of_no_text_is_refused_with_advice(tmp_path):
    written(tmp_path / "b.txt")
    for ending, advice in NO_INPUTS.items():
        path = written(tmp_path / f"a{ending}")
        with pytest.raises(DataError, match=f"a{ending} is not read, by the ending of its name: {advice}"):
            find_inputs([path])
    assert names(tmp_path) == ["b.txt"]


@pytest.mark.parametrize("name", ["a.txt", "a.log", "a", "a.txt.gz"])
def test_zero_bytes_at_the_beginning_are_no_text(name, tmp_path):
    utf16 = "text".encode("utf-16")
    path = written(tmp_path / name, gzip.compress(utf16) if name.endswith("gz") else utf16)
    with pytest.raises(DataError, match="is no text in UTF-8: there are zero bytes in it"):
        find_inputs([path])


def test_columns_with_odd_names_are_refused_and_cannot_command_a_terminal(tmp_path):
    for columns, names, message in (
        ([["a"], ["b"]], ["text", "text"], "2 columns that are called 'text'"),
        ([["a"]], ["\x1b[31mred"], r"chooses among \\x1b\[31mred$"),
    ):
        path = parquet(tmp_path / "a.parquet", columns, names)
        with pytest.raises(DataError, match=message):
            list(documents([path], "text"))


# Several workers


def test_no_more_is_read_ahead_than_fits_into_memory(monkeypatch):
    monkeypatch.setattr("distgpt.data.prepare.encoding.LARGEST_QUEUE", 300)
    read = []

    def items():
        for number in range(12):
            read.append(number)
            yield b"x" * 200

    results = in_order(len, items(), len, 2)
    assert next(results) == 200
    assert len(read) == 2 < AHEAD * 2  # one more than fits, so that a single large one passes
    assert list(results) == [200] * 11


@pytest.mark.parametrize("workers", [1, 3])
def test_results_come_in_order_and_an_error_ends_the_work(workers):
    def work(item):
        time.sleep(0.01 * (item == 0))  # the first is the slowest
        if item == 7:
            raise DataError("seven")
        return item

    done, threads = [], threading.active_count()
    with pytest.raises(DataError, match="seven"):
        done.extend(in_order(work, range(20), lambda item: 1, workers))
    assert list(in_order(work, range(6), lambda item: 1, workers)) == [*range(6)]
    assert threading.active_count() == threads


def test_what_is_not_wanted_any_more_is_not_begun():
    begun = []
    results = in_order(lambda item: begun.append(item) or time.sleep(0.05), range(100), lambda item: 1, 2)
    next(results)
    results.close()
    assert len(begun) < AHEAD * 2
