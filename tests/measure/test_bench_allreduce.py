"""`distgpt bench allreduce`: sums over real ranks are checked, timed and saved."""

import json
import os
import threading
from itertools import product
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from distgpt.commands.bench import allreduce as command_line
from distgpt.core.base.errors import DistgptError
from distgpt.measure.bench.allreduce import AllreduceOptions, algorithms, array_size, blocks, measure
from threadranks import on_all_ranks

from conftest import ci_ranks, distgpt, needs_mpi, succeeded

QUICK = ["--sizes", "8,1K,300K", "--repeats", "4", "--seconds", "60"]


def check_rows(found, algorithms, ranks):
    sizes = [8, 1024, 300 * 1024]
    assert [(row["bytes"], row["algorithm"]) for row in found["rows"]] == [*product(sizes, algorithms)]
    for row in found["rows"]:
        assert 0 < row["min_seconds"] <= row["seconds"] and row["repeats"] in (3, 4)
        assert row["bytes_per_s"] == pytest.approx(row["bytes"] / row["seconds"])
        assert row["bus_bytes_per_s"] == pytest.approx(row["bytes_per_s"] * 2 * (ranks - 1) / ranks)


@pytest.mark.ci
@needs_mpi
def test_allreduce_bench_starts_ranks_and_saves(tmp_path):
    result = succeeded("bench", "allreduce", *QUICK, "--out", tmp_path, by=distgpt)
    assert "300 KiB" in result.stdout and "2 ranks on one machine" in result.stdout
    found = json.loads((tmp_path / "allreduce-mpi-2.json").read_text())
    assert found["kind"] == "allreduce" and found["environment"]["cores"] > 0 and found["library"]
    check_rows(found, ["allreduce", "shared memory"], 2)
    assert found["nodes"] == 1 and found["cores_per_rank"] == min(2, found["environment"]["cores"] / 2)


@ci_ranks
def test_launched_allreduce_bench_uses_its_ranks(tmp_path):
    words = [*QUICK, "--algorithms", "allreduce", "--json", "--name", "three", "--out", tmp_path]
    (line,) = succeeded("bench", "allreduce", *words, ranks=3, by=distgpt).stdout.splitlines()
    found = json.loads(line)
    assert found["ranks"] == found["ranks_per_node"] == 3
    check_rows(found, ["allreduce"], 3)
    assert json.loads((tmp_path / "allreduce-three.json").read_text())["rows"] == found["rows"]


@ci_ranks
@pytest.mark.parametrize("words, code, named", [
    (["--ranks", "1"], 2, "at least 2 ranks"),
    (["--sizes", "8,x"], 2, "'x'"),
    (["--sizes", "6"], 2, "multiple of 4"),
    (["--max-bytes", "2T"], 2, "'2T'"),
    (["--launcher", "no-such-launcher"], 2, "no-such-launcher"),
    (["--launcher", "false", "--out", "file"], 74, "file"),
    (["--algorithms", "nccl", "--ranks", "2"], 2, "'nccl' is not one of allreduce"),  # printed once
    *((["--seconds", seconds], 2, "--seconds") for seconds in ("inf", "nan", "0")),
])  # fmt: skip
def test_allreduce_bench_rejects_mistakes_before_measuring(words, code, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    result = CliRunner().invoke(command_line, ["--out", "out", *words])
    error = result.exception
    found = (error.exit_code, str(error)) if isinstance(error, DistgptError) else (result.exit_code, result.stderr)
    assert found[0] == code and named in found[1] and not list(tmp_path.rglob("*.json"))


def test_allreduce_sizes():
    assert AllreduceOptions(sizes="64K,8,64K").array_sizes() == [65536, 8]
    assert AllreduceOptions(max_bytes="2K").array_sizes() == [8, 32, 128, 512, 2048]
    assert AllreduceOptions(max_bytes="4").array_sizes() == [4]
    assert AllreduceOptions().array_sizes()[-2:] == [128 << 20, 256 << 20]
    assert [array_size("", words) for words in ("8", "64K", "2 MiB", "1g")] == [8, 65536, 2 << 20, 1 << 30]


def test_wrong_sum_raises_on_every_rank():
    def act(comm, is_wrong):
        comm.sum = (lambda array: None) if is_wrong else comm.sum
        return measure_without_mpi(comm, "allreduce", AllreduceOptions(sizes="8,4096", repeats=3, seconds=5))

    assert [len(rows) for rows in on_all_ranks(2, lambda comm: act(comm, False))] == [2, 2]
    for error in on_all_ranks(2, lambda comm: act(comm, True)):
        assert isinstance(error, DistgptError) and "is wrong" in str(error)


def measure_without_mpi(comm, names, plan, memory=1 << 40):
    here = SimpleNamespace(name="mpi", comm=comm, device=None, on_gpu=False, free_memory=lambda: (memory, "here"))
    table, _ = algorithms(here, names)
    return list(measure(here, table, plan))


def test_allreduce_bench_skips_sizes_beyond_memory_or_time():
    plan = AllreduceOptions(sizes="64,1024,1048576", repeats=3, seconds=5)
    for rank_0_has, largest in ((1 << 40, 1 << 20), (3 << 10, 1024)):
        rows = on_all_ranks(
            2, lambda comm, has=rank_0_has: measure_without_mpi(comm, "allreduce", plan, 1 << 40 if comm.rank else has)
        )[1]
        assert max(row["bytes"] for row in rows if "left_out" not in row) == largest
        assert [row["left_out"] for row in rows if row["bytes"] > largest] == ["memory"] * (largest == 1024)
    hurried = AllreduceOptions(sizes="1048576,64,16777216", repeats=3, seconds=0.0)  # the first has time in any case
    rows = on_all_ranks(2, lambda c: measure_without_mpi(c, "allreduce", hurried))[0]
    assert [row.get("left_out") for row in rows] == [None, "time", "time"]
    uneven = {"ranks": 3, "nodes": 2, "library": "M", "left_out": {"nccl": "none here"}, "rows": []}
    table, *notes = blocks(uneven | {"not_measured": rows[1:]})
    assert table.caption == "3 ranks on 2 hosts, M" and notes == [
        "nccl skipped: none here",
        "allreduce not measured, because there is not enough time: 64 B, 16 MiB",
    ]


@pytest.mark.parametrize("ranks, per_node", [(2, 2), (4, 2)])
def test_all_ranks_skip_unshareable_sizes(ranks, per_node, monkeypatch):
    here, real = threading.local(), os.ftruncate

    def too_large_on_the_last_node(descriptor, size):
        if here.rank == ranks - per_node and size > 1 << 20:
            raise OSError(28, "No space left on device")
        real(descriptor, size)

    def act(comm):
        here.rank = comm.rank
        name = "shared memory" if per_node == ranks else "hierarchical"
        return measure_without_mpi(comm, name, AllreduceOptions(sizes="64,4194304,128", repeats=3, seconds=5))

    monkeypatch.setattr(os, "ftruncate", too_large_on_the_last_node)
    for rows in on_all_ranks(ranks, act, per_node):
        assert [row["bytes"] for row in rows] == [64, 4194304, 128]
        assert [row.get("left_out") for row in rows] == [None, "memory", None]
