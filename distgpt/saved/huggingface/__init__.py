"""Models to and from the files that the transformers library reads: GPT-2 and Llama."""
