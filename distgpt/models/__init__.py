"""Weights in other forms: adapters, quantized weights, Hugging Face and GGUF files.

Not here: the architecture itself (core/model), and the project's own files (core/saved).
"""
