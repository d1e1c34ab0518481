"""From texts to batches: reading, tokenizers, token shards, and the seeded order of windows.

Tokenizers are in tokenizers/, making shards and vocabularies from texts in prepare/.
Not here: how the ranks use batches (training/), and how validation uses them (evaluation/).
"""
