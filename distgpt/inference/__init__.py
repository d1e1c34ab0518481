"""Generates text from weights: loops, prompts and chats, the server, scores.

Not here: the plain engine (core/generate), and how weights are stored (models).
"""
