"""Files that are no text in UTF-8: what they are taken for, and commands that make texts of them."""

import gzip
import shutil
import subprocess

import pytest
from conftest import inside

from distgpt.core.base.errors import DataError
from distgpt.core.base.files import bundled
from distgpt.core.comm.serial import SerialComm
from distgpt.core.data.loading import DataRequest, load_corpus, refuse_missing
from distgpt.core.data.textfile import ADVICE, read_text, remedy
from distgpt.corpora.prepare.documents import find_inputs

TEXT = (
    "Es war einmal ein König, der hatte schöne Töchter; die jüngste war so schön, daß die Sonne staunte.\n"
    * 40
)
CYRILLIC = "Жили-были старик со старухой у самого синего моря.\n" * 40

SAMPLE = bundled("weights", "sample.safetensors")

# The bytes of a file, and what the message names.
ENCODED = {
    "latin-1": (TEXT.encode("latin-1"), "Latin-1: iconv -f WINDOWS-1252 "),
    "utf-16": (TEXT.encode("utf-16"), "UTF-16: iconv -f UTF-16 "),
    "utf-16-le": (TEXT.encode("utf-16-le"), "UTF-16: iconv -f UTF-16LE "),
    "utf-16-be": (TEXT.encode("utf-16-be"), "UTF-16: iconv -f UTF-16BE "),
    "damaged": (TEXT[:999].encode() + b"\xff" + TEXT[999:].encode(), "damaged places: iconv -c -f UTF-8 "),
    "cp1251": (CYRILLIC.encode("cp1251"), "another encoding (iconv -l lists them): iconv -f ENCODING "),
}


@pytest.mark.skipif(not shutil.which("iconv"), reason="needs iconv")
@pytest.mark.parametrize("name", ENCODED)
def test_the_command_that_an_error_names_makes_the_text(name, tmp_path):
    content, words = ENCODED[name]
    path = tmp_path / "it's mine.txt"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_text(path)
    said = str(caught.value)
    assert words in said and said.startswith(f"{path} is not UTF-8 text, byte ")
    command = said[said.index("iconv -c" if name == "damaged" else "iconv -f") :]
    subprocess.run(["sh", "-c", command.replace("ENCODING", name)], check=name != "damaged")
    made = read_text(tmp_path / "it's mine-utf8.txt")
    assert made == (CYRILLIC if name == "cp1251" else TEXT)
    piped = remedy(None, content, 40)
    assert "iconv" in piped and str(path) not in piped


def test_a_file_that_is_no_text_by_its_name_is_refused(tmp_path):
    for ending in ADVICE:
        path = tmp_path / f"a{ending}"
        path.write_text("text")
        for refuse in (
            lambda: load_corpus(SerialComm(), DataRequest(str(path))),  # noqa: B023
            lambda: refuse_missing([str(path)], "byte"),  # noqa: B023
            lambda: find_inputs([path]),  # noqa: B023
        ):
            with pytest.raises(DataError, match="is not read, by the ending of its name: "):
                refuse()


def test_files_of_other_kinds_are_known_by_how_they_begin(tmp_path):
    for start, words in {
        b"%PDF-1.7\n\xe2\xe3": "a pdf file: pdftotext ",
        b"PK\x03\x04\xff": "a zip file: unpack it first: unzip ",
        gzip.compress(b"hello"): "compressed: unpack it first, or let its name end in .txt.gz",
        bytes(range(200)): "no text at all",
    }.items():
        (tmp_path / "letter").write_bytes(start)
        with pytest.raises(DataError, match=words):
            read_text(tmp_path / "letter")


def test_every_command_that_reads_texts_names_the_way_out(tmp_path):
    (tmp_path / "my.txt").write_bytes(TEXT.encode("latin-1"))
    (tmp_path / "u.txt").write_bytes(TEXT.encode("utf-16"))
    (tmp_path / "u.jsonl").write_bytes('{"prompt": "a", "completion": "b"}\n'.encode("utf-16"))
    (tmp_path / "u.txt.gz").write_bytes(gzip.compress(TEXT.encode("utf-16")))
    (tmp_path / "my.pdf").write_bytes(b"%PDF")
    latin = "iconv -f WINDOWS-1252 -t UTF-8 my.txt > my-utf8.txt"
    for line, words in {
        "train --data my.txt": latin,
        "infer --prompt-file my.txt": latin,
        f"tune --weights {SAMPLE} --data u.jsonl --out run": "-f UTF-16 -t UTF-8 u.jsonl > u-utf8.jsonl",
        "data prepare u.jsonl --tokenizer byte --out shards": "-f UTF-16 -t UTF-8 u.jsonl > u-utf8.jsonl",
        "train --data u.txt.gz": "u.txt.gz is no text in UTF-8, there are zero bytes in it: it is UTF-16",
        "train --data my.pdf": "pdftotext my.pdf my.txt makes a text of it",
        "data prepare u.txt --tokenizer byte --out shards": "iconv -f UTF-16 -t UTF-8 u.txt > u-utf8.txt",
    }.items():
        found = inside(*line.split(), cwd=tmp_path)
        assert found.returncode == 65 and words in found.stderr, (line, found.stderr)


def test_a_page_is_learned_with_its_markup_and_that_is_said(tmp_path):
    (tmp_path / "page.html").write_text("<html><p>hello</p></html>\n" * 9)
    words = "train --data page.html --n-layer 1 --steps 1 --threads 1 --out run"
    assert (
        "with its markup: pandoc -t plain -o page.txt page.html"
        in inside(*words.split(), cwd=tmp_path).stdout
    )
    assert find_inputs([tmp_path / "page.html"])


def test_a_folder_with_other_encodings_says_how_to_convert_them(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_bytes(TEXT.encode("latin-1"))
    words = "train --data texts --n-layer 1 --steps 1 --threads 1 --out run"
    said = inside(*words.split(), cwd=tmp_path).stdout
    assert "Latin-1: iconv -f WINDOWS-1252 -t UTF-8" in said
    counted = "texts: 1 file read; 240 × U+FFFD"
    assert counted in said
    assert counted in inside(*words.split()[:-1], "again", cwd=tmp_path).stdout  # not tokenized again


def test_what_of_a_folder_is_not_read_is_counted(tmp_path):
    (texts := tmp_path / "texts" / "sub").mkdir(parents=True)
    for name in ("a.txt", "b.md", "rows.csv", "scan.PDF", "old.pdf", "README"):
        (texts / name).write_text("The lamp was lit. " * 9)
    (texts / "empty.txt").touch()
    (texts / ".hidden.bin").touch()
    for words in (
        ["train", "--data", "texts", "--n-layer", "1", "--steps", "1", "--threads", "1"],
        ["data", "prepare", "texts", "--tokenizer", "byte", "--out", "shards"],
    ):
        result = inside(*words, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        assert "3 files read, 4 skipped" in result.stdout + result.stderr
