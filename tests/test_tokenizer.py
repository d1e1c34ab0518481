"""Tokenizers: round trips, streaming, saving, and what they refuse."""

import json
import random

import numpy as np
import pytest

from distgpt.data.loading import read_text, resolve_data
from distgpt.data.tokenizers.naming import (
    KINDS,
    build_tokenizer,
    fingerprint,
    id_dtype,
    load_tokenizer,
    tokenizer_from_json,
)
from distgpt.data.tokenizers.plain import WORD
from distgpt.errors import DataError, UsageError

ALPHABET = (
    "aé’ñ'\"_-–/., ;:!?…()[]{}«»“”‘%$#\n\t"
    " 09½²ßДя中日カ한ع🙂👩‍👧\u0301\u200b\u2028\ufeff\ufffd\x00\x1c\U0010ffff"
)
PROSE = (
    "\"Is the keepers' lamp lit?\" said Nell. 'Not yet,' he said; it's a half-lit (old) lamp.\n"
    '"This quote stays open.\n'
    "\n"
    'She wrote: "We don’t know… and/or “care”!"\n'
)


def random_texts(count=300, length=60):
    source = random.Random(5)
    return ["".join(source.choices(ALPHABET, k=source.randrange(1, length))) for _ in range(count)]


def streamed(tokenizer, ids):
    streamer = tokenizer.streamer()
    return "".join([streamer.feed(int(i)) for i in ids]) + streamer.flush()


@pytest.mark.parametrize("kind", ["byte", "char"])
def test_bytes_and_characters_give_every_text_back(kind):
    for text in [*random_texts(), PROSE, ""]:
        tokenizer = build_tokenizer(kind, text)
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert ids.dtype == np.uint16
        assert not ids.size or ids.max() < tokenizer.size


def test_byte_ids_are_the_bytes_of_utf8():
    assert build_tokenizer("byte", "").encode("é🙂").tolist() == list("é🙂".encode())


def test_char_ids_follow_the_sorted_characters():
    tokenizer = build_tokenizer("char", "hello")
    assert tokenizer.vocabulary == ("e", "h", "l", "o")
    assert tokenizer.encode("hole").tolist() == [1, 3, 2, 0]


def test_words_are_split_by_the_stated_rule():
    tokenizer = build_tokenizer("word", "don't stop_it, x2!\n")
    assert tokenizer.vocabulary == ("\n", "!", ",", "_", "don't", "it", "stop", "x2")
    assert tokenizer.decode(tokenizer.encode("stop  it \t!\n\ndon't")) == "stop it!\n\ndon't"


