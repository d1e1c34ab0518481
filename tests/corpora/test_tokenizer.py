import functools
import hashlib
import json
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from complaints import complains
from distgpt.core.base.errors import DataError, UsageError
from distgpt.core.data.tokenizers import fingerprint, id_dtype, load_tokenizer, tokenizer_from_json
from distgpt.corpora.tokenizers import bpe, third_party
from distgpt.corpora.tokenizers import bpe_fast as fast_bpe
from distgpt.corpora.tokenizers.bpe import GPT2_FINGERPRINT, GPT2_SIZE, learn_bpe, symbols
from distgpt.corpora.tokenizers.collected import WORD
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizing import STORY, TEXT, gpt2, needs_gpt2, small, write_gpt2_style

ALPHABET = (
    "aé’ñ'\"_-–/., ;:!?…()[]{}«»“”‘%$#\n\t 09½²ßДя中日カ한ع🙂👩‍👧\u0301\u200b\u2028\ufeff\ufffd\x00\x1c\U0010ffff"
)
PROSE = (
    "\"Is the keepers' lamp lit?\" said Nell. 'Not yet,' he said; it's a half-lit (old) lamp.\n"
    '"This quote stays open.\n'
    "\n"
    'She wrote: "We don’t know… and/or “care”!"\n'
)
TEXTS = st.text(ALPHABET) | st.text()
WORDS = {"format": "distgpt-tokenizer", "version": 1, "kind": "word", "vocabulary": ["a", "b"]}
BYTES = WORDS | {"kind": "bpe", "merges": [["a", "b"]], "vocabulary": [*symbols(), "ab", "<|endoftext|>"]}
BYTES["separator"] = 257


@functools.cache
def one_of_each_kind():
    return [*(load_tokenizer(kind, PROSE + ALPHABET) for kind in ("byte", "char", "word")), small()]


def saved(document):
    return tokenizer_from_json(json.dumps(document), "saved")


@settings(max_examples=100)
@given(TEXTS)
@example(STORY)
@example(PROSE)
@example(TEXT)
@example("")
def test_text_round_trips_through_every_kind(text):
    """Words lose blanks that usual prose does not have."""
    for tokenizer in (load_tokenizer("byte", text), load_tokenizer("char", text), small()):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text, tokenizer.kind
        assert ids.dtype == np.uint16 and ids.max(initial=0) <= tokenizer.size - bool(text)
    words = load_tokenizer("word", text)
    decoded = words.decode(words.encode(text))
    assert WORD.findall(decoded) == WORD.findall(text)
    assert "".join(decoded.split(" ")) == "".join(WORD.findall(text))
    assert decoded == text or text not in (STORY, PROSE)


@settings(max_examples=100)
@given(st.lists(st.integers(0, 10**6), max_size=60), st.booleans())
def test_word_ids_round_trip(numbers, are_risky):
    tokenizer = load_tokenizer("word", ALPHABET + PROSE + " a'b a’b a'b’c x y z")
    risky = [i for i, word in enumerate(tokenizer.vocabulary) if word[0] in "'’-\"“‘(/_\nxyza"]
    choices = risky if are_risky else range(tokenizer.size)
    ids = [choices[number % len(choices)] for number in numbers]
    assert len(risky) > 12 and tokenizer.encode(tokenizer.decode(ids)).tolist() == ids


@given(st.sampled_from([0, 1, 2, 3]), st.lists(st.integers(-3, 420), max_size=100))
def test_decoding_never_fails_and_matches_streaming(which, ids):
    tokenizer = one_of_each_kind()[which]
    streamer = tokenizer.streamer()
    assert "".join([streamer.feed(i) for i in ids]) + streamer.flush() == tokenizer.decode(ids)
    for unknown in ([-1], [tokenizer.size], [10**9], np.array([2**31 - 1], np.int32)):
        assert tokenizer.decode(unknown) == "\ufffd"


def test_text_is_split_by_documented_rules():
    byte = load_tokenizer("byte", "")
    assert byte.encode("é🙂").tolist() == list("é🙂".encode())
    # A foreign id inside a character breaks it, but joins nothing.
    assert byte.decode([0xC3, 256, 0xA9]) == byte.decode([0xC3, -1, 0xA9]) == "\ufffd" * 3
    chars = load_tokenizer("char", "hello")
    assert chars.vocabulary == ("e", "h", "l", "o") and chars.encode("hole").tolist() == [1, 3, 2, 0]
    words = load_tokenizer("word", "don't stop_it, x2!\n")
    assert words.vocabulary == ("\n", "!", ",", "_", "don't", "it", "stop", "x2")
    assert words.decode(words.encode("stop  it \t!\n\ndon't")) == "stop it!\n\ndon't"
    assert saved(BYTES).encode("ab b").tolist() == [256, 0x20, ord("b")]
    assert small().separator == small().size - 1  # text cannot spell it
    assert small().separator not in small().encode("<|endoftext|>")
    assert small().decode([small().separator]) == "<|endoftext|>" and len(small().encode(TEXT)) < len(TEXT.encode())
    assert id_dtype(65536) is np.uint16 and id_dtype(65537) is np.uint32
    tokenizer = load_tokenizer("word", words := " ".join(f"w{i}" for i in range(65537)))
    ids = tokenizer.encode(words)
    assert ids.dtype == np.uint32 and ids.max() == 65536 and tokenizer.decode(ids) == words


