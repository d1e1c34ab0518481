"""Models in other formats: transformers and PEFT here, llama.cpp in gguf/.

distgpt's own files are in core/saved/.
"""
