"""A tokenizer in the files that transformers looks for beside a model, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from distgpt.data.hub import TOKENIZER_FILES
from distgpt.data.tokenizers.bpe import BpeTokenizer, symbols
from distgpt.data.tokenizers.naming import Tokenizer, load_tokenizer

# Tokenizers without a form that transformers knows are kept in a file of ours; so that it returns as it
# was, also the one of bytes, though transformers can use that too: as BPE without merges.
OWN_NAME = "distgpt_tokenizer.json"


def tokenizer_in(directory: Path) -> Tokenizer | None:
    """The tokenizer of an exported or foreign model, None if there is none."""
    if (directory / OWN_NAME).exists():
        return load_tokenizer(str(directory / OWN_NAME))
    names = (TOKENIZER_FILES[:1], TOKENIZER_FILES[1:])
    if any(all((directory / name).exists() for name in together) for together in names):
        return load_tokenizer(str(directory))
    return None


def is_known_to_transformers(tokenizer: Tokenizer) -> bool:
    return tokenizer.kind in ("bpe", "byte")


def tokenizer_files(tokenizer: Tokenizer, context: int) -> dict[str, str]:
    """Texts by file name."""
    own = {} if isinstance(tokenizer, BpeTokenizer) else {OWN_NAME: tokenizer.to_json()}
    bpe = BpeTokenizer(list(symbols()), [], None) if tokenizer.kind == "byte" else tokenizer
    return own | (_bpe_files(bpe, context) if isinstance(bpe, BpeTokenizer) else {})


def _bpe_files(tokenizer: BpeTokenizer, context: int) -> dict[str, str]:
    vocab = {entry: i for i, entry in enumerate(tokenizer.vocabulary)}
    merges = [f"{a} {b}" for a, b in tokenizer.merges]
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    added = []
    if tokenizer.separator is not None:
        content = tokenizer.decode([tokenizer.separator])
        settings |= dict.fromkeys(("bos_token", "eos_token", "unk_token"), content)
        plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added = [{"id": tokenizer.separator, "content": content, **plain, "special": True}]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }
    return {
        "tokenizer.json": json.dumps(whole, ensure_ascii=False),
        "tokenizer_config.json": json.dumps(settings, indent=1),
        "vocab.json": json.dumps(vocab, ensure_ascii=False),
        "merges.txt": "".join(f"{line}\n" for line in ["#version: 0.2", *merges]),
    }