def test_words_of_the_bundled_story_come_back_exactly():
    text = read_text(resolve_data("story"))
    tokenizer = build_tokenizer("word", text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_words_of_usual_prose_come_back_exactly():
    tokenizer = build_tokenizer("word", PROSE)
    assert tokenizer.decode(tokenizer.encode(PROSE)) == PROSE


def test_any_sequence_of_word_ids_survives_decoding_and_encoding():
    tokenizer = build_tokenizer("word", " ".join(random_texts()) + " a'b a’b a'b’c x y z")
    source = np.random.default_rng(3)
    risky = [i for i, word in enumerate(tokenizer.vocabulary) if word[0] in "'’-\"“‘(/_\nxyza"]
    assert len(risky) > 12
    for length in range(1, 200):
        for choices in (np.arange(tokenizer.size), risky):
            ids = source.choice(choices, length)
            assert tokenizer.encode(tokenizer.decode(ids)).tolist() == ids.tolist()


def test_decoding_words_changes_blanks_only():
    for text in random_texts():
        tokenizer = build_tokenizer("word", text)
        decoded = tokenizer.decode(tokenizer.encode(text))
        assert WORD.findall(decoded) == WORD.findall(text)
        assert "".join(decoded.split(" ")) == "".join(WORD.findall(text))


@pytest.mark.parametrize("kind", KINDS)
def test_streaming_gives_what_decoding_gives(kind):
    tokenizer = build_tokenizer(kind, PROSE + ALPHABET)
    source = np.random.default_rng(1)
    for length in range(120):
        ids = source.integers(-3, tokenizer.size + 3, length)
        assert streamed(tokenizer, ids) == tokenizer.decode(ids)


def test_byte_decoding_agrees_with_python_on_arbitrary_bytes():
    tokenizer = build_tokenizer("byte", "")
    source = random.Random(2)
    lead = [0x41, 0xC3, 0xA9, 0xE4, 0xB8, 0xAD, 0xF0, 0x9F, 0x99, 0x82, 0xFF, 0xED, 0xA0]
    for _ in range(500):
        raw = bytes(source.choices([*lead, source.randrange(256)], k=12))
        assert tokenizer.decode(list(raw)) == raw.decode("utf-8", errors="replace")


def test_byte_streamer_holds_back_a_character_until_it_is_whole():
    streamer = build_tokenizer("byte", "").streamer()
    assert [streamer.feed(b) for b in "é🙂".encode()] == ["", "é", "", "", "", "🙂"]
    assert streamer.feed(0xC3) == ""
    assert streamer.flush() == "\ufffd"


def test_a_streamer_fed_a_prompt_continues_it():
    tokenizer = build_tokenizer("word", PROSE)
    streamer = tokenizer.streamer()
    for i in tokenizer.encode("said"):
        streamer.feed(int(i))
    assert "".join(streamer.feed(int(i)) for i in tokenizer.encode("Nell. He"[:5])) == " Nell."


@pytest.mark.parametrize("kind", KINDS)
def test_foreign_ids_decode_to_the_replacement_character(kind):
    tokenizer = build_tokenizer(kind, "a b")
    assert tokenizer.decode([-1]) == tokenizer.decode([tokenizer.size]) == "\ufffd"
    assert tokenizer.decode(np.array([2**31 - 1], np.int32)) == "\ufffd"
    assert tokenizer.decode([]) == ""


def test_a_foreign_id_inside_a_character_breaks_it_but_joins_nothing():
    tokenizer = build_tokenizer("byte", "")
    assert tokenizer.decode([0xC3, 256, 0xA9]) == tokenizer.decode([0xC3, -1, 0xA9]) == "\ufffd" * 3


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded_it_encodes_the_same(kind, tmp_path):
    tokenizer = build_tokenizer(kind, PROSE + ALPHABET)
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.to_json(), encoding="utf-8")
    again = build_tokenizer(str(path), "another text")
    assert (again.kind, again.size, again.to_json()) == (kind, tokenizer.size, tokenizer.to_json())
    assert again.encode(PROSE).tolist() == tokenizer.encode(PROSE).tolist()


@pytest.mark.parametrize(("kind", "words"), [("byte", "byte, 256"), ("char", "char, 3"), ("word", "word, 2")])
def test_it_says_what_it_is_and_equal_ones_have_equal_fingerprints(kind, words):
    tokenizer = build_tokenizer(kind, "a b")
    assert tokenizer.describe() == f"{words} entries"
    assert tokenizer.separator is None
    assert fingerprint(tokenizer) == fingerprint(build_tokenizer(kind, "b a"))
    assert (fingerprint(tokenizer) == fingerprint(build_tokenizer(kind, "b c"))) == (kind == "byte")


def test_only_bytes_need_no_text():
    assert load_tokenizer("byte").kind == "byte"
    for kind in ("char", "word"):
        with pytest.raises(UsageError, match="takes its vocabulary from a text"):
            load_tokenizer(kind)


def test_a_saved_vocabulary_keeps_its_order():
    saved = {"format": "distgpt-tokenizer", "version": 1, "kind": "char", "vocabulary": ["b", "a"]}
    assert tokenizer_from_json(json.dumps(saved), "saved").encode("abb").tolist() == [1, 0, 0]


def test_large_vocabularies_get_wider_ids():
    assert id_dtype(65536) is np.uint16
    assert id_dtype(65537) is np.uint32
    words = " ".join(f"w{i}" for i in range(65537))
    tokenizer = build_tokenizer("word", words)
    ids = tokenizer.encode(words)
    assert ids.dtype == np.uint32
    assert ids.max() == 65536
    assert tokenizer.decode(ids) == words


