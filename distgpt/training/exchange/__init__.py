"""Ways to add up the gradients of ranks: after the backward pass, during it, in parts, or once in many steps.

An exchange (`api.py`) is what a step calls; a reduction (`reductions.py`) is how it sums a stretch of the
flat buffer; `choose.py` makes both from the settings, `trial.py` tries several. Not here: MPI (`comm/`),
NCCL (`gpu/`), the step.
"""
