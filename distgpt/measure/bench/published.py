"""The forward-pass study: its methods, its presets, and the seconds it published for its own machine."""

from __future__ import annotations

# The ways to compute the same losses, in the order of the tables.
METHODS = ("python", "serial", "batched", "mpi", "cuda", "mpi-cuda", "torch", "torch-batched")
STAGE_OF = {"serial": "serial", "batched": "serial"} | {name: name for name in ("mpi", "cuda", "mpi-cuda")}
ONE_AT_A_TIME = ("python", "serial", "torch")

_PUBLISHED = ("torch", "torch-batched", "serial", "cuda")  # its UT, BT, SC (double) and PC (float)
_SECONDS = {
    "S": (2.30, 0.93, 0.50, 0.14),
    "M": (6.66, 1.07, 10.76, 0.25),
    "L": (23.32, 2.41, 189.75, 0.76),
    "VL": (64.90, 6.14, 1342.22, 3.06),
    "XL": (127.71, 13.46, 4771.83, 9.18),
    "MS5": (4.33, 0.92, 1.23, 0.20),
    "MM5": (6.81, 1.10, 10.76, 0.26),
    "ML5": (12.45, 2.37, 93.53, 0.50),
    "MVL5": (20.20, 5.79, 327.28, 1.07),
    "MXL5": (32.29, 12.34, 784.64, 2.10),
}
# How many names the study took; microgpt itself is none of its sizes.
NAMES = {"microgpt": 1000, "S": 2000, "M": 5000, "L": 10000, "VL": 20000, "XL": 30000}
NAMES |= {name: 5000 for name in _SECONDS if name not in NAMES}


def published(preset: str, method: str, names: int) -> float | None:
    """Seconds, where the study measured the same amount of work by this method."""
    if method not in _PUBLISHED or names != NAMES[preset] or preset not in _SECONDS:
        return None
    return _SECONDS[preset][_PUBLISHED.index(method)]
