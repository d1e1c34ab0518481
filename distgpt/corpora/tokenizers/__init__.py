"""Tokenizers that are learned or come from elsewhere: byte-level BPE, those of tokenizer.json and the hub.

Not here: bytes (core/data/tokenizers.py), the files to learn from (corpora/prepare/tokenized.py).
"""
