"""From documents to token shards, in parallel, in bounded memory, resumable; also training of tokenizers.

The shard format and its reader are in corpora/shards.py.
"""
