"""`distgpt serve`: the engine behind HTTP, in OpenAI's shapes, with a page to try it.

Not here: the engine (inference/), which model it runs (infer.py), the options (commands/serve.py).
"""
