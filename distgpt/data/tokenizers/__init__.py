"""Tokenizers: byte, char, word and byte-level BPE, by name or from files.

Not here: what learns a vocabulary from texts (data/prepare/).
"""
