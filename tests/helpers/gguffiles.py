"""GGUF models for tests: exports, and invalid files made byte by byte."""

import json
import struct

import numpy as np
from chattemplates import ENDS, TEMPLATES, settings
from distgpt.core.config import ModelConfig, RunConfig
from distgpt.core.data.tokenizers import checked_chat
from distgpt.core.saved.modelfile import Description
from distgpt.core.saved.tensors import write_tensors
from distgpt.corpora.tokenizers.third_party import from_document
from distgpt.models.formats.gguf.container import Numbers, read_container, write_container
from families import document
from foreignmodels import MODERN, random_model, shape, tensors_in

LLAMA = shape(300, 32, 2, 4, 64, n_kv_head=2, mlp_width=96, **MODERN)


def of_sentencepiece(prefix=True):
    """Return a tokenizer.json like transformers' for SentencePiece, with every pair that gives a piece."""
    known = json.loads(document("tinyllama"))
    vocab = known["model"]["vocab"]
    merges = []
    for piece in sorted(vocab, key=vocab.get):
        pairs = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        pairs = [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab]
        merges += sorted(pairs, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
    known["model"]["merges"] = [list(pair) for pair in merges]
    if not prefix:
        known["normalizer"]["normalizers"].pop(0)
        known["decoder"]["decoders"].pop()
    return known


def tokenizer_like(family):
    is_piecewise = family in ("tinyllama", "mistral")
    found = of_sentencepiece(family == "tinyllama") if is_piecewise else json.loads(document(family))
    tokenizer = from_document(found, family)
    tokens = {key: value for key, value in settings(family).items() if key != "chat_template"}
    chat = {"source": TEMPLATES[family], "tokens": tokens, "ends": [tokenizer.specials[ENDS[family]]]}
    return tokenizer.with_chat(checked_chat(chat, tokenizer.size, family))


def with_tokenizer(path, tokenizer, **more):
    of = {**LLAMA, "vocab_size": tokenizer.size + 5, **more}
    random_model(path, of, None)
    write_tensors(path, tensors_in(path), Description(RunConfig(model=ModelConfig(**of)), tokenizer).to_metadata())
    return path


def rewritten_gguf(path, change):
    """Rewrite the file in float32; `change` gets the metadata and tensors."""
    found = read_container(path)
    metadata = {k: v.array if isinstance(v, Numbers) else v for k, v in found.metadata.items()}
    tensors = {
        name: np.concatenate([rows for _, rows in found.rows(name)]).reshape(entry.shape)
        for name, entry in found.tensors.items()
    }
    change(metadata, tensors)
    kinds = {name: ("F32", array.shape) for name, array in tensors.items()}
    path.unlink()
    write_container(path, metadata, kinds, lambda name: iter([tensors[name]]))


def text(content):
    return struct.pack("<Q", len(content)) + content


def front(version=3, tensors=0, values=0):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, values)


def tensor(name=b"x", shape=(4,), kind=0, at=0):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, at)
