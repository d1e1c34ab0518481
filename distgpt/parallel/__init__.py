"""Strategies to share a step among ranks, in addition to one Allreduce after the backward pass.

A step calls a `GradientSync` (`core/train/parallel_strategy.py`). A reduction (`reductions.py`) sums a range
of the flat buffer. A placement (`sharded.py`, `local_steps.py`) assigns weights and moments to ranks.
`choose.py` selects each by the settings. Not here: MPI (`core/comm/`), NCCL (`gpu/`), the step.
"""
