"""Documents out of files: the same from every kind of file, and cut where no tokenizer can notice."""

import gzip
import json
import random
import sys
from pathlib import Path

import pytest

from distgpt.data.prepare import documents as cutting
from distgpt.data.prepare.documents import Place, documents, parts, pieces
from distgpt.data.prepare.inputs import find_inputs
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


def parquet(path, column, **options):
    arrow = pytest.importorskip("pyarrow")
    writer = pytest.importorskip("pyarrow.parquet")
    writer.write_table(arrow.table({"id": list(range(len(column))), "text": column}), path, **options)
    return path


def some_file(folder, kind, documents):
    path = folder / f"some.{kind}"
    if kind == "parquet":
        return parquet(path, documents, row_group_size=7)
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


@pytest.mark.parametrize("unit", ["中文字", "é", "🙂a", "\r\n", " ", "x"])
def test_text_without_a_place_to_cut_is_cut_between_characters(unit, tmp_path, small_pieces):
    (tmp_path / "a.txt").write_bytes((unit * 200).encode())
    found = cut(tmp_path / "a.txt")
    assert all(len(piece.data[0]) <= 80 for piece in found)
    assert len(found) >= len((unit * 200).encode()) // 80
    assert "".join(texts(tmp_path / "a.txt")) == (unit * 200).replace("\r\n", "\n")


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


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"no", "not JSON: 'no'"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", "not an object with a text under 'text'"),
        (b'{"txt": "a"}', "under 'text'; it has 'txt'"),
        (b'{"text": 3}', "under 'text'"),
        (b'{"text": null}', "under 'text'"),
        (b'{"text": "a"', "not JSON"),
    ],
)
def test_a_line_that_is_no_document_is_named(line, message, tmp_path, small_pieces):
    (tmp_path / "a.jsonl").write_bytes(lines_of(["fine"] * 9) + b"\n" + line + b"\n")
    with pytest.raises(DataError, match="line 11") as refusal:
        list(documents([tmp_path / "a.jsonl"], "text"))
    assert message in str(refusal.value) and "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 300


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
    path = parquet(tmp_path / "a.parquet", ["a", None])
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
