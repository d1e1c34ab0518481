"""Tokenizers of all kinds: round trips, streaming, saving, learning a BPE, and what they refuse."""

import functools
import hashlib
import json
import random
import sys

import numpy as np
import pytest
from distgpt.core.base.errors import DataError, UsageError
from distgpt.core.data.tokenizers import fingerprint, id_dtype, load_tokenizer, tokenizer_from_json
from distgpt.corpora.tokenizers import foreign
from distgpt.corpora.tokenizers.bpe import GPT2_FINGERPRINT, learn_bpe, symbols
from distgpt.corpora.tokenizers.collected import WORD
from tokenizing import STORY, TEXT, gpt2, needs_gpt2, small

ALPHABET = (
    "aé’ñ'\"_-–/., ;:!?…()[]{}«»“”‘%$#\n\t 09½²ßДя中日カ한ع🙂👩‍👧\u0301\u200b\u2028\ufeff\ufffd\x00\x1c\U0010ffff"
)
PROSE = (
    "\"Is the keepers' lamp lit?\" said Nell. 'Not yet,' he said; it's a half-lit (old) lamp.\n"
    '"This quote stays open.\n'
    "\n"
    'She wrote: "We don’t know… and/or “care”!"\n'
)
WORDS = {"format": "distgpt-tokenizer", "version": 1, "kind": "word", "vocabulary": ["a", "b"]}
BYTES = {
    **WORDS,
    "kind": "bpe",
    "vocabulary": [*symbols(), "ab", "<|endoftext|>"],
    "merges": [["a", "b"]],
    "separator": 257,
}


@functools.cache
def one_of_each_kind():
    return [*(load_tokenizer(kind, PROSE + ALPHABET) for kind in ("byte", "char", "word")), small()]


def saved(document):
    return tokenizer_from_json(json.dumps(document), "saved")


def random_texts(count=300, length=60):
    source = random.Random(5)
    return ["".join(source.choices(ALPHABET, k=source.randrange(1, length))) for _ in range(count)]


# What they encode to, and back


def test_texts_come_back_and_ids_have_the_smaller_type():
    for text in [*random_texts(), PROSE, TEXT, ""]:
        for tokenizer in (load_tokenizer("byte", text), load_tokenizer("char", text), small()):
            ids = tokenizer.encode(text)
            assert tokenizer.decode(ids) == text, (tokenizer.kind, text)
            assert ids.dtype == np.uint16 and ids.max(initial=0) <= tokenizer.size - bool(text)
    assert len(small().encode(TEXT)) < len(TEXT.encode())


def test_large_vocabularies_get_wider_ids():
    assert id_dtype(65536) is np.uint16 and id_dtype(65537) is np.uint32
    tokenizer = load_tokenizer("word", words := " ".join(f"w{i}" for i in range(65537)))
    ids = tokenizer.encode(words)
    assert ids.dtype == np.uint32 and ids.max() == 65536 and tokenizer.decode(ids) == words


def test_texts_are_split_by_the_stated_rules():
    assert load_tokenizer("byte", "").encode("é🙂").tolist() == list("é🙂".encode())
    chars = load_tokenizer("char", "hello")
    assert chars.vocabulary == ("e", "h", "l", "o") and chars.encode("hole").tolist() == [1, 3, 2, 0]
    words = load_tokenizer("word", "don't stop_it, x2!\n")
    assert words.vocabulary == ("\n", "!", ",", "_", "don't", "it", "stop", "x2")
    assert words.decode(words.encode("stop  it \t!\n\ndon't")) == "stop it!\n\ndon't"
    assert saved(BYTES).encode("ab b").tolist() == [256, 0x20, ord("b")]
    assert small().separator == small().size - 1  # text that looks like it is text
    assert small().separator not in small().encode("<|endoftext|>")
    assert small().decode([small().separator]) == "<|endoftext|>"


@needs_gpt2
def test_gpt2_is_recognised_and_gives_the_ids_that_it_is_known_for():
    assert fingerprint(gpt2()) == GPT2_FINGERPRINT
    assert gpt2().describe() == "GPT-2's BPE, 50,257 entries"
    assert (gpt2().size, gpt2().separator) == (50257, 50256)
    for text, ids in (
        ("Hello, world!", [15496, 11, 995, 0]),
        (" don't", [836, 470]),
        ("<|endoftext|>", [27, 91, 437, 1659, 5239, 91, 29]),
        ("", []),
    ):
        assert gpt2().encode(text).tolist() == ids, text


