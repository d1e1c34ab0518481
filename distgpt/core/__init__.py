"""The core: all that a plain `distgpt train` and `distgpt infer` need, to be read alone.

Not here: what is optional. `components.py` lists what can be replaced, and `distgpt/assembly.py` replaces it.
Folders from the ground up: base, config, ops, comm, cpu, data, model, saved, generate, train; each imports
only from those before it.
"""
