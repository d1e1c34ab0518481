import json
import threading
import time
import unicodedata
from importlib.util import find_spec
from pathlib import Path

import hostiletokenizers
import numpy as np
import pytest
from complaints import complains, done
from distgpt.core.config import ModelConfig, RunConfig
from distgpt.core.data.tokenizers import ChatTemplate, fingerprint, load_tokenizer, tokenizer_from_json
from distgpt.core.model.model import Architecture
from distgpt.core.saved.modelfile import Description
from distgpt.core.saved.tensors import write_tensors
from distgpt.corpora.tokenizers import library
from distgpt.corpora.tokenizers.bpe import learn_bpe, symbols
from distgpt.corpora.tokenizers.library import growth, may_be_slow, refuse_growth
from distgpt.corpora.tokenizers.tokenizer_json import LibraryTokenizer
from families import FAMILIES, document, write_family
from hostiletokenizers import FAILING, byte_level, charsmap, failing, replace, sequence, slow, split
from hostiletokenizers import TEXT as LETTERS
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizing import STORY, TEXT, small, write_gpt2_style

from conftest import inside, refused, wait_for

PLAIN = (STORY[:2000], "1234567 in 2026", " two  blanks ", "naïve e\u0301 中日 🙂\n\n\tx", "", " ")


@pytest.fixture(params=FAMILIES)
def both(request, tmp_path):
    return write_family(tmp_path / "model", request.param), Tokenizer.from_str(document(request.param))


def test_text_has_ids_of_library(both):
    ours, library = both
    for text in PLAIN:
        ids = ours.encode(text).tolist()
        assert ids == library.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(ids) == library.decode(ids, skip_special_tokens=False), text
        streamer = ours.streamer()
        assert "".join(map(streamer.feed, ids)) + streamer.flush() == ours.decode(ids)


def test_text_cannot_spell_special_tokens(both):
    ours, library = both
    for spelled, token in ours.specials.items():
        assert token == library.token_to_id(spelled)
        found = ours.encode(f"a {spelled} b").tolist()
        assert token not in found and spelled in ours.decode(found)
        assert token in library.encode(f"a {spelled} b").ids
    assert len(ours.specials) >= 3


def test_parts_have_ids_of_whole_text(both):
    """The library finds special tokens in the text, and text after one is not a beginning."""
    ours, library = both
    assert ours.encode_prompt("The lamp") == library.encode("The lamp").ids
    spelled, token = list(ours.specials.items())[-1]
    ids, ends = ours.encode_parts(["lamp 12", token, token, "é the lamp", "s"])
    assert ids.tolist() == library.encode(f"lamp 12{spelled}{spelled}é the lamps", add_special_tokens=False).ids
    assert ends[-1] == len(f"lamp 12{spelled}{spelled}é the lamps") and (ends[1:] >= ends[:-1]).all()
    first = ids.tolist().index(token)
    assert ends[first - 1] == 7 and ends[first] == 7 + len(spelled) and ends[first + 1] == 7 + 2 * len(spelled)


def test_saved_tokenizer_keeps_chat_template(both):
    ours, _ = both
    chat = ChatTemplate("{{ bos_token }}", {"bos_token": "<s>"}, (1,))
    back = tokenizer_from_json(ours.with_chat(chat).to_json(), "a file")
    assert back.to_json() == ours.with_chat(chat).to_json() and back.chat == chat
    assert back.encode(TEXT).tolist() == ours.encode(TEXT).tolist() and fingerprint(back) == fingerprint(ours)


def test_other_files_set_template_and_ends(tmp_path):
    folder = tmp_path / "model"
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    special = {"content": "<|im_end|>", "special": True}
    for template in (named, "yes"):
        found = write_family(folder, "qwen", chat_template=template, eos_token=special)
        end = found.specials["<|im_end|>"]
        assert found.chat == ChatTemplate("yes", {"eos_token": "<|im_end|>"}, (end,))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, end]}))
    (folder / "chat_template.jinja").write_text("newer")
    found = load_tokenizer(str(folder))
    assert found.chat.source == "newer" and found.chat.ends == (3, end) and found.ends == (found.separator, 3, end)
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with complains("not valid UTF-8"):
        load_tokenizer(str(folder))


