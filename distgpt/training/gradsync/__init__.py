"""How gradients are summed over ranks: in one call, within nodes first, during the backward pass, by parts.

A way (`ways.py`) says how a stretch of the flat buffer is summed; a schedule (`schedules.py`), when, and who
has the sums then. Not here: MPI itself (`comm/`), NCCL (`gpu/`), the step that calls this (`step.py`).
"""
