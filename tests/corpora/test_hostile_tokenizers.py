import json
import threading
import time
import unicodedata
from importlib.util import find_spec
from pathlib import Path

import hostiletokenizers
import numpy as np
import pytest
from complaints import complains
from distgpt.core.config import ModelConfig, RunConfig
from distgpt.core.model.model import Architecture
from distgpt.core.saved.modelfile import Description
from distgpt.core.saved.tensors import write_tensors
from distgpt.corpora.tokenizers import library
from distgpt.corpora.tokenizers.library import growth, may_be_slow, refuse_growth
from distgpt.corpora.tokenizers.tokenizer_json import LibraryTokenizer
from families import FAMILIES, document
from hostiletokenizers import FAILING, TEXT, byte_level, charsmap, failing, replace, sequence, slow, split
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from conftest import inside, refused

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
    result = inside("tokenizer", "info", path, "--text", TEXT)
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
    before = threading.active_count(), len(list(Path("/proc/self/task").iterdir()))
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
    assert (threading.active_count(), len(list(Path("/proc/self/task").iterdir()))) <= before


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
    refused(inside("infer", "--weights", weights, "--prompt", TEXT), 65, "cannot encode this text")
    (tmp_path / "prompts").write_text(json.dumps({"prompt": TEXT}))
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
