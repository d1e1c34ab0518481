"""Tokenizers: byte, char, word, byte-level BPE and those of tokenizer.json, by name, from files, or learned.

Not here: reading the files to learn from (data/prepare/learn.py), downloads (hub.py).
"""
