"""Small, well-formed tokenizer.json documents that make encoding fail or take very long."""

import base64
import json
import struct

from distgpt.corpora.tokenizers.tokenizer_json import LibraryTokenizer
from families import document

TEXT = "a" * 40 + "!"


def byte_level(**changes):
    return {**json.loads(document("smollm2")), **changes}


def replace(pattern, content, kind="String"):
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def sequence(*steps):
    return {"type": "Sequence", "normalizers": list(steps)}


def split(pattern):
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    after = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [cut, after]}


def charsmap(texts=b"", unit=0):
    """Return SentencePiece's table with a trie of equal units and these replacements."""
    table = struct.pack("<I", 1024) + struct.pack("<I", unit) * 256 + texts
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


def bomb():
    """Replace a letter by sixteen, eight times: 4 GB of "a"."""
    return byte_level(normalizer=sequence(*[replace("a", "a" * 16)] * 8))


def _word_level():
    found = byte_level()
    return found | {"model": {"type": "WordLevel", "vocab": found["model"]["vocab"], "unk_token": "[none]"}}


# Documents that load, and make the library fail when encoding.
FAILING = {
    "no unknown word": _word_level,
    "backtracks": lambda: byte_level(pre_tokenizer=split(r"(a|a)+$|(a*)*b")),
    "refers back": lambda: byte_level(pre_tokenizer=split(r"(?:(a+)+)\1c")),
    "backtracks in a normalizer": lambda: byte_level(normalizer=replace("(((((a*)*)*)*)*)*$", "x", "Regex")),
    "replaces nothing": lambda: byte_level(normalizer=replace("(?=a)", "a", "Regex")),
    "a table that points outside": lambda: byte_level(normalizer=charsmap(unit=(1 << 30) - 1)),
}


def failing(name="no unknown word"):
    return LibraryTokenizer(FAILING[name](), "a file")


def slow():
    """Return a document with cubic run time below the library's limit."""
    return byte_level(pre_tokenizer=split(r"aa*aa*b"))
