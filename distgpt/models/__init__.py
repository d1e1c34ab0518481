"""Adapters, quantized weights, and Hugging Face and GGUF files.

The architecture is in core/model, distgpt's own files in core/saved.
"""
