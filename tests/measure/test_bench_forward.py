"""bench forward: every method on the same names and weights, and losses that have to agree."""

import json
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from benching import FEW, found_in, here
from click.testing import CliRunner
from conftest import distgpt, needs_mpi

from distgpt.comm.serial import SerialComm
from distgpt.commands.bench import forward as command_line
from distgpt.config.presets import preset
from distgpt.errors import DisagreementError, DistgptError, UsageError
from distgpt.kernels.cpu import CpuKernels
from distgpt.measure import timing
from distgpt.measure.bench.forward import (
    AGREE,
    COLUMNS,
    Benchmark,
    ForwardOptions,
    blocks,
    bundled_names,
    methods_and_launcher,
    refuse_different_losses,
    row_of,
    rows_at_once,
    sequences,
    tokens_of,
    with_speedups,
)
from distgpt.measure.published import NAMES
from distgpt.model.layers import Block
from distgpt.model.model import Model
from distgpt.show.page import tabulated
from distgpt.stages import Stage


def test_names_are_the_same_in_every_run_and_start_again_when_they_run_out():
    names = bundled_names(12_600)
    assert names[:3] == bundled_names(3) and names[12_515:] == names[:85]
    assert len(set(names[:12_515])) == 12_515
    assert tokens_of("abz") == [0, 1, 2, 26, 0]
    assert max(map(len, names)) + 1 <= preset("microgpt").model.seq_len  # the shortest context
    assert all(preset(name).model.vocab_size == 27 for name in NAMES)
    a, b = sequences(50).first(20), sequences(20)
    assert a.tokens.tolist() == b.tokens.tolist() and a.lengths.tolist() == b.lengths.tolist()


def test_methods_agree():
    reference = row_of(FEW, here(replace(FEW, dtype="float64"), threads=2)) | {"dtype": "float64"}
    for method, dtype in (("serial", "float64"), ("batched", "float32")):
        job = replace(FEW, method=method, dtype=dtype)
        found = row_of(job, here(job))
        refuse_different_losses([reference, found])
        assert found["measured"] == found["names"] == 90 and found["seconds"] > 0, method
        assert found["tokens"] == sum(len(name) + 1 for name in bundled_names(90))


def test_a_loss_that_is_another_ends_the_command():
    double = row_of(FEW, found_in(1.0, 90)) | {"dtype": "float64"}
    other = double | {"method": "torch", "dtype": "float32"}
    refuse_different_losses([double, other | {"loss": double["loss"] * (1 + AGREE["float32"] / 2)}])
    for loss in (double["loss"] * (1 + 2 * AGREE["float32"]), math.nan, math.inf):
        with pytest.raises(DisagreementError, match="torch in float32 finds a loss of"):
            refuse_different_losses([double, other | {"loss": loss}])
    with pytest.raises(DisagreementError):  # in double precision less is allowed
        refuse_different_losses([double, double | {"loss": double["loss"] * (1 + 1e-8)}])


def test_what_was_measured_on_a_part_is_scaled_by_its_predictions_and_compared_with_that_part():
    job = replace(FEW, method="serial", dtype="float64")
    part = here(replace(job, names=70))
    found = row_of(job, part)
    whole, some = sequences(90), sequences(70)
    share = (len(whole.tokens) - 90) / (len(some.tokens) - 70)
    assert found["seconds"] == pytest.approx(part["seconds"] * share) and found["measured"] == 70
    benchmark = benchmark_of(["serial"], kind=Here)
    benchmark.check_part(found)
    with pytest.raises(DisagreementError):
        benchmark.check_part(found | {"loss": found["loss"] * 1.001})


def test_patience_cuts_passes_and_then_names():
    for each, measured, passes in ((0.0, 500, 5), (0.2, 300, 1), (10.0, timing.PROBE, 1)):  # seconds a name
        found = timing.timed(float, 500, 5, 60.0, agreed=lambda took, each=each: each * timing.PROBE)
        assert (found["measured"], len(found["all_seconds"]), found["loss"]) == (measured, passes, measured)


