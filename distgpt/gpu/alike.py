"""What was chosen by timing, the same on all equal GPUs of a job, so that the unluckiest sets no pace."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from distgpt.gpu.device import CupyDevice
from distgpt.gpu.matmul import LtMatmul

Gather = Callable[[bytes], list[bytes]]  # every rank's bytes, in the order of the ranks. Collective


def choose_alike(gather: Gather, device: CupyDevice, matmuls: LtMatmul) -> None:
    """Choose as the first rank with an equal GPU, which keeps its own choices. Collective.

    Only what was timed on both: ranks may have rows of their own number. What was recorded with another
    choice is recorded anew.
    """
    own = {"gpu": _kind(device, matmuls), "algorithms": matmuls.chosen(), "ways": _ways(device)}
    first = next(
        each for each in map(json.loads, gather(json.dumps(own).encode())) if each["gpu"] == own["gpu"]
    )
    ways = {key: first["ways"].get(str(key), chosen) for key, chosen in device.choices.items()}
    other_ways = ways != device.choices
    device.choices.update(ways)
    if matmuls.adopt(first["algorithms"]) or other_ways:
        device.record_anew()


def _kind(device: CupyDevice, matmuls: LtMatmul) -> list[Any]:
    """Where choices of one process are good for another: as JSON gives it back."""
    return [device.name, *device.capability, device.multiprocessors, device.memory()[1], *matmuls.about]


def _ways(device: CupyDevice) -> dict[str, int]:
    return {str(key): chosen for key, chosen in device.choices.items()}
