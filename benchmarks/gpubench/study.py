"""The forward-pass study: the mean loss over thousands of names, against PyTorch in equal-length batches."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from distgpt.config import ModelConfig
from distgpt.corpus.reading import bundled
from distgpt.evaluation.equal_lengths import mean_loss
from distgpt.model import Model
from distgpt.presets import preset
from gpubench.section import Section
from gpubench.training import for_torch

NAMES = {"S": 2000, "M": 5000, "L": 10000, "VL": 20000, "XL": 30000}
MOST = 512  # names in a batch of PyTorch's, as in the study
MOST_TOKENS = 1 << 18  # predictions in a batch of ours
BOUNDARY = 0  # the token at both ends of a name
AGREE = 1e-4  # relative


def sequences(count: int) -> list[Any]:
    """Names drawn from the bundled ones, the same in every run."""
    names = bundled("data", "names.txt").read_text().split()
    drawn = np.random.default_rng(11).choice(len(names), count)
    return [
        np.array([BOUNDARY, *(ord(letter) - ord("a") + 1 for letter in names[i]), BOUNDARY]) for i in drawn
    ]


def study(section: Section) -> None:
    for name, count in reversed(NAMES.items()):
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


def _preset(section: Section, name: str, shape: ModelConfig, names: list[Any]) -> None:
    repeats = 1 if section.quick else 5
    losses: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        theirs = _theirs(section, name, shape, names, Path(scratch), repeats)
    for who, how in {"float32": {}, "TF32": {"tf32": True}, "bfloat16": {}}.items():
        with section.report.attempt(f"{name}: ours, {who}"):
            kernels = section.machine.kernels("float32" if who == "TF32" else who, **how)
            model = Model(shape, kernels)
            model.initialise(1)
            work = partial(mean_loss, model, names, MOST_TOKENS)
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
                names=len(names),
            )
    if theirs is not None and "float32" in losses:
        distance = abs(losses["float32"] / theirs - 1)
        section.report.row(f"{name}/ours, float32", loss_distance=distance)
        if not distance < AGREE:
            section.report.error(name, f"the losses differ: {losses['float32']} and {theirs}")


def _theirs(
    section: Section, name: str, shape: ModelConfig, names: list[Any], scratch: Path, repeats: int
) -> float | None:
    """Fills PyTorch's rows; its loss with the very same weights."""
    if section.python is None:
        section.report.note("no PyTorch: nothing to compare with")
        return None
    model = Model(shape, section.machine.kernels("float32"))
    model.initialise(1)
    weights = {each: np.array(model.kernels.to_host(values)) for each, values in model.params.items()}
    np.savez(scratch / "weights.npz", **weights)
    lengths = [len(each) for each in names]
    np.savez(scratch / "names.npz", tokens=np.concatenate(names), lengths=lengths)
    loss = None
    request = {
        "do": "study",
        "shape": for_torch(shape),
        "weights": str(scratch / "weights.npz"),
        "names": str(scratch / "names.npz"),
        "most": MOST,
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