def test_speedups_are_over_serial_on_the_same_work():
    work = ((10, "serial", 4.0), (10, "batched", 2.0), (20, "batched", 2.0))
    rows = [{"preset": "S", "names": n, "measured": n, "method": m, "seconds": s} for n, m, s in work]
    assert [r["speedup"] for r in with_speedups(rows)] == [1.0, 2.0, None]


@needs_mpi
def test_it_measures_prints_and_leaves_a_file(tmp_path):
    words = ["--preset", "microgpt", "--names", 60, "--repeats", 1, "--threads", 1]
    words += ["--method", "batched", "--method", "mpi", "--out", tmp_path]
    done = distgpt("bench", "forward", *map(str, words))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "forward-microgpt.json").read_text())
    assert found["kind"] == "forward"
    assert [(r["method"], r["names"], r["ranks"]) for r in found["rows"]] == [
        ("batched", 60, 1), ("mpi", 60, 2)
    ]  # fmt: skip
    losses = [r["loss"] for r in found["rows"]]
    assert losses == pytest.approx([losses[0]] * 2, rel=1e-5)
    assert re.search(r"microgpt +mpi +float32 +2 × 1", done.stdout)


class Here(Benchmark):
    """Measures in this process."""

    def measure(self, job):
        return here(job)


def benchmark_of(methods, dtypes=("float32",), kind=Benchmark):
    options = ForwardOptions(methods=methods, dtypes=dtypes, threads=1, repeats=1)
    return kind(options, methods)


def test_what_was_measured_on_a_part_of_the_names_is_marked():
    serial = row_of(replace(FEW, method="serial", dtype="float64"), found_in(8.0, measured=30))
    fast = row_of(FEW, found_in(1.0, measured=90)) | {"peak_gpu_memory": [3_000_000]}
    rows = with_speedups([serial, fast])
    shown = {cell[1]: cell for cell in tabulated(COLUMNS, rows).rows}
    assert [cell.endswith("*") for cell in shown["serial"]] == [False] * 4 + [True] + [False] * 3
    assert shown["batched"][4:8] == ["1.00", f"{rows[0]['seconds']:.1f}", "90", "5 + 3 GPU"]
    assert "30 of 90 names" in blocks({"rows": rows})[1].text


def test_every_type_and_every_method_that_was_asked_for_is_measured():
    jobs = benchmark_of(["serial", "batched", "cuda"], ["float32", "bfloat16"]).jobs("S", 2)
    assert [(job.method, job.dtype) for job in jobs] == [
        ("serial", "float64"),
        *((method, dtype) for method in ("batched", "cuda") for dtype in ("float32", "bfloat16")),
    ]
    for methods, dtypes in ((("serial", "batched"), ("bfloat16",)), (("serial",), ("float32",))):
        assert methods_and_launcher(ForwardOptions(methods=methods, dtypes=dtypes))[0] == list(methods)
    with pytest.raises(UsageError, match="--method python and serial computes in float64"):
        methods_and_launcher(ForwardOptions(methods=("python", "serial"), dtypes=("bfloat16", "float32")))


def test_a_batch_on_a_gpu_takes_half_of_what_is_free():
    model = Model(preset("XL").model, CpuKernels("float32", 1))
    widths = sum(Block.activations(model.config).values())

    def rows_with(free):
        device = SimpleNamespace(memory=lambda: (free, free), index=0, name="")
        return rows_at_once(model, Stage("cuda", SerialComm(), 0, device))

    assert rows_with(1 << 50) == 1 << 18 and rows_with(0) == 1
    free = 2 * (1 << 30)
    assert rows_with(free // 2) < rows_with(free) and 4 * widths * rows_with(free) < free / 2
    assert rows_at_once(model, Stage("serial", SerialComm(), 1)) == 1 << 10


def test_what_makes_no_sense_is_refused(tmp_path):
    for words, said in (
        (("--method", "serial", "--dtype", "bfloat16"), "--method serial computes"),
        (("--method", "batched", "--out", __file__), "cannot write to"),
    ):
        found = CliRunner().invoke(command_line, words)
        assert isinstance(found.exception, DistgptError) and said in str(found.exception)
