"""The course project's published figures of its four stages, to stand beside what is measured here."""

from __future__ import annotations

from typing import Any

from distgpt.machine.stages import STAGES
from distgpt.show.charts import Bar, BarChart
from distgpt.show.page import Table

PRESET = "gpt-mini"
EPOCHS = 50  # each of one batch, so that an epoch is a step
TOKENS_PER_EPOCH = 16 * 256

EPOCHS_SHOWN = (0, 10, 20, 30, 40, 49)

TRAINING = {"serial": 15264.36, "mpi": 1287.76, "cuda": 429.44, "mpi-cuda": 226.39}  # seconds
MPI_BY_TEXT = 12878.0  # seconds of the same training
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

# 12,878 s are 16 % less than serial's 15,264 s, as its text has it; 1,287.76 s would be 11.9 times as fast.
MPI_NOTE = (
    "The project's table gives 1,287.76 s for MPI, its text 12,878 s and “about 15 % faster than serial”,"
    " which only the second figure is: one of the two has its decimal point in the wrong place."
)
TEXT_NOTE = (
    "The project trained on a text of its own: its losses compare with ours in their course, not in value."
)


def drift() -> float:
    """How far the published losses of any stage lie from serial's, relative to those."""
    return max(abs(loss - row["serial"]) / row["serial"] for row in LOSSES.values() for loss in row.values())


def tokens_per_s(stage: str) -> float:
    return EPOCHS * TOKENS_PER_EPOCH / TRAINING[stage]


def figures() -> dict[str, Any]:
    """All of it, for a result file."""
    return {
        "source": "the course project's report",
        "hardware": HARDWARE,
        "epochs": EPOCHS,
        "training_s": TRAINING,
        "inference_s": INFERENCE,
        "losses": LOSSES,
        "notes": [MPI_NOTE, TEXT_NOTE],
    }


def runtimes(ours: dict[str, float]) -> Table:
    """The published figures, and the speeds measured here, in tokens/s by stage, as multiples of theirs."""
    rows = []
    for stage in STAGES:
        trained, wrote, rate = TRAINING[stage], INFERENCE[stage], tokens_per_s(stage)
        ups = TRAINING["serial"] / trained, INFERENCE["serial"] / wrote
        cells = [f"{trained:,.2f}", f"{ups[0]:.2f}", f"{wrote:.2f}", f"{ups[1]:.2f}", f"{rate:,.1f}"]
        rows.append([stage, *cells, f"{ours[stage] / rate:,.0f}" if stage in ours else "–"])
    columns = ("stage", "train s", "× serial", "infer s", "× serial", "tokens/s", "here ×")
    note = (
        f"All {EPOCHS} epochs, on {HARDWARE}; tokens/s follow from these seconds, and"
        f" “here ×” is the speed of this machine, another one, as a multiple of that. {MPI_NOTE}"
    )
    return Table(columns, rows, "Published by the course project", note)


def chart() -> BarChart:
    base, bars = TRAINING["serial"], []
    for stage in STAGES:
        text = f"{base / TRAINING[stage]:.2f} ×"
        disputed = f", by its text {base / MPI_BY_TEXT:.2f} ×" if stage == "mpi" else ""
        bars.append(Bar(stage, base / TRAINING[stage], text + disputed))
    description = "; ".join(f"{bar.label} {bar.text}" for bar in bars) + f". {MPI_NOTE}"
    title = "Speed-up of training over serial, as published"
    return BarChart(title, description, "times as fast as serial", bars)