def test_bpe_of_gpt2_size_is_not_gpt2():
    entries = [*symbols(), *(f"a{i}" for i in range(GPT2_SIZE - 257)), "<|endoftext|>"]
    other = saved({**BYTES, "vocabulary": entries, "merges": [], "separator": GPT2_SIZE - 1})
    assert other.describe() == "BPE, 50,257 entries"


@needs_gpt2
def test_gpt2_has_its_known_ids():
    assert fingerprint(gpt2()) == GPT2_FINGERPRINT and gpt2().describe() == "GPT-2's BPE, 50,257 entries"
    assert (gpt2().size, gpt2().separator) == (50257, 50256)
    for text, ids in (
        ("Hello, world!", [15496, 11, 995, 0]),
        (" don't", [836, 470]),
        ("<|endoftext|>", [27, 91, 437, 1659, 5239, 91, 29]),
        ("", []),
    ):
        assert gpt2().encode(text).tolist() == ids, text


def test_streamer_waits_for_whole_characters():
    for tokenizer in (load_tokenizer("byte", ""), saved(BYTES)):
        streamer = tokenizer.streamer()
        ids = tokenizer.encode("é🙂").tolist()
        assert [streamer.feed(i) for i in ids] == ["", "é", "", "", "", "🙂"], tokenizer.kind
        assert (streamer.feed(ids[0]), streamer.flush()) == ("", "\ufffd")
    words = load_tokenizer("word", PROSE)
    streamer = words.streamer()
    prompt, more = words.encode("said").tolist(), words.encode("Nell.").tolist()
    assert "".join([streamer.feed(i) for i in prompt + more][len(prompt) :]) == " Nell."


def test_saved_tokenizers_load_unchanged(tmp_path):
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