@pytest.mark.parametrize(
    ("kind", "known", "text", "message"),
    [
        ("char", "abc", "abé€é", r"character 'é' at position 2 .*\(2 distinct"),
        ("char", "é", "ab", r"character 'a' at position 0 .*\(2 distinct"),
        ("char", "", "x", r"character 'x' at position 0"),
        ("word", "one two", "two\tone three two four three", r"word 'three' at position 8 .*\(2 distinct"),
        ("word", "one", "One", r"word 'One' at position 0 .*\(1 distinct"),
        ("word", "", "x", r"word 'x' at position 0"),
    ],
)
def test_what_is_not_in_the_vocabulary_is_named(kind, known, text, message):
    with pytest.raises(DataError, match=message):
        build_tokenizer(kind, known).encode(text)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_smuggled_in_as_surrogates_are_refused(kind):
    smuggled = b"ok \xff".decode("utf-8", errors="surrogateescape")
    with pytest.raises(DataError, match="position 3"):
        build_tokenizer(kind, "ok").encode(smuggled)
    if kind != "byte":
        with pytest.raises(DataError, match="position 3"):
            build_tokenizer(kind, smuggled)


def test_an_unknown_kind_is_refused_with_what_is_allowed():
    with pytest.raises(
        UsageError, match=r"'chra'.*did you mean 'char'\?.*PATH, byte, char, gpt2, hub:ORG/NAME, word"
    ):
        build_tokenizer("chra", "text")


def test_a_tokenizer_path_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "binary", tmp_path / "binary" / "below"):
        with pytest.raises(DataError, match="cannot be read as a saved tokenizer"):
            build_tokenizer(str(path), "text")
    with pytest.raises(DataError, match="holds no tokenizer: neither"):
        build_tokenizer(str(tmp_path), "text")


GOOD = {"format": "distgpt-tokenizer", "version": 1, "kind": "word", "vocabulary": ["a", "b"]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "format"),
        ("{}", "format"),
        (json.dumps(GOOD | {"format": "gpt2"}), "format"),
        (json.dumps(GOOD | {"version": 2}), "version 2; this distgpt reads version 1"),
        (json.dumps(GOOD | {"kind": "wpe"}), "unknown kind 'wpe'"),
        (json.dumps(GOOD | {"kind": ["word"]}), "unknown kind"),
        (json.dumps(GOOD | {"vocabulary": None}), "list"),
        (json.dumps(GOOD | {"vocabulary": "ab"}), "list"),
        (json.dumps(GOOD | {"vocabulary": []}), "not empty"),
        (json.dumps(GOOD | {"vocabulary": ["a", "b", "a"]}), "'a' 2 times"),
        (json.dumps(GOOD | {"vocabulary": ["a", 3]}), "3 is not one word"),
        (json.dumps(GOOD | {"vocabulary": ["a", ["b"]]}), "is not one word"),
        (json.dumps(GOOD | {"vocabulary": ["a", ""]}), "'' is not one word"),
        (json.dumps(GOOD | {"vocabulary": ["a b"]}), "'a b' is not one word"),
        (json.dumps(GOOD | {"vocabulary": ["\ud800"]}), "is not one word"),
        (json.dumps(GOOD | {"kind": "char", "vocabulary": ["ab"]}), "'ab' is not one char"),
        (json.dumps(GOOD | {"kind": "char", "vocabulary": [""]}), "'' is not one char"),
        (json.dumps(GOOD | {"kind": "char", "vocabulary": ["\udcff"]}), "is not one char"),
    ],
)
def test_a_damaged_saved_tokenizer_is_refused_in_one_line(text, message):
    with pytest.raises(DataError, match=message) as refusal:
        tokenizer_from_json(text, "some/file.json")
    assert str(refusal.value).startswith("some/file.json")
    assert "\n" not in str(refusal.value)


def test_the_good_one_is_accepted():
    assert tokenizer_from_json(json.dumps(GOOD), "saved").size == 2
