"""Batch generation from a file of prompts, and chat in a terminal.

The engine is in core/generate/, HTTP in serving/.
"""
