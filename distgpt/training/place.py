"""Where a rank is in its run, for a thread that looks on: after which step, doing what, since when."""

from __future__ import annotations

import time

STARTING, COMPUTING, EXCHANGING, UPDATING = "starting", "computing", "in the exchange", "updating"
EVALUATING, SAVING, SAMPLING = "evaluating", "saving", "writing a sample"


class Place:
    """Written by the main thread alone. `marks` grows with everything that it begins."""

    def __init__(self) -> None:
        self.step, self.marks = 0, 0
        self.enter(STARTING)

    def enter(self, doing: str) -> None:
        self.doing, self.since = doing, time.monotonic()
        self.marks += 1
