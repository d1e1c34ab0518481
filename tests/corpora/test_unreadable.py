"""Files that are no text in UTF-8: refused, with a way out."""

import gzip

from conftest import inside

from distgpt.core.base.files import bundled

TEXT = "Es war einmal ein König, der hatte schöne Töchter; die jüngste war so schön.\n" * 40
CONVERT = "iconv -f ENCODING -t UTF-8"
SAMPLE = bundled("weights", "sample.safetensors")


def test_every_command_that_reads_texts_names_the_way_out(tmp_path):
    (tmp_path / "my.txt").write_bytes(TEXT.encode("latin-1"))
    (tmp_path / "u.txt").write_bytes(TEXT.encode("utf-16"))
    (tmp_path / "u.jsonl").write_bytes('{"prompt": "a", "completion": "b"}\n'.encode("utf-16"))
    (tmp_path / "u.txt.gz").write_bytes(gzip.compress(TEXT.encode("utf-16")))
    for line, words in {
        "train --data my.txt": f"UTF-8 text, byte 19 cannot be decoded: convert it first ({CONVERT})",
        "infer --prompt-file my.txt": CONVERT,
        f"tune --weights {SAMPLE} --data u.jsonl --out run": CONVERT,
        "data prepare u.jsonl --tokenizer byte --out shards": CONVERT,
        "train --data u.txt.gz": "u.txt.gz is no text in UTF-8, there are zero bytes in it",
        "data prepare u.txt --tokenizer byte --out shards": CONVERT,
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
