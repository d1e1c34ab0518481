"""Tokenizers: byte, char, word and byte-level BPE, by name or from files.

Not here: learning a vocabulary from texts (data/prepare/learn.py), downloads (data/hub.py).
"""
