"""Models of other programs: transformers and PEFT here, llama.cpp in gguf/.

Not here: our own files (core/saved/).
"""
