"""`distgpt bench allreduce` where arrays lie on GPUs; two ranks of one stand-in where there is none."""

import json

from conftest import needs_mpi
from devices import ON_GPU
from test_cli_on_gpu import gpu

__all__ = ["gpu"]


@needs_mpi
def test_each_exchange_is_timed_or_named_with_the_reason(gpu, tmp_path):
    words = ["--stage", "mpi-cuda", "--sizes", "8,70000", "--repeats", "3", "--seconds", "5"]
    result = gpu("bench", "allreduce", *words, "--out", tmp_path, "--json", ranks=2)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found == {
        k: v
        for k, v in json.loads((tmp_path / "allreduce-mpi-cuda-2.json").read_text()).items()
        if k in found
    }
    timed = {row["algorithm"] for row in found["rows"]}
    assert {"host", "host-chunked"} <= timed
    assert timed | found["left_out"].keys() == {"nccl", "host", "host-chunked", "cuda-aware"}
    assert {row["bytes"] for row in found["rows"]} == {8, 70000}
    assert all(row["seconds"] > 0 for row in found["rows"])
    if not ON_GPU:
        assert "a GPU for every rank" in found["left_out"]["nccl"]
        assert "can't read GPUs" in found["left_out"]["cuda-aware"]


@needs_mpi
def test_an_exchange_that_nobody_has_is_refused(gpu):
    result = gpu("bench", "allreduce", "--stage", "mpi-cuda", "--algorithms", "packed", ranks=2)
    assert result.returncode == 2 and "nccl, host" in result.stderr