def test_invalid_tokenizer_names_are_rejected(tmp_path):
    (binary := tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, text, error, *words in (
        *((kind, None, UsageError, "requires training text") for kind in ("char", "word")),
        ("chra", None, UsageError, "did you mean 'char'?", "byte, char, word, bpe:N, gpt2, hub:ORG/NAME, PATH"),
        *((path, None, DataError, "as a saved") for path in (binary, binary / "x")),
        (tmp_path, "text", DataError, "has no tokenizer"),
    ):
        with complains(*words, kind=error):
            load_tokenizer(str(name), *filter(None, [text]))


@pytest.mark.parametrize(("separator", "token_id"), [("first", 0), ("last", 319), ("none", None)])
def test_equal_input_gives_equal_bpe(separator, token_id):
    text = STORY[:20000]
    one, same = (learn_bpe(texts, 320, 2, separator) for texts in ([text], iter([text, ""])))
    assert one.to_json() == same.to_json() and (one.size, one.separator) == (320, token_id)
    assert one.decode(one.encode(TEXT)) == TEXT


def test_rare_pairs_are_not_merged():
    assert learn_bpe(["ab ab ab ab cd cd"], 300, 3, "none").merges == (("a", "b"), ("Ġ", "ab"))
    assert learn_bpe(["text"], 256, 1, "none").size == 256
    with complains("at least 257 entries", kind=UsageError):
        learn_bpe(["text"], 256, 1, "last")
    with complains("no text"):
        learn_bpe(["", ""], 300, 1, "last")

    def texts():
        yield "some text"
        raise DataError("the second file is corrupt")

    with complains("the second file is corrupt"):
        learn_bpe(texts(), 300, 2, "last")


def test_unknown_text_is_named():
    for kind, known, text, *words in (
        ("char", "abc", "abé€é", "character 'é' at position 2 ", "(2 distinct"),
        ("char", "é", "ab", "character 'a' at position 0 ", "(2 distinct"),
        ("char", "", "x", "character 'x' at position 0"),
        ("word", "one two", "two\tone three two four three", "word 'three' at position 8 ", "(2 distinct"),
        ("word", "one", "One", "word 'One' at position 0 ", "(1 distinct"),
        ("word", "", "x", "word 'x' at position 0"),
    ):
        with complains(*words):
            load_tokenizer(kind, known).encode(text)
    smuggled = b"ok \xff".decode("utf-8", errors="surrogateescape")
    for refuse in (
        *(tokenizer.encode for tokenizer in one_of_each_kind()),
        *(functools.partial(load_tokenizer, kind) for kind in ("char", "word")),
    ):
        with complains("position 3"):
            refuse(smuggled)


# Changes of a valid tokenizer, and words of the error.
DAMAGED_WORDS = (
    *(("not json", "not JSON"), ("[" * 100_000, "not JSON"), ("[]", "format"), ("{}", "format")),
    ({"version": 2}, "version 2; this distgpt reads version 1"),
    ({"kind": "wpe"}, "unknown kind 'wpe'"),
    *(({"vocabulary": wrong}, "list") for wrong in (None, "ab")),
    ({"vocabulary": []}, "non-empty"),
    ({"vocabulary": ["a", "b", "a"]}, "'a' 2 times"),
    ({"vocabulary": ["a", 3]}, "3 is not one word"),
    *(({"vocabulary": ["a", wrong]}, f"{wrong!r} is not one word") for wrong in ("", "a b")),
    *(({"kind": "char", "vocabulary": [wrong]}, f"{wrong!r} is not one char") for wrong in ("ab", "")),
)
DAMAGED_BYTES = (
    *(({"vocabulary": wrong}, "list of strings") for wrong in (None, [*symbols(), 3])),
    ({"vocabulary": [*symbols()[1:], "ab"]}, "lacks 1 of the 256 symbols for bytes, such as 'Ā'"),
    ({"vocabulary": [*symbols(), "ab", "ab"]}, "'ab' 2 times"),
    ({"vocabulary": [*symbols(), "ab", ""]}, "entry '' contains symbols that are not bytes"),
    ({"vocabulary": [*symbols(), "ab", "a b"]}, "entry 'a b' contains symbols that are not bytes"),
    ({"merges": None}, "merges must be a list"),
    ({"merges": ["a b"]}, "'a b' is not a pair"),
    *(({"merges": [wrong]}, "is not a pair") for wrong in (["a", "b", "c"], ["a", 1])),
    ({"merges": [["a", "c"]]}, "'ac' of the merge"),
    ({"merges": [["a", "b"], ["a", "b"]]}, "listed twice"),
    *(({"separator": wrong}, f"separator {wrong!r} is not in the vocabulary") for wrong in (258, -1, True, "257")),
    ({"separator": 256}, "separator 'ab' is also a part of ordinary text"),
)


@pytest.mark.parametrize(("good", "changes"), [(WORDS, DAMAGED_WORDS), (BYTES, DAMAGED_BYTES)])
def test_invalid_saved_tokenizer_is_rejected(good, changes):
    assert saved(good).size == len(good["vocabulary"])
    for change, words in changes:
        with complains("some/file.json", words):
            tokenizer_from_json(change if isinstance(change, str) else json.dumps(good | change), "some/file.json")


def test_hub_finds_tokenizer_in_installation(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    folder = third_party.installed("some/model")
    assert folder == tmp_path / "share/distgpt/tokenizers/some/model"
    folder.mkdir(parents=True)
    with complains("pip install huggingface_hub", kind=UsageError):
        third_party.download_tokenizer("some/model")
    write_gpt2_style(folder)
    assert third_party.download_tokenizer("some/model") == folder / "vocab.json"


NASTY = [
    *["'s", "'S", "'ll", "'l", "'re", "'ve", "'d", "'m", "'t", "'", "''", "’s", "<|endoftext|>"],
    *["the", " the"],
    *(" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\xa0", "\u3000", "\u2028", "\x85", "\x1c", "\x0b"),
    *("\u200b", "\u200d", "\ufeff", "\ufffd", "\x00", "\u0378", "\ue000", "\U0010ffff", "\U000e0041"),
    *("a", "Z", "é", "e\u0301", "\u0301", "ß", "中", "日本", "ǅ", "ʰ", "ª", "ع", "ह\u093f", "🙂", "👩‍👧"),
    *("1", "42", "٣", "½", "Ⅷ", "²", "_", "-", "=", "!", "...", "a" * 30, " " * 30, "é" * 20, "=" * 70),
]


def by_the_library(tokenizer, text):
    return tokenizer.library.encode(text, add_special_tokens=False).ids


def fast(tokenizer):
    return type(tokenizer)(tokenizer.vocabulary, tokenizer.merges, tokenizer.separator).fast


def differing(tokenizer, encoder, texts):
    return [t for t in texts if encoder.encode(t.encode()).tolist() != by_the_library(tokenizer, t)]


def nasty_texts(count, length, seed):
    source = random.Random(seed)
    return ["".join(source.choices(NASTY, k=source.randrange(length))) for _ in range(count)]


def mixed_text(size):
    """Mix prose, code, random strings and a few invalid bytes."""
    code = "def f(x):\n    if x > 10 and x != 0x1F:\n\t\treturn {'a': [x ** 2, \"b\"]}  # why?\n\n\n"
    random_ones, source, parts = nasty_texts(4000, 40, seed=1), random.Random(2), []
    while sum(map(len, parts)) < size:
        start = source.randrange(len(STORY))
        parts += [STORY[start : start + 500], code * source.randrange(3), *source.sample(random_ones, 9)]
    damaged = bytearray("".join(parts).encode())
    for _ in range(200):
        damaged[source.randrange(len(damaged))] = 0xFF
    return damaged.decode("utf-8", "replace")


@functools.cache
def own():
    """Learn merges of all kinds of characters, so that wrongly cut pieces are detected."""
    return learn_bpe([mixed_text(200_000)], size=3000, min_frequency=2, separator="last")


TOKENIZERS = pytest.mark.parametrize(
    "tokenizer", [pytest.param(own, id="own"), pytest.param(gpt2, id="gpt2", marks=needs_gpt2)]
)


@pytest.mark.ci
@TOKENIZERS
def test_random_text_matches_library(tokenizer):
    text = mixed_text(300_000)
    texts = [text, text[:100_000], "", *NASTY, *nasty_texts(1500, 20, seed=3)]
    assert not differing(tokenizer(), fast(tokenizer()), texts)


@pytest.mark.slow
def test_every_code_point_matches_library():
    codes = [chr(code) for code in [*range(0xD800), *range(0xE000, 0x20000), *range(0xE0000, 0xE0200)]]
    assert not differing(own(), fast(own()), [beside.join(codes) for beside in ("", "a", "1! ")])


@TOKENIZERS
def test_long_pieces_match_library(tokenizer):
    encoder = fast(tokenizer())
    for length in (7, 8, 9, 16, 17, 23, 24, 25, 255, 256, 257, 5000):
        runs = [text * length for text in ("a", " ", "é", "中", "=", "ab", "1", "\n", "\x00")]
        texts = [text for run in runs for text in (run, f"x {run} y", f"{run}z", f" {run}\n")]
        assert not differing(tokenizer(), encoder, texts), length


@pytest.mark.parametrize(("rows", "ids", "at_once"), [(8, 5000, 4000), (4096, 30, 4000), (4096, 5000, 257)])
def test_full_memory_is_cleared(monkeypatch, rows, ids, at_once):
    monkeypatch.setattr(fast_bpe, "MEMORY_ROWS", rows)
    monkeypatch.setattr(fast_bpe, "MEMORY_IDS", ids)
    monkeypatch.setattr(fast_bpe, "IDS_AT_ONCE", at_once)
    encoder = fast(own())
    assert not differing(own(), encoder, [mixed_text(50_000), *nasty_texts(300, 60, seed=5)])
    rows_used, ids_used = encoder.scratch.memory.used
    assert rows_used <= rows and ids_used <= ids


def test_similar_pieces_are_distinguished(monkeypatch):
    """The encoder remembers pieces of up to 24 bytes: three words of eight."""
    monkeypatch.setattr(fast_bpe, "MEMORY_ROWS", 64)  # so that they collide
    zeros = ["\x00" * length for length in range(1, 25)]
    ends = [a + b for a in "abcde" for b in "abcde"]
    words = [" ".join("a" * at + end + "a" * (16 - at) for end in ends) for at in (0, 8, 16)]
    assert not differing(own(), fast(own()), ["a".join(zeros), "a".join(zeros[::-1]), *words])


def test_threads_share_one_tokenizer(monkeypatch):
    monkeypatch.setattr(fast_bpe, "KINDS", np.zeros_like(fast_bpe.KINDS))  # unfilled, so that all threads fill it
    texts = [mixed_text(40_000)[start:] for start in range(8)]
    encoder, meeting = fast(own()), threading.Barrier(4)

    def work(text):
        meeting.wait(timeout=60)
        return encoder.encode(text.encode()).tolist()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, texts)) == [by_the_library(own(), text) for text in texts]


def test_large_inputs_use_compiled_encoder(monkeypatch):
    monkeypatch.setattr(bpe, "LARGE", 1000)
    tokenizer = tokenizer_from_json(own().to_json(), "copy")
    texts = ["x" * 400, "it's " * 80, "y = 1\n" * 100, ""]
    ids = [tokenizer.encode(text) for text in texts[:2]]
    assert "fast" not in vars(tokenizer)
    ids += [tokenizer.encode(text) for text in texts[2:]]
    assert "fast" in vars(tokenizer)
    assert [i.tolist() for i in ids] == [by_the_library(own(), text) for text in texts]
    assert {i.dtype for i in ids} == {np.dtype(np.uint16)}
