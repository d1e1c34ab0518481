"""When the same bits are promised, by what is kept of a run: no device is needed to say so of a GPU."""

from dataclasses import fields, replace

import pytest
from distgpt.core.config import SETTINGS, TrainConfig
from distgpt.measure.verification.kept import ELSEWHERE, PACKAGE, Facts
from distgpt.measure.verification.records import NEUTRAL, Side, why_rounding

ONE = Facts(
    sources="1",
    versions={"distgpt": "1.0", "numpy": "2.0"},
    processors=["znver4-1"],
    threads=[4],
    nodes=[1],
    matmul="own kernels",
    exchange="alone",
    transport="",
    mpi="",
    micro_batches=1,
    recompute="mlp",
    data="crc32:1",
)
FOUR = replace(ONE, threads=[1] * 4, nodes=[2, 2], exchange="allreduce", mpi="MPICH 4")
GPU = replace(ONE, threads=[0], processors=["H100"], matmul="", gpu={"deterministic": "True"})
CONFIG = TrainConfig()
PARTS = replace(CONFIG, reproducible_parts=8)
SHARDED = replace(PARTS, optimizer="muon", grad_sync="sharded")


def reasons(one, other, t=CONFIG, now=None):
    return "; ".join(why_rounding(Side(one, t, "in the run"), Side(other, now or t, "here")))


@pytest.mark.parametrize(
    "one, other, how",
    [
        (ONE, replace(ONE, data="2", recompute="none", versions={**ONE.versions, "distgpt": "2"}), {}),
        (FOUR, FOUR, {}),
        (FOUR, replace(ONE, threads=[8]), {"t": PARTS}),
        (FOUR, FOUR, {"t": SHARDED}),
        (GPU, GPU, {}),
    ],
)
def test_promised(one, other, how):
    assert reasons(one, other, **how) == reasons(other, one, **how) == ""


@pytest.mark.parametrize(
    "one, other, says, how",
    [
        (None, ONE, "no record of the environment in the run", {}),
        (ONE, replace(ONE, sources="2"), "sources: 1 in the run, 2 here", {"t": PARTS}),
        (ONE, replace(ONE, versions={"distgpt": "1.0", "numpy": "3"}), "numpy: 2.0 in the run, 3 here", {}),
        (ONE, replace(ONE, processors=["znver5-2"]), "processors: 1 × znver4-1 in the run, 1 × znver5-2", {}),
        (ONE, replace(ONE, matmul="BLAS"), "matmul: own kernels in the run, BLAS here", {"t": PARTS}),
        (ONE, ONE, "float32 in the run, bfloat16 here", {"now": replace(CONFIG, dtype="bfloat16")}),
        (ONE, FOUR, "threads: 1 × 4 in the run, 4 × 1 here", {}),
        (ONE, FOUR, "threads: 1 × 4 in the run, 4 × 1 here", {"t": PARTS, "now": CONFIG}),
        (ONE, replace(ONE, micro_batches=2), "micro_batches: 1 in the run, 2 here", {}),
        (FOUR, replace(FOUR, exchange="overlapped"), "exchange: allreduce in the run, overlapped here", {}),
        (FOUR, replace(FOUR, mpi="Open MPI 5"), "mpi: MPICH 4 in the run, Open MPI 5 here", {}),
        (FOUR, replace(FOUR, nodes=[4]), "nodes: 2 × 2 in the run, 1 × 4 here", {}),
        (FOUR, FOUR, "measures the ranks", {"t": replace(CONFIG, balance="auto")}),
        (ONE, FOUR, "threads", {"t": SHARDED}),
        (FOUR, FOUR, "grad_sync", {"t": SHARDED, "now": replace(SHARDED, grad_sync="allreduce")}),
        (GPU, ONE, "gpu: ", {"t": PARTS}),
        (*[replace(GPU, gpu={"deterministic": "False"})] * 2, "without --deterministic", {}),
        (GPU, replace(GPU, recompute="all"), "recompute: mlp in the run, all here", {}),
        (replace(ONE, processors=["a", "b"]), replace(ONE, processors=["a", "b"]), "different kinds", {}),
    ],
)
def test_rounding_is_expected_and_why(one, other, says, how):
    assert says in reasons(one, other, **how)


def test_folders_named_as_elsewhere_exist():
    assert all(path.exists() for path in ELSEWHERE) and PACKAGE / "core" not in ELSEWHERE


def test_what_is_shown_and_saved_changes_no_step():
    beside = {name for name, about in SETTINGS.items() if about.group in ("saving", "display")}
    assert {"keep", "sample_every"} < beside <= NEUTRAL <= {each.name for each in fields(TrainConfig)}
