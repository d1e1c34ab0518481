"""Jobs of the processes of `distgpt bench node`: each opens a stage once, and does several of them.

Rank 0 prints a JSON object for each job as soon as it is done, so that one that is ended for lack of time has
not worked in vain.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from distgpt.core.base.errors import DistgptError
from distgpt.core.base.system import host_id
from distgpt.core.comm.agree import gather_bytes, gather_ints, on_root
from distgpt.core.config import RunConfig
from distgpt.core.config.presets import preset
from distgpt.core.cpu.stages import Stage, open_stage
from distgpt.core.data.batches import ArrayTokens, Batches
from distgpt.core.data.textfile import read_text, resolve_data
from distgpt.core.train.setup import make_steps
from distgpt.core.train.step import Step
from distgpt.doctor.speed import SECONDS, measure_peaks
from distgpt.energy.counters import Meter, opened_zones

Row = dict[str, Any]
BYTES = 256  # the vocabulary of a preset that has none
WARM_UP, LEAST, MOST = 2, 2, 200  # steps that compile and record, and those that count
ENOUGH = 20.0  # seconds of training, also where there is time for more
TEXT = "story"  # which comes with distgpt
# The run whose bits are compared, whole: no default of another version may change it. Eight parts of a batch
# are summed in one order on 1, 2, 4 or 8 ranks.
PARTS = 8
BITS: dict[str, Any] = {
    "n_layer": 2,
    "n_head": 4,
    "n_kv_head": 4,
    "n_embd": 64,
    "mlp_width": 192,
    "seq_len": 64,
    "vocab_size": BYTES,
    "vocab_multiple": 1,
    "positions": "rope",
    "norm": "rmsnorm",
    "mlp": "swiglu",
    "bias": False,
    "dtype": "float32",
    "optimizer": "adamw",
    "lr": 3e-3,
    "schedule": "constant",
    "warmup": 0,
    "weight_decay": 0.1,
    "clip": 1.0,
    "batch_size": 2 * PARTS,
    "reproducible_parts": PARTS,
    "seed": 1,
    "steps": 20,
}


def measure(asked: str) -> None:
    """Do the jobs of a request, one after the other; they share the seconds that it gives. Collective."""
    request: Row = json.loads(asked)
    stage = open_stage(request["stage"], request["threads"])
    end = time.monotonic() + request["until"] - time.time()  # rank 0's clock decides, here and later
    wanted = request["jobs"]
    _tell(stage, {"starting_s": time.time() - request["begun"]})
    for done, job in enumerate(wanted):
        left = on_root(stage.comm, lambda: max(0.0, end - time.monotonic()))
        seconds = left / (len(wanted) - done)
        how = {key: value for key, value in job.items() if key != "kind"}
        try:
            found = JOBS[job["kind"]](stage, seconds, **how)
        except DistgptError as error:
            if stage.comm.size > 1 and not error.shared:  # the other ranks wait for this one
                raise
            found = {"failed": str(error)}
        _tell(stage, {"kind": job["kind"], **_where(stage), **found})


def _tell(stage: Stage, row: Row) -> None:
    if stage.comm.rank == 0:
        print(json.dumps(row), flush=True)


def _where(stage: Stage) -> Row:
    hosts = {text.decode() for text in gather_bytes(stage.comm, host_id().encode())}
    return {"ranks": stage.comm.size, "threads": stage.threads, "hosts": len(hosts)}


def peak(stage: Stage, seconds: float, dtype: str) -> Row:
    """Measure matmuls and memory, of all ranks at once."""
    kernels = stage.kernels(dtype, use="matmul")
    own = measure_peaks(kernels, min(seconds, SECONDS), stage.comm.barrier)
    gflops, gbytes = (
        sum(gather_ints(stage.comm, round(1e3 * number))) / 1e3 for number in (own.gflops, own.gbytes_per_s)
    )
    return {"dtype": dtype, "gflops": gflops, "gbytes_per_s": gbytes}


def run_of(name: str, settings: Row) -> RunConfig:
    """Return a preset's run; one that takes its vocabulary from a text has that of bytes."""
    run = preset(name, settings)
    return run if run.model.vocab_size else run.with_values({"vocab_size": BYTES})


def train(stage: Stage, seconds: float, name: str, dtype: str, settings: Row) -> Row:
    """Time steps of a preset on random tokens, about as long as `seconds`."""
    run = run_of(name, settings | {"dtype": dtype})
    end = time.monotonic() + min(seconds, ENOUGH)
    step = _steps(stage, run)
    ids = np.random.default_rng(1).integers(0, run.model.vocab_size, 1 << 16, np.uint32)
    batches = Batches.of_run(ArrayTokens(ids), run)
    done = 0

    def once() -> float:
        nonlocal done
        begun = time.perf_counter()
        step.launch(done, batches).read()
        done += 1
        return time.perf_counter() - begun

    warm = [once() for _ in range(WARM_UP)]
    fit = on_root(stage.comm, lambda: int((end - time.monotonic()) / warm[-1]))
    reads = stage.comm.local_rank == 0  # one rank of each host
    meter = Meter(opened_zones()[0] if reads else [])
    times = [once() for _ in range(min(MOST, max(LEAST, fit)))]
    tokens = run.train.batch_size * run.model.seq_len
    found = {
        "preset": name,
        "dtype": dtype,
        "batch_size": run.train.batch_size,
        "seq_len": run.model.seq_len,
        "parameters": step.model.layout.elements,
        "steps": len(times),
        "step_s": median(times),
        "tokens_per_s": tokens / median(times),
    }
    joules = _of_all_hosts(stage, meter.read(), reads)
    return found | ({"joules_per_token": joules / (tokens * len(times))} if joules is not None else {})


def _of_all_hosts(stage: Stage, joules: float | None, reads: bool) -> float | None:
    """Return the sum over those who read; None where one of them does not know. Collective."""
    own = -1 if joules is None else round(1e6 * joules)
    found = gather_ints(stage.comm, own if reads else 0)
    return None if min(found) < 0 else sum(found) / 1e6


def bits(stage: Stage, seconds: float) -> Row:
    """Take a few steps of a fixed run, and return the losses and what its weights are then."""
    run = preset("tiny-adamw", BITS)
    step = _steps(stage, run)
    text = np.frombuffer(read_text(resolve_data(TEXT)).encode(), np.uint8)
    batches = Batches.of_run(ArrayTokens(text.astype(np.uint16)), run)
    losses = [step.launch(number, batches).read()[0] for number in range(run.train.steps)]
    weights = step.model.kernels.to_host(step.model.params.flat)
    digest = hashlib.sha256(np.ascontiguousarray(weights).data.cast("B")).hexdigest()
    return {"losses": losses, "weights": digest}


def _steps(stage: Stage, run: RunConfig) -> Step:
    return make_steps(run, stage, lambda line: None)


JOBS: dict[str, Callable[..., Row]] = {"bits": bits, "peak": peak, "train": train}
