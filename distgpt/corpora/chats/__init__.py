"""Chats: from messages to tokens by a model's template, and rows of chats to learn from.

Not here: tokenizers, which keep the template (corpora/tokenizers), and chats in a terminal (inference).
"""
