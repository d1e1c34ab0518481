"""Check the weights: they are finite before they are saved, and all ranks have the same."""

from __future__ import annotations

from zlib import crc32

from distgpt.core.base.errors import DistgptError, NonFiniteError
from distgpt.core.comm.agree import shared
from distgpt.core.train.run import Run


def refuse_non_finite_weights(run: Run) -> None:
    """Before saving: weights that no loss was computed with yet must not replace good ones. Collective."""
    if run.comm.allreduce_max(not run.model.is_finite()):
        raise shared(
            NonFiniteError(
                f"the weights are not finite after step {run.progress.step}; "
                "a lower --lr may help; earlier checkpoints are kept"
            )
        )


def refuse_different_weights(run: Run) -> None:
    """All ranks must hold the same weights, to the bit, as far as all of them hold any. Collective."""
    common = run.model.params if run.optimizer.is_part else run.model.weights
    own = crc32(run.model.kernels.to_host(common.flat).data.cast("B"))
    if run.comm.allreduce_max(own) != -run.comm.allreduce_max(-own):
        raise shared(
            DistgptError(f"the ranks' weights differ after step {run.progress.step}; are all nodes alike?")
        )
