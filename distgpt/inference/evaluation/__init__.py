"""The quality of a model: the loss of spans of text, validation, HellaSwag, and `distgpt eval`'s report.

Not here: the loss of a training step (core/train/), and the benchmark of forward passes (measure/bench/).
"""
