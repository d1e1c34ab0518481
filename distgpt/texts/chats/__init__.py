"""Chats: from messages to tokens by a model's template, and rows of chats to learn from.

Not here: tokenizers, which keep the template (texts/tokenizers/), chats in a terminal (generation/chat.py).
"""
