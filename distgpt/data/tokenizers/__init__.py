"""Tokenizers: byte, char, word and byte-level BPE, by name, from files, or learned from texts.

Not here: reading the files to learn from (data/prepare/learn.py), downloads (data/hub.py).
"""
