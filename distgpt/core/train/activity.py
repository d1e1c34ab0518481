"""The activity of a rank's main thread, for whoever has to say where a run is stuck."""

from __future__ import annotations

import time

STARTING, COMPUTING, EXCHANGING, UPDATING = "starting", "computing", "in the exchange", "updating"
EVALUATING, SAVING, SAMPLING = "evaluating", "saving", "writing a sample"


class Activity:
    """Says what the main thread does, after which step, and since when. It alone writes this.

    `count` is the number of activities it has begun.
    """

    def __init__(self) -> None:
        self.step, self.count = 0, 0
        self.enter(STARTING)

    def enter(self, doing: str) -> None:
        self.doing, self.since = doing, time.monotonic()
        self.count += 1
