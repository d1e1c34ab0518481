"""Chats: from messages to tokens by a model's template, and examples for training.

Tokenizers, which store the template, are in corpora/tokenizers, chats in a terminal in inference.
"""
