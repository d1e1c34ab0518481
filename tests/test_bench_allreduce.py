"""`distgpt bench allreduce`: real sums over real ranks, checked, timed and written down."""

import json
import os
import pty
import subprocess
import sys
from types import SimpleNamespace

import pytest
from conftest import MPIRUN, command, distgpt, needs_mpi, refused
from threadranks import on_all_ranks

from distgpt.errors import DistgptError, UsageError
from distgpt.measure.bench.allreduce import Plan, allreduce, measure, sizes_up_to, ways
from distgpt.measure.bench.allreduce_page import (
    Wanted,
    byte_count,
    duration,
    heading,
    left_out,
    shown,
    size_in_words,
)
from distgpt.measure.bench.report import assemble
from distgpt.measure.bench.results import load_all

QUICK = ["--sizes", "8,1K,300K", "--repeats", "4", "--seconds", "60"]


def stage(comm, memory=1 << 40):
    return SimpleNamespace(name="mpi", comm=comm, device=None, free_memory=lambda: (memory, "here"))


def check_rows(found, algorithms, ranks):
    sizes = [8, 1024, 300 * 1024]
    assert [(row["bytes"], row["algorithm"]) for row in found["rows"]] == [
        (size, name) for size in sizes for name in algorithms
    ]
    for row in found["rows"]:
        assert 0 < row["min_seconds"] <= row["seconds"] and row["repeats"] in (3, 4)
        assert row["bytes_per_s"] == pytest.approx(row["bytes"] / row["seconds"])
        assert row["bus_bytes_per_s"] == pytest.approx(row["bytes_per_s"] * 2 * (ranks - 1) / ranks)


@needs_mpi
def test_it_starts_ranks_and_leaves_a_file_and_a_picture(tmp_path):
    result = distgpt("bench", "allreduce", *QUICK, "--out", tmp_path)
    assert result.returncode == 0, result.stderr
    assert "300 KiB" in result.stdout and "2 ranks on one machine" in result.stdout
    found = json.loads((tmp_path / "allreduce-mpi-2.json").read_text())
    assert found["kind"] == "allreduce" and found["environment"]["cores"] > 0 and found["library"]
    check_rows(found, ["packed", "chunked"], 2)
    assert found["nodes"] == 1 and found["cores_per_rank"] == min(2, found["environment"]["cores"] / 2)
    page = assemble(*load_all(tmp_path), [])
    assert "Sums over ranks: mpi-2" in page and "Left out" not in page
    assert "<svg" in (tmp_path / "allreduce-mpi-2.svg").read_text()


@needs_mpi
def test_launched_it_measures_as_these_ranks(tmp_path):
    words = [*QUICK, "--algorithms", "packed", "--json", "--name", "three", "--out", tmp_path]
    result = distgpt("bench", "allreduce", *words, ranks=3)
    assert result.returncode == 0, result.stderr
    (line,) = result.stdout.splitlines()
    found = json.loads(line)
    assert found["ranks"] == found["ranks_per_node"] == 3
    check_rows(found, ["packed"], 3)
    assert json.loads((tmp_path / "allreduce-three.json").read_text())["rows"] == found["rows"]


@needs_mpi
def test_what_the_ranks_refuse_is_said_once(tmp_path):
    refused(distgpt("bench", "allreduce", "--algorithms", "nccl", "--out", tmp_path), 2, "'nccl'", "packed")
    assert not any(tmp_path.iterdir())


@needs_mpi
def test_a_rank_that_is_killed_is_told_in_the_launchers_words(tmp_path):
    script, dies = tmp_path / "start", tmp_path / "dies.py"
    dies.write_text("import os\nfrom mpi4py import MPI\nMPI.COMM_WORLD.rank and os.kill(os.getpid(), 9)\n")
    script.write_text(f"#!/bin/sh\nexec {MPIRUN} -n 2 {sys.executable} {dies}\n")
    script.chmod(0o755)
    result = distgpt("bench", "allreduce", "--launcher", script, "--out", tmp_path / "out")
    refused(result, 70, "on 2 ranks", "ended", "Killed")
    assert "FAQ" not in result.stderr


def test_a_folder_that_cannot_be_written_to_is_told_before_anything_is_measured(tmp_path):
    (tmp_path / "file").touch()
    words = ["--launcher", "false", "--out", tmp_path / "file"]
    refused(distgpt("bench", "allreduce", *words), 74, "file")


@needs_mpi
def test_somebody_who_watches_is_told_each_size(tmp_path):
    ours, theirs = pty.openpty()
    words = command(
        "bench", "allreduce", "--sizes", "1K,8", "--algorithms", "packed", "--json", "--out", tmp_path
    )
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=theirs, text=True) as watched:
        os.close(theirs)
        found = json.loads(watched.stdout.read())
    told = os.read(ours, 1 << 16).decode().splitlines()
    os.close(ours)
    assert [line.partition(":")[0] for line in told[:2]] == ["1 KiB, packed", "8 B, packed"]  # as in --sizes
    assert [row["bytes"] for row in found["rows"]] == [8, 1024]