def test_special_tokens_keep_their_ids(tmp_path):
    """The library numbers unknown tokens by their count, which would be the last entries' IDs here."""
    found = json.loads(document("smollm2"))
    vocab = found["model"]["vocab"]
    for token in found["added_tokens"]:
        vocab.pop(token["content"], None)
    last = max(vocab, key=vocab.get)
    text = last.replace("Ġ", " ")
    for token in found["added_tokens"]:
        token["id"] += 1
    vocab[last] = len(vocab)
    (tmp_path / "tokenizer.json").write_text(json.dumps(found))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.encode(text).tolist() == [vocab[last]]
    specials = list(tokenizer.specials.values())
    assert tokenizer.encode_parts([text, *specials])[0].tolist() == [vocab[last], *specials]


def test_missing_byte_names_the_character(tmp_path):
    """The library would drop it."""
    lacking = json.loads(document("smollm2"))
    vocab = {text: i for text, i in lacking["model"]["vocab"].items() if text != symbols()[0xAD]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(lacking | {"model": lacking["model"] | {"vocab": vocab}}))
    found = load_tokenizer(str(tmp_path))
    assert found.decode(found.encode("é")) == "é"
    with complains("'中' at position 2 cannot be encoded"):
        found.encode("a 中")


def hugging_face(special="<|endoftext|>", tokenizer=None):
    """Return the document that `tokenizers` writes for a BPE, by default the small one."""
    tokenizer = tokenizer or small()
    entries = {entry: i for i, entry in enumerate(tokenizer.vocabulary[:-1])}
    library = Tokenizer(models.BPE(entries, list(tokenizer.merges)))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if special:
        library.add_special_tokens([AddedToken(special, special=True)])
    return json.loads(library.to_str())


def loaded(path, document):
    path.write_text(json.dumps(document), encoding="utf-8")
    return load_tokenizer(str(path))


def test_every_file_layout_gives_equal_tokenizer(tmp_path):
    merges_as_strings = hugging_face()
    merges_as_strings["model"]["merges"] = [" ".join(pair) for pair in merges_as_strings["model"]["merges"]]
    write_gpt2_style(tmp_path)
    found = {
        "vocab.json and merges.txt": load_tokenizer(str(tmp_path)),
        "vocab.json": load_tokenizer(str(tmp_path / "vocab.json")),
        "merges as strings": loaded(tmp_path / "old.json", merges_as_strings),
        "pairs": loaded(tmp_path / "tokenizer.json", hugging_face()),
        "tokenizer.json, which comes first": load_tokenizer(str(tmp_path)),
    }
    for form, tokenizer in found.items():
        assert tokenizer.to_json() == small().to_json(), form


def test_single_special_token_is_the_separator(tmp_path):
    for special in ("", "<end of text>", "ende\u0301"):
        tokenizer = loaded(tmp_path / "tokenizer.json", hugging_face(special))
        assert tokenizer.separator == (tokenizer.size - 1 if special else None)
        assert not special or tokenizer.decode([tokenizer.separator]) == special
        assert tokenizer.encode(TEXT).tolist() == small().encode(TEXT).tolist(), special


def test_other_preprocessing_uses_the_library(tmp_path):
    byte_level = pre_tokenizers.ByteLevel
    without_rule = byte_level(add_prefix_space=False, use_regex=False)
    digits = pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated")
    for part, value in (
        ("normalizer", normalizers.NFC()),
        ("pre_tokenizer", byte_level(add_prefix_space=True)),
        ("pre_tokenizer", pre_tokenizers.Sequence([digits, without_rule])),
        ("pre_tokenizer", without_rule),
    ):
        library = Tokenizer.from_str(json.dumps(hugging_face()))
        library.decoder = decoders.ByteLevel()
        setattr(library, part, value)
        found = loaded(tmp_path / "tokenizer.json", json.loads(library.to_str()))
        assert found.kind == "library"
        assert found.encode("it's 1234, é").tolist() == library.encode("it's 1234, é").ids, part


