"""The core: everything that a plain `distgpt train` and `distgpt infer` need.

`components.py` lists the replaceable parts, and `distgpt/assembly.py` replaces them with the optional
features. Directories from the ground up: base, config, ops, comm, cpu, data, model, saved, generate, train.
Each imports only from the directories before it.
"""
