"""From text to batches: text files, tokenizers, and the seeded order of windows.

Not here: other tokenizers and kinds of text (corpora/), and how ranks use batches (train/).
"""
