"""Guard against a disk that fails, or a run directory that is gone, while the run goes on."""

from __future__ import annotations

from distgpt.comm.agree import on_root
from distgpt.training.run import Run


def check_disk(run: Run, has_lost_disk: bool) -> None:
    """End the run if rank 0 cannot save any more; retry a save that has failed. Collective."""
    if has_lost_disk:
        on_root(run.comm, run.checkpoints.raise_fatal)
    if run.comm.rank == 0:
        run.checkpoints.poll()
