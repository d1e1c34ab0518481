"""The core: all that a plain `distgpt train` and `distgpt infer` need, to be read alone.

Not here: what is optional. That hangs on it, and is never imported by name: `distgpt/components.py` names
it, `base/tables.py` finds it. Folders from the ground up: base, config, ops, comm, cpu, data, model, saved,
generate, train; each imports only from those before it.
"""