def test_words_of_usual_prose_come_back_exactly_and_of_any_other_text_without_its_blanks():
    for text in (STORY, PROSE):
        tokenizer = load_tokenizer("word", text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    for text in random_texts():
        tokenizer = load_tokenizer("word", text)
        decoded = tokenizer.decode(tokenizer.encode(text))
        assert WORD.findall(decoded) == WORD.findall(text)
        assert "".join(decoded.split(" ")) == "".join(WORD.findall(text))


def test_any_sequence_of_word_ids_survives_decoding_and_encoding():
    tokenizer = load_tokenizer("word", " ".join(random_texts()) + " a'b a’b a'b’c x y z")
    source = np.random.default_rng(3)
    risky = [i for i, word in enumerate(tokenizer.vocabulary) if word[0] in "'’-\"“‘(/_\nxyza"]
    assert len(risky) > 12
    for length in range(1, 200):
        for choices in (np.arange(tokenizer.size), risky):
            ids = source.choice(choices, length)
            assert tokenizer.encode(tokenizer.decode(ids)).tolist() == ids.tolist()


def test_decoding_never_fails_and_streaming_gives_the_same():
    source = np.random.default_rng(1)
    for tokenizer in one_of_each_kind():
        for length in [*range(100), *range(100, 400, 50)]:
            ids = source.integers(-3, tokenizer.size + 3, length)
            streamer = tokenizer.streamer()
            streamed = "".join([streamer.feed(int(i)) for i in ids]) + streamer.flush()
            assert streamed == tokenizer.decode(ids), (tokenizer.kind, length)
        for unknown in ([-1], [tokenizer.size], [10**9], np.array([2**31 - 1], np.int32)):
            assert tokenizer.decode(unknown) == "\ufffd", (tokenizer.kind, unknown)
    tokenizer = load_tokenizer("byte", "")  # a foreign id inside a character breaks it, but joins nothing
    assert tokenizer.decode([0xC3, 256, 0xA9]) == tokenizer.decode([0xC3, -1, 0xA9]) == "\ufffd" * 3


def test_a_streamer_holds_back_a_character_until_it_is_whole_and_continues_a_prompt():
    for tokenizer in (load_tokenizer("byte", ""), saved(BYTES)):
        streamer = tokenizer.streamer()
        ids = tokenizer.encode("é🙂").tolist()
        assert [streamer.feed(i) for i in ids] == ["", "é", "", "", "", "🙂"], tokenizer.kind
        assert (streamer.feed(ids[0]), streamer.flush()) == ("", "\ufffd")
    words = load_tokenizer("word", PROSE)
    streamer = words.streamer()
    prompt, more = words.encode("said").tolist(), words.encode("Nell.").tolist()
    assert "".join([streamer.feed(i) for i in prompt + more][len(prompt) :]) == " Nell."


# Names and saved forms


def test_saved_and_loaded_they_are_the_same(tmp_path):
    path = tmp_path / "tokenizer.json"
    for tokenizer in one_of_each_kind():
        path.write_text(tokenizer.to_json(), encoding="utf-8")
        for again in (*map(load_tokenizer, map(str, (path, tmp_path))), load_tokenizer(str(path), "")):
            assert (again.kind, again.size) == (tokenizer.kind, tokenizer.size)
            assert again.to_json() == tokenizer.to_json()
            assert again.encode(PROSE).tolist() == tokenizer.encode(PROSE).tolist()
            assert fingerprint(again) == hashlib.sha256(path.read_bytes()).hexdigest()
    in_another_order = {**WORDS, "kind": "char", "vocabulary": ["b", "a"]}
    assert saved(in_another_order).encode("abb").tolist() == [1, 0, 0]
    assert json.loads(saved(BYTES).to_json()) == BYTES


def test_names_that_are_no_tokenizer_are_refused(tmp_path):
    binary, near = (tmp_path / "binary", r"did you mean 'char'\?.*byte, char, word, bpe:N, gpt2, hub:ORG/NAME, PATH")
    binary.write_bytes(b"\xff\xfe\x00")
    for make, name, error, message in (
        (load_tokenizer, "char", UsageError, "takes its vocabulary from a text"),
        (load_tokenizer, "word", UsageError, "takes its vocabulary from a text"),
        (load_tokenizer, "chra", UsageError, f"'chra'.*{near}"),
        (load_tokenizer, binary, DataError, "cannot be read as a saved tokenizer"),
        (load_tokenizer, binary / "x", DataError, "cannot be read as a saved"),
        (lambda name: load_tokenizer(name, "text"), tmp_path, DataError, "holds no tokenizer: neither"),
    ):
        with pytest.raises(error, match=message):
            make(str(name))


# Learning a BPE


def test_equal_texts_give_equal_tokenizers():
    text = STORY[:20000]
    for separator, token_id in (("first", 0), ("last", 319), ("none", None)):
        one, same = (learn_bpe(texts, 320, 2, separator) for texts in ([text], iter([text, ""])))
        assert one.to_json() == same.to_json()
        assert (one.size, one.separator) == (320, token_id)
        assert one.decode(one.encode(TEXT)) == TEXT, separator


def test_rare_pairs_are_not_learned_and_failures_end_the_learning():
    assert learn_bpe(["ab ab ab ab cd cd"], 300, 3, "none").merges == (("a", "b"), ("Ġ", "ab"))
    assert learn_bpe(["text"], 256, 1, "none").size == 256
    with pytest.raises(UsageError, match="at least 257 entries, the bytes and the separator,"):
        learn_bpe(["text"], 256, 1, "last")
    with pytest.raises(DataError, match="no text"):
        learn_bpe(["", ""], 300, 1, "last")

    def texts():
        yield "some text"
        raise DataError("the second file is damaged")

    with pytest.raises(DataError, match="the second file is damaged"):
        learn_bpe(texts(), 300, 2, "last")


# Refusals


def test_what_is_not_in_the_vocabulary_is_named():
    for kind, known, text, message in (
        ("char", "abc", "abé€é", r"character 'é' at position 2 .*\(2 distinct"),
        ("char", "é", "ab", r"character 'a' at position 0 .*\(2 distinct"),
        ("char", "", "x", r"character 'x' at position 0"),
        ("word", "one two", "two\tone three two four three", r"word 'three' at position 8 .*\(2 distinct"),
        ("word", "one", "One", r"word 'One' at position 0 .*\(1 distinct"),
        ("word", "", "x", r"word 'x' at position 0"),
    ):
        with pytest.raises(DataError, match=message):
            load_tokenizer(kind, known).encode(text)


def test_bytes_smuggled_in_as_surrogates_are_refused():
    smuggled = b"ok \xff".decode("utf-8", errors="surrogateescape")
    for refuse in (
        *(tokenizer.encode for tokenizer in one_of_each_kind()),
        *(functools.partial(load_tokenizer, kind) for kind in ("char", "word")),
    ):
        with pytest.raises(DataError, match="position 3"):
            refuse(smuggled)


# What is changed in a good one, and words of the refusal.
DAMAGED_WORDS = (
    *(("not json", "not JSON"), ("[" * 100_000, "not JSON"), ("[]", "format"), ("{}", "format")),
    ({"version": 2}, "version 2; this distgpt reads version 1"),
    ({"kind": "wpe"}, "unknown kind 'wpe'"),
    *(({"vocabulary": wrong}, "list") for wrong in (None, "ab")),
    ({"vocabulary": []}, "not empty"),
    ({"vocabulary": ["a", "b", "a"]}, "'a' 2 times"),
    ({"vocabulary": ["a", 3]}, "3 is not one word"),
    *(({"vocabulary": ["a", wrong]}, f"{wrong!r} is not one word") for wrong in ("", "a b")),
    *(({"kind": "char", "vocabulary": [wrong]}, f"{wrong!r} is not one char") for wrong in ("ab", "")),
)
DAMAGED_BYTES = (
    *(({"vocabulary": wrong}, "list of strings") for wrong in (None, [*symbols(), 3])),
    ({"vocabulary": [*symbols()[1:], "ab"]}, "lacks 1 of the 256 symbols for bytes, 'Ā' for one"),
    ({"vocabulary": [*symbols(), "ab", "ab"]}, "'ab' 2 times"),
    ({"vocabulary": [*symbols(), "ab", ""]}, "entry '' is not spelled"),
    ({"vocabulary": [*symbols(), "ab", "a b"]}, "entry 'a b' is not spelled"),
    ({"merges": None}, "merges must be a list"),
    ({"merges": ["a b"]}, "'a b' is not a pair"),
    *(({"merges": [wrong]}, "is not a pair") for wrong in (["a", "b", "c"], ["a", 1])),
    ({"merges": [["a", "c"]]}, "'ac' of the merge 'a' . 'c' is not in the vocabulary"),
    ({"merges": [["a", "b"], ["a", "b"]]}, "listed twice"),
    *(({"separator": wrong}, f"separator {wrong!r} is no id") for wrong in (258, -1, True, "257")),
    ({"separator": 256}, "separator 'ab' is also a part of ordinary text"),
)


def test_a_damaged_saved_tokenizer_is_refused_in_one_line():
    for good, changes in ((WORDS, DAMAGED_WORDS), (BYTES, DAMAGED_BYTES)):
        assert saved(good).size == len(good["vocabulary"])
        for change, message in changes:
            document = change if isinstance(change, str) else json.dumps(good | change)
            with pytest.raises(DataError, match=message) as refusal:
                tokenizer_from_json(document, "some/file.json")
            text = str(refusal.value)
            assert text.startswith("some/file.json") and "\n" not in text and len(text) < 300, text


def test_hub_finds_tokenizer_in_installation(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    folder = foreign.installed("some/model")
    assert folder == tmp_path / "share/distgpt/tokenizers/some/model"
    folder.mkdir(parents=True)
    with pytest.raises(UsageError, match="pip install huggingface_hub"):
        foreign.download_tokenizer("some/model")
    vocabulary = {entry: i for i, entry in enumerate(small().vocabulary)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (folder / "merges.txt").write_text("".join(f"{a} {b}\n" for a, b in small().merges), encoding="utf-8")
    assert foreign.download_tokenizer("some/model") == folder / "vocab.json"
