"""Learned and third-party tokenizers: byte-level BPE, tokenizer.json, and the Hugging Face Hub.

The byte tokenizer is in core/data/tokenizers.py, learning from files in corpora/prepare/tokenized.py.
"""
