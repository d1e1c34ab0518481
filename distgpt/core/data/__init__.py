"""From a text to batches: reading, plain tokenizers, token shards, and the seeded order of windows.

Not here: other tokenizers and kinds of text (texts/), how the ranks use batches (train/).
"""
