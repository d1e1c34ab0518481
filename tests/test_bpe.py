"""BPE: what it encodes to, what it is saved as, how it is learned, and what damaged ones are refused for."""

import functools
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from distgpt.data.loading import read_text, resolve_data
from distgpt.data.prepare.vocabulary import learn_bpe
from distgpt.data.tokenizers.bpe import symbols
from distgpt.data.tokenizers.naming import (
    GPT2_FINGERPRINT,
    build_tokenizer,
    fingerprint,
    load_tokenizer,
    tokenizer_from_json,
)
from distgpt.errors import DataError, UsageError

GPT2 = Path(__file__).parents[2] / "shared" / "data" / "gpt2"
needs_gpt2 = pytest.mark.skipif(not GPT2.is_dir(), reason="needs GPT-2's vocab.json and merges.txt")
TEXT = "Hello, <|endoftext|> it's naïve — 中日 🙂!\n\n  x = 10\r\n"


@functools.cache
def gpt2():
    return load_tokenizer(str(GPT2))


@functools.cache
def small():
    return learn_bpe([read_text(resolve_data("story"))], size=400, min_frequency=2, separator="last")


@needs_gpt2
def test_gpt2_is_recognised():
    assert fingerprint(gpt2()) == GPT2_FINGERPRINT
    assert gpt2().describe() == "GPT-2's BPE, 50,257 entries"
    assert (gpt2().size, gpt2().separator) == (50257, 50256)


@needs_gpt2
def test_gpt2_gives_the_ids_that_it_is_known_for():
    assert gpt2().encode("Hello, world!").tolist() == [15496, 11, 995, 0]
    assert gpt2().encode(" don't").tolist() == [836, 470]
    assert gpt2().encode("<|endoftext|>").tolist() == [27, 91, 437, 1659, 5239, 91, 29]
    assert gpt2().encode("").size == 0


def test_texts_come_back_and_ids_have_the_smaller_type():
    ids = small().encode(TEXT)
    assert small().decode(ids) == TEXT
    assert ids.dtype == np.uint16
    assert len(ids) < len(TEXT.encode())


def test_text_that_looks_like_the_separator_is_text():
    assert small().separator == small().size - 1
    assert small().separator not in small().encode("<|endoftext|>")
    assert small().decode([small().separator]) == "<|endoftext|>"


def test_decoding_never_fails_and_streaming_gives_the_same():
    source = np.random.default_rng(4)
    for length in range(0, 400, 7):
        ids = source.integers(-2, small().size + 2, length)
        streamer = small().streamer()
        streamed = "".join([streamer.feed(int(i)) for i in ids]) + streamer.flush()
        assert streamed == small().decode(ids)
    assert small().decode([-1, 10**9]) == small().decode(np.array([small().size, 2**31 - 1])) == "\ufffd" * 2


def test_a_character_in_several_tokens_comes_once_it_is_whole():
    plain = tokenizer_from_json(json.dumps(BYTES), "bytes")
    streamer = plain.streamer()
    assert [streamer.feed(int(i)) for i in plain.encode("é🙂")] == ["", "é", "", "", "", "🙂"]


def test_saved_and_loaded_it_is_the_same(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(small().to_json(), encoding="utf-8")
    for again in (load_tokenizer(str(path)), load_tokenizer(str(tmp_path)), build_tokenizer(str(path), "")):
        assert again.to_json() == small().to_json()
        assert again.encode(TEXT).tolist() == small().encode(TEXT).tolist()
        assert fingerprint(again) == hashlib.sha256(path.read_bytes()).hexdigest()


def test_surrogates_are_refused():
    with pytest.raises(DataError, match="position 3"):
        small().encode(b"ok \xff".decode("utf-8", errors="surrogateescape"))


@pytest.mark.parametrize("separator", ["first", "last", "none"])
def test_equal_texts_give_equal_tokenizers(separator):
    text = read_text(resolve_data("story"))[:20000]
    learned = [learn_bpe(texts, 320, 2, separator) for texts in ([text], iter([text, ""]))]
    assert learned[0].to_json() == learned[1].to_json()
    assert learned[0].size == 320
    assert learned[0].separator == {"first": 0, "last": 319, "none": None}[separator]
    assert learned[0].decode(learned[0].encode(TEXT)) == TEXT


def test_rare_pairs_are_not_learned():
    assert learn_bpe(["ab ab ab ab cd cd"], 300, 3, "none").merges == (("a", "b"), ("Ġ", "ab"))


def test_too_small_a_vocabulary_and_no_text_are_refused():
    with pytest.raises(UsageError, match="at least 257 entries, the bytes and the separator,"):
        learn_bpe(["text"], 256, 1, "last")
    assert learn_bpe(["text"], 256, 1, "none").size == 256
    with pytest.raises(DataError, match="no text"):
        learn_bpe(["", ""], 300, 1, "last")


BYTES = {
    "format": "distgpt-tokenizer",
    "version": 1,
    "kind": "bpe",
    "vocabulary": [*symbols(), "ab", "<|endoftext|>"],
    "merges": [["a", "b"]],
    "separator": 257,
}


def test_the_good_one_is_accepted():
    tokenizer = tokenizer_from_json(json.dumps(BYTES), "saved")
    assert tokenizer.encode("ab b").tolist() == [256, 0x20, ord("b")]
    assert json.loads(tokenizer.to_json()) == BYTES


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocabulary": None}, "list of strings"),
        ({"vocabulary": [*symbols(), 3]}, "list of strings"),
        ({"vocabulary": []}, "lacks 256 of the 256 symbols"),
        ({"vocabulary": [*symbols()[1:], "ab"]}, "lacks 1 of the 256 symbols for bytes, 'Ā' for one"),
        ({"vocabulary": [*symbols(), "ab", "ab"]}, "'ab' 2 times"),
        ({"vocabulary": [*symbols(), "ab", ""]}, "entry '' is not spelled"),
        ({"vocabulary": [*symbols(), "ab", "a b"]}, "entry 'a b' is not spelled"),
        ({"vocabulary": [*symbols(), "ab", "\ud800"]}, "is not spelled"),
        ({"merges": None}, "merges must be a list"),
        ({"merges": ["a b"]}, "'a b' is not a pair"),
        ({"merges": [["a", "b", "c"]]}, "is not a pair"),
        ({"merges": [["a", 1]]}, "is not a pair"),
        ({"merges": [["a", "c"]]}, "'ac' of the merge 'a' . 'c' is not in the vocabulary"),
        ({"merges": [["a", ""]]}, "'' of the merge"),
        ({"merges": [["a", "b"], ["a", "b"]]}, "listed 2 times"),
        ({"separator": 258}, "separator 258 is no id"),
        ({"separator": -1}, "separator -1 is no id"),
        ({"separator": True}, "separator True is no id"),
        ({"separator": "257"}, "separator '257' is no id"),
        ({"separator": 256}, "separator 'ab' is also a part of ordinary text"),
        ({"separator": 65}, "separator 'A' is also a part of ordinary text"),
    ],
)
def test_a_damaged_one_is_refused_in_one_line(change, message):
    with pytest.raises(DataError, match=message) as refusal:
        tokenizer_from_json(json.dumps(BYTES | change), "some/file.json")
    assert str(refusal.value).startswith("some/file.json")
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 300
