"""`distgpt serve`: an HTTP server for the engine, compatible with OpenAI's API, with a web page.

The engine is in core/generate/, the command's options in commands/generate.py.
"""
