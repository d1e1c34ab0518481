"""Tokenizers that are learned or come from elsewhere: byte-level BPE, those of tokenizer.json and the hub.

Not here: byte, char and word (core/data/plain.py), the files to learn from (texts/prepare/learn.py).
"""
