"""distgpt tokenizer: learning a vocabulary from files, and looking at one."""

import gzip
import json

import pytest
from conftest import distgpt, refused
from test_bpe import GPT2, needs_gpt2

from distgpt.data.loading import read_text, resolve_data
from distgpt.data.prepare.vocabulary import learn_bpe
from distgpt.data.tokenizers import bpe
from distgpt.data.tokenizers.naming import build_tokenizer, fingerprint, load_tokenizer
from distgpt.errors import DataError


def learn(*args):
    result = distgpt("tokenizer", "train", *args)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_bpe_learned_from_a_file_is_saved_and_described(tmp_path):
    text = read_text(resolve_data("story"))
    (tmp_path / "text.txt").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    out = tmp_path / "bpe.json"
    assert learn(tmp_path / "text.txt", "--vocab-size", "500", "--out", out) == f"{out}: BPE, 500 entries\n"
    learned = load_tokenizer(str(out))
    assert learned.to_json() == learn_bpe([text], 500, 2, "last").to_json()
    said = distgpt("tokenizer", "info", out, "--text", "the é\n").stdout
    assert f"fingerprint  {fingerprint(learned)}" in said
    assert "separator    499 <|endoftext|>" in said
    assert r"he│ │\xc3│\xa9│\n" in said


def test_several_files_are_one_corpus_and_order_does_not_matter(tmp_path):
    text = read_text(resolve_data("story"))
    middle = text.index("\n", len(text) // 2) + 1
    for name, part in (("1", text[:middle]), ("2", text[middle:])):
        (tmp_path / name).write_text(part)
    learn(tmp_path / "2", tmp_path / "1", "--vocab-size", "400", "--out", tmp_path / "parts.json")
    learn("story", "--vocab-size", "400", "--out", tmp_path / "whole.json")
    assert (tmp_path / "parts.json").read_text() == (tmp_path / "whole.json").read_text()


def test_documents_in_lines_of_json_are_read(tmp_path):
    with gzip.open(tmp_path / "some.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"story": line, "no": 1}) + "\n" for line in ("ab ab", "ab ab c"))
    learn(
        tmp_path, "--field", "story", "--vocab-size", "300", "--separator", "none", "--out", tmp_path / "out"
    )
    assert load_tokenizer(str(tmp_path / "out")).merges == (("a", "b"), ("Ġ", "ab"))


@pytest.mark.parametrize("kind", ["char", "word"])
def test_characters_and_words_are_collected(tmp_path, kind):
    out = tmp_path / "out.json"
    learn("story", "--kind", kind, "--out", out)
    text = read_text(resolve_data("story"))
    assert out.read_text() == build_tokenizer(kind, text).to_json()
    assert kind in distgpt("tokenizer", "info", out).stdout


def test_options_of_bpe_reach_it(tmp_path):
    out = tmp_path / "out.json"
    options = ["--min-frequency", "30", "--separator", "first"]
    said = learn("story", "--vocab-size", "9000", "--out", out, *options)
    assert said.endswith("entries; no more pairs are frequent enough\n")
    learned = load_tokenizer(str(out))
    assert learned.separator == 0
    assert learned.to_json() == learn_bpe([read_text(resolve_data("story"))], 9000, 30, "first").to_json()


@needs_gpt2
def test_gpt2_is_named():
    said = distgpt("tokenizer", "info", GPT2, "--text", "Hello world").stdout
    assert "GPT-2's BPE, 50,257 entries" in said
    assert "pieces       Hello│ world\nids          15496 995\n" in said


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["train", "story", "--out", "OUT"], 2, ["--vocab-size"]),
        (["train", "story", "--out", "OUT", "--vocab-size", "256"], 2, ["at least 257"]),
        (["train", "story", "--out", "OUT", "--kind", "word", "--vocab-size", "9"], 2, ["--kind bpe"]),
        (["train", "story", "--out", "TAKEN", "--kind", "word"], 2, ["exists already"]),
        (["train", "story", "--out", "OUT/below", "--kind", "word"], 2, ["no directory"]),
        (["train", "nowhere", "--out", "OUT", "--kind", "word"], 65, ["nowhere", "no readable file"]),
        (["train", "FOLDER", "--out", "OUT", "--kind", "word"], 65, ["FOLDER holds no file"]),
        (["train", "EMPTY", "--out", "OUT", "--vocab-size", "300"], 65, ["no text to learn from"]),
        (["info", "char"], 2, ["takes its vocabulary from a text"]),
        (["info", "gtp2"], 2, ["did you mean 'gpt2'?"]),
        (["info", "BINARY"], 65, ["cannot be read as a saved tokenizer"]),
        (["info", "FOLDER"], 65, ["holds no tokenizer"]),
        (["info", "TAKEN"], 65, ["its format is not"]),
    ],
)
def test_what_makes_no_sense_is_refused_and_nothing_is_left_behind(tmp_path, args, code, words):
    (tmp_path / "FOLDER").mkdir()
    (tmp_path / "EMPTY").touch()
    (tmp_path / "BINARY").write_bytes(b"\xff\xfe")
    (tmp_path / "TAKEN").write_text(json.dumps({"mine": "dear"}))
    before = sorted(tmp_path.rglob("*"))
    refused(distgpt("tokenizer", *args, cwd=tmp_path), code, *words)
    assert sorted(tmp_path.rglob("*")) == before
    assert json.loads((tmp_path / "TAKEN").read_text()) == {"mine": "dear"}


def test_an_error_while_reading_ends_the_learning():
    def texts():
        yield "some text"
        raise DataError("the second file is damaged")

    with pytest.raises(DataError, match="the second file is damaged"):
        learn_bpe(texts(), 300, 2, "last")


def test_a_separator_cannot_command_a_terminal(tmp_path):
    vocabulary = {symbol: i for i, symbol in enumerate(bpe.symbols())}
    added = [{"id": 256, "content": "\x1b[31mred", "special": True}]
    before = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": model, "pre_tokenizer": before, "added_tokens": added}))
    said = distgpt("tokenizer", "info", path, "--text", "a").stdout
    assert "separator    256 \\x1b[31mred" in said and "1 byte in 1 token," in said
