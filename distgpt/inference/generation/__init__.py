"""Text beyond one prompt: files of prompts, chats in a terminal.

Not here: the engine (core/generate/), HTTP (serving/).
"""
