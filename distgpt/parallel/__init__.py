"""Ways to share a step among ranks, beside one Allreduce after the backward pass.

An exchange (`core/train/sharing.py`) is what a step calls; a reduction (`reductions.py`) is how it sums a
range of the flat buffer; a placement (`sharded.py`, `local_steps.py`) is who holds which weights and moments.
`choose.py` finds each by the settings. Not here: MPI (`core/comm/`), NCCL (`gpu/`), the step.
"""
