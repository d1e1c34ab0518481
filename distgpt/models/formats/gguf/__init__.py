"""GGUF, the files of llama.cpp: the container, its types, the names in it, tokenizers, import and export.

Not here: what our models are in transformers (families.py), whose lists of tensors this renames.
"""
