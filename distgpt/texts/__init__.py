"""Texts beyond plain files: chats/, tokenizers/ that are learned or come from elsewhere, prepare/ for shards.

Not here: plain texts, shards and batches (core/data/).
"""
