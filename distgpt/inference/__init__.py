"""Text from a model: sequences in a cache, the choice of tokens, requests side by side, `distgpt infer`.

Not here: operations (kernels/), passes over a batch (model/), HTTP (serving/).
"""
