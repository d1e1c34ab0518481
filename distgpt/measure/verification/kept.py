"""Records in a run's history, at each start, the facts besides settings that its results depend on bitwise.

`note` is a component of a run (`components.py`). It is called once the run is open, before its callbacks are
made.
"""

from __future__ import annotations

import platform
import sys
from dataclasses import asdict, dataclass, field
from functools import cache
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any

from distgpt.core.base import __version__
from distgpt.core.base.checked import Count, checked
from distgpt.core.comm.agree import gather
from distgpt.core.saved.tensors import fingerprint
from distgpt.core.train.run import Run

KEY = "bits"  # key of the event in history.jsonl
PACKAGE = Path(__file__).parents[2]
# These directories and files change no bit of a step. They show, serve, measure, install or start runs.
ELSEWHERE = {
    PACKAGE / name
    for name in (
        *("callbacks/exporter.py", "callbacks/structured.py", "cluster", "commands", "inference"),
        *("measure", "models/formats", "show"),
    )
}
LIBRARIES = ("numpy", "numba", "llvmlite")


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts that determine a process's results bitwise. Lists are in rank order."""

    sources: str  # a checksum of the files that compute
    versions: dict[str, str]
    processors: list[str]  # each kind once; GPUs in a GPU stage
    threads: list[Count]  # 0: GPU
    nodes: list[Count]  # ranks on each host
    matmul: str  # the matmul implementation, and the BLAS
    exchange: str  # how gradients are summed, as far as the start determines it
    transport: str
    mpi: str
    micro_batches: Count
    recompute: str
    data: str  # the fingerprint of the training text
    init: str = ""  # the checksum of the --init file of a new run
    gpu: dict[str, str] = field(default_factory=dict)  # GPU options that affect results

    @property
    def ranks(self) -> int:
        return len(self.threads)

    @staticmethod
    def from_json(document: dict[str, Any]) -> Facts:
        """Read a document, or raise a ValueError. Keys of later versions are ignored."""
        return checked(Facts, {name: document[name] for name in Facts.__slots__ if name in document})


def note(run: Run) -> None:
    """Write the facts to the run's history. Collective."""
    run.report.remember({"step": run.progress.step, KEY: asdict(facts_of(run))})


def facts_of(run: Run) -> Facts:
    """Return the facts of an open run. Collective."""
    t, comm = run.settings, run.comm
    stage: Any = run.stage
    kernels: Any = run.model.kernels
    on_gpu = stage.on_gpu
    ranks = gather(comm, (str(stage.device.name) if on_gpu else processor_kind(), stage.threads))
    hosts = gather(comm, platform.node())
    loaded = {name: str(sys.modules[name].__version__) for name in LIBRARIES if name in sys.modules}
    init = t.init if t.init and run.start is None and comm.rank == 0 else ""
    return Facts(
        sources=sources() if comm.rank == 0 else "",  # only rank 0 writes facts
        versions={"distgpt": __version__, **(_gpu_libraries() if on_gpu else loaded)},
        processors=list(dict.fromkeys(processor for processor, _ in ranks)),
        threads=[threads for _, threads in ranks],
        nodes=[len(list(of_host)) for _, of_host in groupby(hosts)],
        matmul="" if on_gpu else _matmul(kernels),
        exchange=run.gradient_sync.name,
        transport=stage.transport,
        mpi=str(run.where.get("mpi", "")),
        micro_batches=t.grad_accum,
        recompute=t.recompute,
        data=run.batches.fingerprint,
        init=fingerprint(Path(init)) if init else "",
        gpu={name: str(value) for name, value in asdict(stage.gpu).items()} if on_gpu else {},
    )


@cache
def sources() -> str:
    """Return a checksum of the package files that compute (250 files, 20 ms)."""
    result = sha256()
    for path in sorted(PACKAGE.rglob("*")):
        if path.suffix in (".py", ".cu") and ELSEWHERE.isdisjoint((path, *path.parents)):
            result.update(path.name.encode() + b"\0" + path.read_bytes())
    return result.hexdigest()[:16]


def processor_kind() -> str:
    """Return the processor that loops are compiled for, a checksum of its features, and AMX if used."""
    from distgpt.core.cpu.compiling.processor import processor, shape

    name, features = processor()
    return f"{name}-{sha256(features.encode()).hexdigest()[:8]}{'-amx' * shape().amx}"


def _gpu_libraries() -> dict[str, str]:
    from distgpt.gpu import probe

    result = probe.driver()
    return {**probe.packages(), "driver": result.release if result else ""}


def _matmul(kernels: Any) -> str:
    """Name the matmul implementation, and the BLAS, which Muon uses in any case."""
    from distgpt.core.cpu.matmul.blas import blas_core_name

    return f"{kernels.matmuls.words}; BLAS for {blas_core_name() or 'any processor'}"
