"""From documents to token shards, in parallel, in bounded memory, resumable; and learning vocabularies.

Not here: the format of shards, and reading them (corpora/shards.py).
"""
