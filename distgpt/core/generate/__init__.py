"""Text generation: cached sequences, sampling, concurrent requests, `distgpt infer`.

Not here: operations (core/ops/, core/cpu/), passes over a batch (core/model/), and HTTP (serving/).
"""
