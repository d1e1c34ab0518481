"""From documents to token shards, in parallel, in bounded memory, resumable; and vocabularies out of texts.

Not here: reading shards again (data/shards.py).
"""
