"""Training data beyond plain text: chats/, tokenizers/, token shards, and prepare/, which makes them.

Plain text files, the byte tokenizer and batches are in core/data/.
"""
