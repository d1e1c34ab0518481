"""Texts beyond plain files: chats/, tokenizers/ that are learned or come from elsewhere, shards and prepare/.

Not here: a text in a file, bytes, and batches (core/data/).
"""
