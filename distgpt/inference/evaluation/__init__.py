"""Evaluation of a model: loss of spans of text, validation, benchmarks, and the report of `distgpt eval`.

The training loss is in core/train/, the benchmark of forward passes in measure/bench/.
"""
