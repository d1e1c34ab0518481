"""The forward-pass study: the mean loss over thousands of names, against PyTorch in equal-length batches."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from distgpt.config import ModelConfig
from distgpt.config.presets import preset
from distgpt.measure.bench.forward import MOST_ROWS_ON_GPU, MeanLoss, Sequences, sequences
from distgpt.measure.bench.study import MOST_NAMES
from distgpt.measure.jobs import for_torch
from distgpt.measure.published import NAMES, SERIES
from distgpt.model.model import Model
from gpubench.section import Section

AGREE = 1e-4  # relative


def study(section: Section) -> None:
    for name in reversed(SERIES["joint"]):
        count = NAMES[name]
        shape = preset(name).model
        if section.quick:
            count = 30
            shape = replace(shape, n_layer=min(2, shape.n_layer), n_embd=24, n_head=3, seq_len=32)
        elif section.report.left < 12:
            section.report.note(f"{name} and what follows: no time left")
            break
        with section.report.attempt(name):
            _preset(section, name, shape, sequences(count))
        section.free()
    section.close()


def _preset(section: Section, name: str, shape: ModelConfig, names: Sequences) -> None:
    repeats = 1 if section.quick else 5
    losses: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        theirs = _theirs(section, name, shape, names, Path(scratch), repeats)
    for who, how in {"float32": {}, "TF32": {"tf32": True}, "bfloat16": {}}.items():
        with section.report.attempt(f"{name}: ours, {who}"):
            kernels = section.machine.kernels("float32" if who == "TF32" else who, **how)
            model = Model(shape, kernels)
            model.initialise(1)
            work = partial(MeanLoss(model, MOST_ROWS_ON_GPU), names)
            work()
            seconds = []
            for _ in range(repeats):
                began = time.perf_counter()
                losses[who] = work()
                seconds.append(time.perf_counter() - began)
            section.report.row(
                f"{name}/ours, {who}",
                seconds=statistics.median(seconds),
                all_seconds=seconds,
                loss=losses[who],
                names=len(names.lengths),
            )
    if theirs is not None and "float32" in losses:
        distance = abs(losses["float32"] / theirs - 1)
        section.report.row(f"{name}/ours, float32", loss_distance=distance)
        if not distance < AGREE:
            section.report.error(name, f"the losses differ: {losses['float32']} and {theirs}")


def _theirs(
    section: Section, name: str, shape: ModelConfig, names: Sequences, scratch: Path, repeats: int
) -> float | None:
    """Fills PyTorch's rows; its loss with the very same weights."""
    if section.python is None:
        section.report.note("no PyTorch: nothing to compare with")
        return None
    model = Model(shape, section.machine.kernels("float32"))
    model.initialise(1)
    weights = {each: np.array(model.kernels.to_host(values)) for each, values in model.params.items()}
    np.savez(scratch / "weights.npz", **weights)
    np.savez(scratch / "names.npz", tokens=names.tokens, lengths=names.lengths)
    loss = None
    request = {
        "do": "study",
        "shape": for_torch(shape),
        "weights": str(scratch / "weights.npz"),
        "names": str(scratch / "names.npz"),
        "most": MOST_NAMES,
        "repeats": repeats,
    }
    for who, tf32 in {"float32": False, "TF32": True}.items():
        for answer in section.start_peers({"PyTorch": request | {"tf32": tf32}}, timeout=60).values():
            section.report.row(
                f"{name}/PyTorch, {who}",
                seconds=statistics.median(answer["seconds"]),
                all_seconds=answer["seconds"],
                loss=answer["loss"],
            )
            loss = answer["loss"] if who == "float32" else loss
    return loss