@pytest.mark.parametrize(
    "words, told",
    [
        (["--ranks", "1"], "nobody"),
        (["--sizes", "8,x"], "'x'"),
        (["--sizes", "6"], "multiple of 4"),
        (["--max-bytes", "2T"], "'2T'"),
        (["--launcher", "no-such-launcher"], "no-such-launcher"),
    ],
)
def test_options_that_make_no_sense_are_refused(words, told, tmp_path):
    refused(distgpt("bench", "allreduce", "--out", tmp_path, *words), 2, told)


@pytest.mark.parametrize("seconds", ["inf", "nan", "0"])
def test_time_is_a_finite_number(seconds):
    result = distgpt("bench", "allreduce", "--seconds", seconds)
    assert result.returncode == 2 and "--seconds" in result.stderr


def test_hosts_are_counted_and_not_divided():
    uneven = {"ranks": 3, "nodes": 2, "ranks_per_node": 2, "library": "M"}
    assert heading(uneven) == "3 ranks on 2 hosts, M"
    assert heading({**uneven, "nodes": 1}) == "3 ranks on one machine, M"
    assert Wanted(sizes="64K,8,64K").bytes() == [65536, 8]


def test_sizes_and_words():
    assert sizes_up_to(40) == [8, 32, 40] and sizes_up_to(128) == [8, 32, 128]
    assert sizes_up_to(256 << 20)[-2:] == [128 << 20, 256 << 20]
    assert [size_in_words("", text) for text in ("8", "64K", "2 MiB", "1g")] == [8, 65536, 2 << 20, 1 << 30]
    assert [byte_count(n) for n in (8, 1536, 256 << 20)] == ["8 B", "1.5 KiB", "256 MiB"]
    assert [duration(s) for s in (2.5, 0.0123, 4.56e-6, 1e-9)] == ["2.5 s", "12.3 ms", "4.56 µs", "1 ns"]


def test_a_sum_that_comes_out_wrong_is_an_error_on_every_rank():
    """Ranks that are threads have no chunked sum: their arrays stay as they are."""
    plan = Plan([8, 4096], repeats=3, seconds=5)
    good = on_all_ranks(2, lambda comm: allreduce_without_mpi(comm, ["packed"], plan))
    assert [len(rows) for rows in good] == [2, 2]
    for error in on_all_ranks(2, lambda comm: allreduce_without_mpi(comm, ["chunked"], plan)):
        assert isinstance(error, DistgptError) and "came out wrong" in str(error)


def allreduce_without_mpi(comm, names, plan, memory=1 << 40):
    here = stage(comm, memory)
    table, _ = ways(here, names)
    return list(measure(here, table, plan))


def test_what_does_not_fit_into_memory_or_time_is_left_out_and_named():
    plan = Plan([64, 1024, 1 << 20], repeats=3, seconds=5)
    for rank_0_has, largest in ((1 << 40, 1 << 20), (3 << 10, 1024)):
        rows = on_all_ranks(
            2,
            lambda comm, has=rank_0_has: allreduce_without_mpi(
                comm, ["packed"], plan, 1 << 40 if comm.rank else has
            ),
        )[1]
        assert max(row["bytes"] for row in rows if "left_out" not in row) == largest
        assert [row["left_out"] for row in rows if row["bytes"] > largest] == ["memory"] * (largest == 1024)
    hurried = Plan([1 << 20, 64, 1 << 24], repeats=3, seconds=0.0)  # the first has its time in any case
    rows = on_all_ranks(2, lambda c: allreduce_without_mpi(c, ["packed"], hurried))[0]
    assert [row.get("left_out") for row in rows] == [None, "time", "time"]
    told = left_out({"left_out": {"nccl": "none here"}, "not_measured": rows[1:]})
    assert told == ["nccl left out: none here", "packed not measured for lack of time: 64 B, 16 MiB"]


def test_the_table_names_what_is_left_out():
    row = {"algorithm": "packed", "bytes": 8, "left_out": "memory"}
    facts = {"ranks": 2, "nodes": 1, "library": "M", "rows": [], "left_out": {}, "not_measured": [row]}
    assert shown(facts).endswith("packed not measured for lack of memory: 8 B")


def test_one_rank_alone_is_refused():
    for error in on_all_ranks(1, lambda comm: allreduce(stage(comm), [], Plan([8]), print)):
        assert isinstance(error, UsageError) and "2 ranks" in str(error)
