"""Text beyond one prompt: files of prompts, many sequences side by side on GPUs, chats in a terminal.

Not here: the engine (core/generate/), HTTP (serving/).
"""
