"""The core: everything that a plain `distgpt train` and `distgpt infer` need.

Not here: optional features. `components.py` lists the replaceable parts, and `distgpt/assembly.py` replaces
them. Directories from the ground up: base, config, ops, comm, cpu, data, model, saved, generate, train. Each
imports only from earlier ones.
"""
