"""The course project's published figures, to stand beside ours."""

from __future__ import annotations

from typing import Any

PRESET = "gpt-mini"
EPOCHS = 50  # each of one batch, so that an epoch is a step
TOKENS_PER_EPOCH = 16 * 256

TRAINING = {"serial": 15264.36, "mpi": 1287.76, "cuda": 429.44, "mpi-cuda": 226.39}  # seconds
INFERENCE = {"serial": 112.62, "mpi": 112.28, "cuda": 8.01, "mpi-cuda": 7.80}

LOSSES = {  # before the step of that number, counted from 0
    0: {"serial": 5.168, "mpi": 5.201, "cuda": 5.168, "mpi-cuda": 5.168},
    10: {"serial": 3.287, "mpi": 3.287, "cuda": 3.601, "mpi-cuda": 3.812},
    20: {"serial": 2.058, "mpi": 2.068, "cuda": 2.356, "mpi-cuda": 2.561},
    30: {"serial": 1.385, "mpi": 1.471, "cuda": 1.567, "mpi-cuda": 1.745},
    40: {"serial": 1.059, "mpi": 1.210, "cuda": 1.152, "mpi-cuda": 1.321},
    49: {"serial": 0.908, "mpi": 1.072, "cuda": 0.938, "mpi-cuda": 1.081},
}

HARDWARE = "two laptops with a 4-core i7-7820HQ, a Quadro M1200 and 16 GB each; MPI with 8 ranks on both"
MPI_NOTE = "MPI took 1,287.76 s by the project's table, 12,878 s and “15 % faster than serial” by its text."
TEXT_NOTE = (
    "The project trained on a text of its own: its losses compare with ours in their course, not in value."
)


def tokens_per_s(stage: str) -> float:
    return EPOCHS * TOKENS_PER_EPOCH / TRAINING[stage]


def figures() -> dict[str, Any]:
    """Return all of the project's figures, for a result file."""
    return {
        "source": "the course project's report",
        "hardware": HARDWARE,
        "epochs": EPOCHS,
        "training_s": TRAINING,
        "inference_s": INFERENCE,
        "losses": LOSSES,
        "notes": [MPI_NOTE, TEXT_NOTE],
    }
