"""What a step would take by each way to exchange gradients, from an α–β model: predicted, at best.

With S(n) the seconds that the sum of n bytes takes, and B those of the backward pass:

| way                | exposed exchange                        |
|--------------------|-----------------------------------------|
| packed             | S(n)                                    |
| bfloat16           | S(n / 2)                                |
| overlapped         | the longer one of S(n) - B and S(bucket) |
| sharded            | S(n), and each rank updates a part      |
| local, H steps     | S(n) / H, and two sums of a few numbers |
"""

from __future__ import annotations

from collections.abc import Callable

from distgpt.model.model import flag_count
from distgpt.training.gradsync.schedules import BUCKET

ROUND = 16  # local steps
OF_PASS = 2 / 3  # of forward and backward pass, the latter's share

Sum = Callable[[float], float]  # seconds for so many bytes


def steps(
    passes: float, update: float, ranks: int, size: int, itemsize: int, summed: Sum
) -> dict[str, float]:
    """The seconds of a step by the words of its options; `passes` and `update` are those of one rank."""
    alone = passes + update
    if ranks == 1:
        return {"packed": alone}

    def overlapped(share: float) -> float:
        return max(summed(share * size) - OF_PASS * passes, summed(share * BUCKET * itemsize))

    few = flag_count(ranks) * itemsize  # what local steps exchange in every step
    return {
        "packed": alone + summed(size),
        "bfloat16": alone + summed(size / 2),
        "overlapped": alone + overlapped(1),
        "overlapped, bfloat16": alone + overlapped(0.5),
        "sharded": passes + update / ranks + summed(size),
        f"outer-every {ROUND}": alone + summed(size) / ROUND + 2 * summed(few),
    }
