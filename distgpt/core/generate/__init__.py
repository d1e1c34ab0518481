"""Text from a model: sequences in a cache, the choice of tokens, requests side by side, `distgpt infer`.

Not here: operations (core/ops/, core/cpu/), passes over a batch (core/model/), HTTP (serving/).
"""
