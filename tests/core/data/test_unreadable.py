"""Files that are no text in UTF-8: refused, with a way out."""

import gzip
from itertools import chain

import pytest
from distgpt.core.base.errors import DataError
from distgpt.core.base.files import bundled
from distgpt.core.comm.api import SerialComm
from distgpt.core.data.loading import DataRequest, load_corpus, refuse_missing
from distgpt.core.data.textfile import ADVICE
from distgpt.corpora.prepare.documents import find_inputs

from conftest import inside

TEXT = "Es war einmal ein König, der hatte schöne Töchter; die jüngste war so schön.\n" * 40
CONVERT = "iconv -f ENCODING -t UTF-8"
SAMPLE = bundled("weights", "sample.safetensors")


def test_a_file_that_is_no_text_by_its_name_is_refused(tmp_path):
    for ending in chain(*ADVICE):
        path = tmp_path / f"a{ending}"
        path.write_text("text")
        for refuse in (
            lambda: load_corpus(SerialComm(), DataRequest(str(path))),  # noqa: B023
            lambda: refuse_missing([str(path)], "byte"),  # noqa: B023
            lambda: find_inputs([path]),  # noqa: B023
        ):
            with pytest.raises(DataError, match="is not read, by the ending of its name: "):
                refuse()


def test_every_command_that_reads_texts_names_the_way_out(tmp_path):
    (tmp_path / "my.txt").write_bytes(TEXT.encode("latin-1"))
    (tmp_path / "u.txt").write_bytes(TEXT.encode("utf-16"))
    (tmp_path / "u.jsonl").write_bytes('{"prompt": "a", "completion": "b"}\n'.encode("utf-16"))
    (tmp_path / "u.txt.gz").write_bytes(gzip.compress(TEXT.encode("utf-16")))
    (tmp_path / "my.pdf").write_bytes(b"%PDF")
    for line, words in {
        "train --data my.txt": f"UTF-8 text, byte 19 cannot be decoded: convert it first ({CONVERT})",
        "infer --prompt-file my.txt": CONVERT,
        f"tune --weights {SAMPLE} --data u.jsonl --out run": CONVERT,
        "data prepare u.jsonl --tokenizer byte --out shards": CONVERT,
        "train --data u.txt.gz": "u.txt.gz is no text in UTF-8, there are zero bytes in it",
        "train --data my.pdf": "convert it to plain text first",
        "train --depth 1 --data my.pdf": "convert it to plain text first",
        "data prepare u.txt --tokenizer byte --out shards": CONVERT,
        "tokenizer train my.pdf --kind char --out t.json": "convert it to plain text first",
    }.items():
        found = inside(*line.split(), cwd=tmp_path)
        assert found.returncode == 65 and words in found.stderr, (line, found.stderr)


def test_a_folder_with_other_encodings_says_how_to_convert_them(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_bytes(TEXT.encode("latin-1"))
    words = "train --data texts --n-layer 1 --steps 1 --threads 1 --out run"
    said = inside(*words.split(), cwd=tmp_path).stdout
    assert CONVERT in said
    counted = "texts: 1 file read; 200 × U+FFFD"
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
