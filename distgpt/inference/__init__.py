"""Text generation from a model, its server, and evaluation.

The plain engine is in core/generate, storage of weights in models.
"""
