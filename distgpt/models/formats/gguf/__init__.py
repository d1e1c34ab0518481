"""GGUF, the format of llama.cpp: container, types, names, tokenizers, import and export.

The lists of tensors come from families.py and are renamed here.
"""
