"""From texts to batches: reading, tokenizers, token shards, and the seeded order of windows.

Tokenizers lie in tokenizers/, what turns texts into shards in prepare/.
Not here: how the ranks use batches (training/), and what validation makes of them (evaluation/).
"""
