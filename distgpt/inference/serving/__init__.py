"""`distgpt serve`: the engine behind HTTP, in OpenAI's shapes, with a page to try it.

Not here: the engine and which model it runs (core/generate/), the options (commands/generate.py).
"""