def test_unusable_document_is_rejected(tmp_path):
    llama, sentences, plain = json.loads(document("llama3")), json.loads(document("tinyllama")), hugging_face("")

    def model(base, **changes):
        return base | {"model": base["model"] | changes}

    for change, message in (
        (llama | {"decoder": None}, "its decoder is missing"),
        (llama | {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}, "decoder is WordPiece"),
        (model(sentences, byte_fallback=False), "no tokens for single bytes"),
        (model(llama, vocab={}), "its model, 'BPE', has no vocabulary"),
        (model(llama, vocab={"a": -1}), "'a' has the invalid ID -1"),
        (model(llama, merges=[["zz", "qq"]]), "rejected by the tokenizers library"),
        (llama | {"pre_tokenizer": {"type": "Magic"}}, "rejected by the tokenizers library"),
        (llama | {"added_tokens": [{"id": 3}]}, "has no content"),
        (llama | {"added_tokens": llama["added_tokens"][:1] * 2}, "is listed twice"),
        # The library aborts the process on this prefix.
        (model(llama, continuing_subword_prefix="é"), "continuing_subword_prefix"),
        (llama | {"added_tokens": [{"id": 1 << 40, "content": "<x>", "special": True}]}, "has the invalid ID"),
        (model(plain, end_of_word_suffix="</w>"), "sets end_of_word_suffix"),
        (model(plain, vocab=None), "no vocabulary or no merges"),
        (model(plain, merges=["a b c"]), "['a', 'b', 'c'] is not a pair"),
        (model(plain, vocab={"a": 0, "b": 2}), "'b' has the ID 2"),
        (model(plain, vocab={"a": "0"}), "has the ID '0'"),
        (plain | {"added_tokens": [{"id": 399, "content": "    ", "special": False}]}, "its decoder is missing"),
        (plain | {"added_tokens": [{"id": 400, "content": "<|endoftext|>", "special": True}]}, "has the ID 400"),
    ):
        with complains("tokenizer.json", message):
            loaded(tmp_path / "tokenizer.json", change)


def test_invalid_vocab_and_merges_are_rejected(tmp_path):
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    for damage, path, *words in (
        (lambda: write_gpt2_style(tmp_path, ["a b c"]), tmp_path, "merges.txt", "line 1 ", "'a b c'"),
        (lambda: write_gpt2_style(tmp_path, hole=1000), tmp_path, "'hole' has the ID 1000"),
        (lambda: merges.write_bytes(b"\xff"), tmp_path, "cannot read", "merges.txt"),
        (merges.unlink, vocab, "vocabulary without its merges"),
        (lambda: None, tmp_path, "has no tokenizer"),
    ):
        damage()
        with complains(*words):
            load_tokenizer(str(path))


def test_trained_bpe_is_saved_and_described(tmp_path):
    (tmp_path / "text.txt").write_bytes(b"\xef\xbb\xbf" + STORY.replace("\n", "\r\n").encode())
    out = tmp_path / "bpe.json"
    printed = done("tokenizer", "train", tmp_path / "text.txt", "--vocab-size", "500", "--out", out)
    assert printed == f"{out}: BPE, 500 entries\n"
    learned = load_tokenizer(str(out))
    assert learned.to_json() == learn_bpe([STORY], 500, 2, "last").to_json()
    page = inside("tokenizer", "info", out, "--text", "the é\n").stdout
    assert f"fingerprint  {fingerprint(learned)}" in page and "separator    499 <|endoftext|>" in page
    assert r"he│ │\xc3│\xa9│\n" in page


def test_training_options_are_used(tmp_path):
    out = tmp_path / "out.json"
    options = ["--min-frequency", "30", "--separator", "first"]
    printed = done("tokenizer", "train", "story", "--vocab-size", "9000", "--out", out, *options)
    assert printed.endswith("entries; no more pairs are frequent enough\n")
    assert out.read_text() == learn_bpe([STORY], 9000, 30, "first").to_json()
    for kind in ("char", "word"):
        done("tokenizer", "train", "story", "--kind", kind, "--out", tmp_path / kind)
        assert (tmp_path / kind).read_text() == load_tokenizer(kind, STORY).to_json()
        assert kind in inside("tokenizer", "info", tmp_path / kind).stdout
    (tmp_path / "a.jsonl").write_text('{"story": "ab ab", "no": 1}\n{"story": "ab ab c"}')
    options = ["--field", "story", "--vocab-size", "300", "--separator", "none"]
    done("tokenizer", "train", tmp_path / "a.jsonl", *options, "--out", tmp_path / "out")
    assert load_tokenizer(str(tmp_path / "out")).merges == (("a", "b"), ("Ġ", "ab"))


