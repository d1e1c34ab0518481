"""The watchdog's last resort for a stuck main thread: save if the weights are at rest, and end the job."""

from __future__ import annotations

import os

from distgpt.core.base.errors import DistgptError
from distgpt.core.base.interrupts import Interrupted
from distgpt.core.comm.job import ending, say
from distgpt.core.train.progress import EVALUATING, EXCHANGING
from distgpt.core.train.run import Run
from distgpt.core.train.summary import how_to_resume, write_stopped


def save_and_exit(run: Run, ended: Interrupted | DistgptError) -> None:
    """Save the last finished step from the watchdog's thread, and end the job.

    In an exchange the weights are those of the last finished step. From here on nobody changes them.
    """
    try:
        is_locked = not run.model.kernels.capabilities.is_async and run.step.weights_lock.acquire(timeout=1)
        if is_locked and run.checkpoints.has_all and run.activity.doing in (EXCHANGING, EVALUATING):
            run.progress.evaluation_pending |= run.activity.doing == EVALUATING
            run.checkpoints.write_now(run.state())
            run.directory.write_metrics()
        ended.add_note(how_to_resume(run))
        write_stopped(run, ended)
        run.directory.lock.release()
    except Exception as error:
        ended.add_note(f"nothing more was saved: {error}")
    say(ending(ended))
    run.comm.abort(ended.exit_code)
    os._exit(ended.exit_code)  # where MPI is not what ends it
