"""How the ranks' gradients become one: a sum over ranks on the flat buffer, then a factor of 1/world_size."""

from __future__ import annotations

from distgpt.comm.api import Comm
from distgpt.kernels.api import Array


def packed(comm: Comm, gradients: Array) -> float:
    """One Allreduce in place. Returns the factor still to be applied: the optimizer does so for free."""
    comm.sum(gradients)
    return 1.0 / comm.size


def chunked(comm: Comm, gradients: Array) -> float:
    """The same in pieces that stay in cache, which is faster where ranks share a machine."""
    comm.sum_chunked(gradients)
    return 1.0 / comm.size


GRAD_SYNCS = {"packed": packed, "chunked": chunked}