REFUSED = (
    ("train story --out OUT", 2, "--vocab-size"),
    ("train story --out OUT --vocab-size 256", 2, "at least 257"),
    ("train story --out OUT --kind word --vocab-size 9", 2, "--kind bpe"),
    ("train story --out TAKEN --kind word", 2, "already exists"),
    ("train story --out OUT/below --kind word", 2, "no directory"),
    ("train nowhere --out OUT --kind word", 65, "cannot read 'nowhere'"),
    ("train FOLDER --out OUT --kind word", 65, "FOLDER has no files"),
    ("train EMPTY --out OUT --vocab-size 300", 65, "no text to train on"),
)


def test_invalid_tokenizer_commands_leave_nothing(tmp_path):
    (tmp_path / "FOLDER").mkdir()
    for name, content in (("EMPTY", b""), ("BINARY", b"\xff\xfe"), ("TAKEN", b'{"mine": "dear"}')):
        (tmp_path / name).write_bytes(content)
    before = sorted(tmp_path.rglob("*"))
    for line, code, words in REFUSED:
        refused(inside("tokenizer", *line.split(), cwd=tmp_path), code, words)
        assert sorted(tmp_path.rglob("*")) == before, line
    assert json.loads((tmp_path / "TAKEN").read_text()) == {"mine": "dear"}


METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}


@pytest.mark.parametrize("change", [
    hostiletokenizers.bomb(),
    byte_level(normalizer=replace("a", "a" * 17)),
    byte_level(normalizer=replace("", "a")),  # inserts between all characters
    byte_level(normalizer=replace("(?=a)", "a" * 16, "Regex")),
    byte_level(normalizer={"pattern": {"String": "a"}, "content": "a" * 17}),  # the format of old files
    byte_level(normalizer={"type": "Prepend", "prepend": "a" * 16}),
    byte_level(normalizer=sequence(sequence(*[{"type": "ByteLevel"}] * 4))),
    byte_level(pre_tokenizer={"type": "Sequence", "pretokenizers": [METASPACE] * 5}),
    byte_level(normalizer=charsmap(b"x" * 300 + b"\0")),
    byte_level(normalizer=sequence(*[charsmap(b"x" * 18 + b"\0")] * 2)),
])  # fmt: skip
def test_growing_document_is_rejected(change):
    with complains("a file: its normalizer and pre-tokenizer ", "times as long"):
        LibraryTokenizer(change, "a file")


def test_known_families_pass_growth_check():
    blank, words = "▁", Regex(r" {2,}")
    for before in (
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()],  # CLIP
        [normalizers.Prepend(blank), normalizers.Replace(" ", blank)],  # Llama 2
        [normalizers.NFKC(), normalizers.NFKD(), normalizers.StripAccents(), normalizers.Nmt()],
        [normalizers.Strip(), normalizers.Replace(words, blank)],  # T5, with its table
    ):
        for after in (pre_tokenizers.ByteLevel(add_prefix_space=True), pre_tokenizers.Metaspace()):  # RoBERTa
            found = Tokenizer.from_str(json.dumps(byte_level(normalizer=charsmap(b"x" * 18 + b"\0"))))
            found.normalizer = normalizers.Sequence([found.normalizer, *before])
            found.pre_tokenizer = after
            refuse_growth(found, "a file")


STEPS = [
    normalizers.Replace("a", "bcd"), normalizers.Replace(Regex("a"), "bcd"), normalizers.Prepend("xyz"),
    normalizers.BertNormalizer(), normalizers.ByteLevel(), normalizers.NFD(), normalizers.NFKC(),
    normalizers.Lowercase(), pre_tokenizers.ByteLevel(), pre_tokenizers.ByteLevel(add_prefix_space=False),
    pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation(), pre_tokenizers.Digits(),
]  # fmt: skip


@given(st.text("abc 中\ufdfaİ🙂é'1.", min_size=1) | st.text(min_size=1))
@example("\ufdfa\ufdfa")
def test_growth_bound_holds_for_every_step(text):
    for step in STEPS:
        about, is_first = json.loads(step.__getstate__()), hasattr(step, "normalize_str")
        made = step.normalize_str(text) if is_first else "".join(p for p, _ in step.pre_tokenize_str(text))
        # Byte symbols count by source characters: two for a character of two bytes.
        size = max(len(text), len(text.encode()) / 2) if about["type"] == "ByteLevel" else len(text)
        assert len(made) <= size * (most := growth(about)) * (library.TABLES if most == 1 else 1), about


