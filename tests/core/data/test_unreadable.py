"""Files that are not UTF-8 text, corrupt, pipes or devices: every command rejects them with a remedy."""

import gzip
import os
from itertools import chain

import pytest
from complaints import complains
from distgpt.core.base.files import bundled
from distgpt.core.comm.api import SerialComm
from distgpt.core.data.loading import DataRequest, load_corpus, refuse_missing
from distgpt.core.data.textfile import ADVICE
from distgpt.corpora.prepare.documents import find_inputs

from conftest import inside, succeeded

TEXT = "Es war einmal ein König, der hatte schöne Töchter; die jüngste war so schön.\n" * 40
CONVERT = "iconv -f ENCODING -t UTF-8"
PLAIN = "convert it to plain text first"
SAMPLE = bundled("weights", "sample.safetensors")
FILES = {
    "my.txt": TEXT.encode("latin-1"), "u.txt": TEXT.encode("utf-16"),
    "u.jsonl": '{"prompt": "a", "completion": "b"}\n'.encode("utf-16"),
    "u.txt.gz": gzip.compress(TEXT.encode("utf-16")), "my.pdf": b"%PDF",
    "fine.txt": b"text", "bad.jsonl": b'{"text": "a"}\n{"text": "b"}\n{\n',
    "other.jsonl": b'{"content": "a"}\n', "cut.txt.gz": gzip.compress(os.urandom(4000))[:2000],
    "t.parquet": b"requires a table", "x.zip": b"PK",
    "none.jsonl": b"", "two.jsonl": b'{"text": "ab"}\n{"text": "cd"}\n',
}  # fmt: skip
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
        for refuse, *given in (
            (load_corpus, SerialComm(), DataRequest(str(path))),
            (refuse_missing, [str(path)], "byte"),
            (find_inputs, [path]),
        ):
            with complains(path, "as text"):
                refuse(*given)


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
