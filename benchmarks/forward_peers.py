"""The forward-pass study in plain Python and PyTorch, with distgpt's weights and names."""

from __future__ import annotations

import tempfile
import time
from typing import Any

import microgpt_plain_python as plain
import numpy as np
from forward_work import Job, bundled_names, initialised, sequences, tokens_of
from peer_process import ask_peer, for_torch

from distgpt.core.base.errors import UsageError
from distgpt.core.base.formatting import count
from distgpt.core.comm.resources import peak_memory, usable_cores
from distgpt.core.config.presets import preset as preset_named
from distgpt.core.model.counts import operations
from distgpt.core.model.model import Architecture
from distgpt.core.ops.kernels import Kernels

MOST_NAMES = 512  # per batch of PyTorch, the same as in the study


def measure_plain(job: Job) -> dict[str, Any]:
    """Measure one pass in plain Python. Raise UsageError if it would take longer than `patience`."""
    expected = python_seconds(job.preset, job.names)
    if expected > job.patience:
        within = int(job.names * job.patience / expected)
        way = f"--names {within} fits into the {job.patience:g} s of --patience"
        raise UsageError(
            f"plain Python would take about {expected:,.0f} s for {count(job.names, 'name')} "
            f"of {job.preset}; {way if within else 'raise --patience'}, or omit --method python"
        )
    model = initialised(job.preset, Kernels("float64"))
    weights = {name: values.tolist() for name, values in model.params.items()}
    shape = plain.Shape(model.config.n_layer, model.config.n_head, model.config.norm_eps)
    names = [tokens_of(name) for name in bundled_names(job.names)]
    begun = time.perf_counter()
    loss = plain.mean_loss(weights, shape, names)
    took = time.perf_counter() - begun
    found = {"measured": job.names, "seconds": took, "all_seconds": [took], "loss": loss}
    return found | {"peak_memory": [peak_memory()], "ranks": 1, "threads": 1}


def python_seconds(name: str, names: int) -> float:
    """Estimate the seconds of plain Python by timing a long dot product."""
    many = [1.0] * (1 << 16)
    begun = time.perf_counter()
    plain.dot(many, many)
    product = (time.perf_counter() - begun) / len(many)
    flops = operations(Architecture(preset_named(name).model)).forward
    return product * sequences(names).predictions * flops / 2


def measure_torch(peer: str, job: Job) -> dict[str, Any]:
    model, every = initialised(job.preset, Kernels("float64")), sequences(job.names)
    with tempfile.TemporaryDirectory() as scratch:
        files = {what: f"{scratch}/{what}.npz" for what in ("weights", "names")}
        weights: dict[str, Any] = {name: np.array(values) for name, values in model.params.items()}
        np.savez(files["weights"], **weights)
        np.savez(files["names"], tokens=every.tokens, lengths=every.lengths)
        request = {
            "shape": for_torch(model.config),
            "threads": job.threads or len(usable_cores()),
            "dtype": job.dtype,
            "most": 1 if job.method == "torch" else MOST_NAMES,
            "repeats": job.repeats,
            "patience": job.patience,
        }
        return ask_peer(peer, "names", {**request, **files}) | {"ranks": 1}