def test_unicode_tables_grow_within_bound():
    assert max(len(unicodedata.normalize("NFKD", chr(code).lower())) for code in range(0x110000)) == library.TABLES


@pytest.mark.parametrize("name", FAILING)
def test_library_failure_is_one_line(name, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(FAILING[name]()))
    result = inside("tokenizer", "info", path, "--text", LETTERS)
    refused(result, 65, "tokenizer.json: the tokenizers library cannot encode this text: ")
    assert "Traceback" not in result.stderr


def test_endless_expression_times_out(monkeypatch):
    """Other text is rejected until the expression has ended."""
    monkeypatch.setattr(library, "SECONDS", 0.2)
    tokenizer, begun = LibraryTokenizer(slow(), "a file"), time.monotonic()
    with complains("1,101 characters take longer than 0 s"):
        tokenizer.encode("a" * 1100 + "!")
    busy = [each for each in threading.enumerate() if each.name == "encoder"]
    assert time.monotonic() - begun < 5 and len(busy) == 1
    with complains("still encoding"):
        tokenizer.encode("a")
    busy[0].join(60)
    assert tokenizer.decode(tokenizer.encode("a")) == "a"


def test_long_encoding_lets_threads_run():
    """A server's event loop must run. The library would start one thread per processor."""
    tokenizer, turns, ended = LibraryTokenizer(byte_level(), "a file"), [], threading.Event()
    before = len(list(Path("/proc/self/task").iterdir()))
    thread = threading.Thread(
        target=lambda: turns.extend(time.monotonic() for _ in iter(lambda: ended.wait(1e-3), True))
    )
    thread.start()
    begun = time.monotonic()
    tokenizer.encode("The harbour lay still. " * 20_000)
    until = time.monotonic()
    ended.set()
    thread.join()
    assert sum(begun < turn < until for turn in turns) > 5  # at most one if the lock is held
    # A thread that was joined takes a moment to leave the kernel's list.
    wait_for(lambda: len(list(Path("/proc/self/task").iterdir())) <= before)


def test_only_slow_steps_need_a_thread():
    for family in FAMILIES:
        assert not may_be_slow(Tokenizer.from_str(document(family))), family
    for change in (
        byte_level(pre_tokenizer=split("a*b")),
        byte_level(normalizer=replace("a+", "", "Regex")),
        byte_level(normalizer=replace("a" * 99 + "b", "")),
    ):
        assert may_be_slow(Tokenizer.from_str(json.dumps(change)))
    assert may_be_slow(Tokenizer.from_str(json.dumps(FAILING["no unknown word"]())))


def test_commands_reject_hostile_documents(tmp_path):
    config = RunConfig(model=ModelConfig(vocab_size=640, seq_len=64, n_layer=1, n_head=1, n_embd=8))
    arrays = {spec.name: np.zeros(spec.shape, np.float32) for spec in Architecture(config.model).layout.specs}
    about, weights = Description(config, failing()).to_metadata(), tmp_path / "w.safetensors"
    write_tensors(weights, arrays, about)
    refused(inside("infer", "--weights", weights, "--prompt", LETTERS), 65, "cannot encode this text")
    (tmp_path / "prompts").write_text(json.dumps({"prompt": LETTERS}))
    words = ["--weights", weights, "--prompts", tmp_path / "prompts", "--out", tmp_path / "answers"]
    refused(inside("infer", *words), 65, "line 1: ", "cannot encode this text")
    folder = tmp_path / "folder"
    assert inside("weights", "export", weights, "--out", folder).returncode == 0
    (folder / "tokenizer.json").write_text(json.dumps(hostiletokenizers.bomb()))
    result = inside("weights", "import", folder, "--out", tmp_path / "back")  # without a tokenizer
    assert "tokenizer  none" in result.stdout and "times as long" in result.stderr
    bomb = {**json.loads(about["tokenizer"]), "document": hostiletokenizers.bomb()}
    write_tensors(weights, arrays, about | {"tokenizer": json.dumps(bomb)})
    for command in ("infer", "chat", *["serve"] * (find_spec("starlette") is not None)):
        refused(inside(command, "--weights", weights), 65, "times as long")
    refused(inside("weights", "info", weights), 65, "times as long")
