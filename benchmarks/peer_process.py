"""Run another program of peers/ in a Python that has PyTorch but maybe not distgpt.

A mode lists PyTorch's switches, for example compile+keep-freed. An empty mode is eager.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distgpt.cluster.jobs.processes import run
from distgpt.core.base.errors import StorageError, UsageError
from distgpt.core.config import ModelConfig, RunConfig
from distgpt.measure.jobs import answer, unsteered

PEERS = Path(__file__).resolve().parent / "peers"

# keep_freed: glibc keeps freed memory, which is faster and uses more. compile: torch.compile; autotune: also
# tries all matmuls. autocast: rounds float32 weights when they are used, instead of copying them to bfloat16
# after each update. chunked_head: less memory for a large vocabulary.
SWITCHES = ("keep_freed", "compile", "autotune", "autocast", "chunked_head")
EAGER, BEST = "eager", "best"


def ask_peer(
    python: str, command: str, request: Mapping[str, Any], program: str = "peer_torch", ranks: int = 1
) -> dict[str, Any]:
    """Return the JSON object that the program prints. torchrun starts multiple ranks."""
    several = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    words = [python, *several, PEERS / f"{program}.py", command, json.dumps(request)]
    return answer(run(words, env=unsteered()), f"{program}'s {command}")


def torch_version(python: str) -> str | None:
    """Return the version of PyTorch in this Python, or None."""
    try:
        found = run([python, "-c", "import torch; print(torch.__version__)"], env=unsteered(), timeout=120)
    except StorageError:
        return None
    return found.output.strip() if found.code == 0 else None


def refuse_without_torch(option: str, python: str) -> None:
    if torch_version(python) is None:
        raise UsageError(f"{option} {Path(python).name} cannot import torch: name a Python that can")


def for_torch(shape: ModelConfig) -> dict[str, Any]:
    """Return the architecture as arguments of the peer's Shape. Raise UsageError for unsupported settings."""
    of_its_own = shape.head_dim or shape.qkv_bias or shape.rope_scaling != "none" or any(shape.windows)
    tables = shape.value_embeddings or shape.previous_embedding
    if shape.qk_norm or tables or shape.mlp == "relu2" or of_its_own:
        raise UsageError(
            "the model in PyTorch has no qk_norm, value or previous embeddings, relu2, head_dim, qkv_bias,"
            " rope_scaling, window: see --preset tiny-adamw"
        )
    return asdict(shape)


def training(run: RunConfig, mode: str, threads: int, steps: int) -> dict[str, Any]:
    """Return a request to train the same model in PyTorch with the same batch size on random tokens."""
    t = run.train
    keys = ("batch_size", "lr", "weight_decay", "clip", "beta1", "beta2", "eps", "dtype")
    return {
        "shape": for_torch(run.model),
        "threads": threads,
        "steps": steps,
        "schedule": "linear" if t.schedule == "linear" else "constant",
        **{key: getattr(t, key) for key in keys},
        **switches(mode),
    }


def switches(mode: str) -> dict[str, bool]:
    """Return all switches of a mode. Raise UsageError for an unknown one."""
    names = [] if mode == EAGER else mode.replace("-", "_").split("+")
    for name in names:
        if name not in SWITCHES:
            known = ", ".join(each.replace("_", "-") for each in SWITCHES)
            raise UsageError(
                f"--peer-mode {name!r:.40}: modes are {EAGER}, {BEST}, or some of {known}, joined by +"
            )
    return {name: name in names for name in SWITCHES}


def candidates(dtype: str) -> list[str]:
    """Return the modes that were the fastest one in any measurement."""
    modes = ["keep-freed", "compile+keep-freed", "autotune+keep-freed"]
    return modes + [f"{mode}+autocast" for mode in modes] if dtype == "bfloat16" else modes
