"""From a text to batches: a file's text, tokenizers, and the seeded order of windows.

Not here: other tokenizers and kinds of text (texts/), how the ranks use batches (train/).
"""
